"""Which package may import which package and library: the table is in pyproject.toml, see ARCHITECTURE.md."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dflop"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS, EXTRAS = PROJECT["tool"]["importlinter"]["contracts"], PROJECT["project"]["optional-dependencies"]
MODULES = {"pillow": "PIL", "ruamel.yaml": "ruamel"}
PLAN = {MODULES.get(name, name) for text in EXTRAS["plan"] for name in text.split(">")[:1]}
OF_TRAINERS = {"psutil", "jinja2", "tokenizers", "PIL", "zstandard", "av", "scipy"}
"""Come with torch, transformers and accelerate, or are looked for by them."""
FILES = sorted(PACKAGE.rglob("*.py"))
TORCH_FILES_OF_MODELS = {
    "autograd.py", "build.py", "fused.py", "fusing.py", "loss.py", "attention.py", "encoders.py",
    "ways.py", "weights.py", "random_weights.py", "pixels.py",
    "offload.py", "hf_inputs.py", "stored_names.py", "matmuls.py", "float8.py",
    "lora.py", "low_rank.py", "adapter_specs.py",
}  # fmt: skip


def floors() -> dict[str, int]:
    """Layer of every package, the lowest is 0."""
    layers = next(contract["layers"] for contract in CONTRACTS if contract["id"] == "layers")
    return {name: floor for floor, names in enumerate(reversed(layers)) for name in names.split(" | ")}


def libraries() -> dict[str, set[str]]:
    """What every package may import of the libraries that are restricted."""
    found: dict[str, set[str]] = {name: set() for name in floors()}
    for contract in CONTRACTS:
        for importer in contract.get("allowed_importers", ()):
            if importer.startswith("dflop."):
                found[importer.removeprefix("dflop.")].update(contract["protected_modules"])
    return found


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted module, whether at module level) of every import in a file."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node in tree.body) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module), node in tree.body


def test_every_import_keeps_to_the_table():
    # In a process: it switches off the loggers of whoever calls it.
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_flash_attention_and_torchao_are_optional_and_torch_stays_in_a_few_files_of_models():
    found = {path: list(imports(path)) for path in FILES}
    optional = ("flash_attn", "torchao")
    assert [p for p, names in found.items() for name, at_top in names if at_top and name.startswith(optional)] == []
    with_torch = {
        path.name
        for path, names in found.items()
        if path.is_relative_to(PACKAGE / "models") and any(name.split(".")[0] == "torch" for name, _ in names)
        if path.parent.name != "generic" or path.name == "values.py"  # the others read transformers' classes
    }
    assert with_torch <= TORCH_FILES_OF_MODELS


def test_files_stay_small():
    lines = {p: len(p.read_text().splitlines()) for p in [*FILES, *(ROOT / "flows").glob("*.py")]}
    assert {str(p.relative_to(ROOT)): n for p, n in lines.items() if n > 400} == {}
    assert sorted(lines.values())[len(lines) // 2] <= 180


@pytest.mark.parametrize(
    ("blocked", "code"),
    [
        (
            [
                "pydantic",
                "polars",
                "duckdb",
                "ruamel",
                "prefect",
                "cvxpy",
                "submitit",
                "PIL",
                "av",
                "scipy",
                "pytest",
                "typing_inspection",
            ],
            "import tests.gpu.evidence",
        ),
        (
            [*PLAN, "torch", "transformers", "prefect"],
            "import dflop.cli, dflop.sampler.estimate, dflop.data.lengths_file, dflop.report.table_text",
        ),
        ([*(PLAN - OF_TRAINERS), "prefect"], "import dflop.sampler.hf, dflop.sampler.gradient_check"),
    ],
    ids=["a borrowed GPU", "pip install dflop", "and torch"],
)
def test_what_needs_little_needs_no_more(blocked, code):
    run_without(blocked, code)


def run_without(blocked: list[str], code: str) -> str:
    """What Python code prints where some packages are not installed."""
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
{code}
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_folder_is_a_package():
    """Of a folder that is none, lint-imports sees no import, and pytest puts its tests on the path."""
    folders = {file.parent for room in ("dflop", "tests") for file in (ROOT / room).rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []
