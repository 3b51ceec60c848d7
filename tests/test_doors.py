"""The doors of the house: which room may import which room, and which heavy library. See ARCHITECTURE.md."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dflop"

FLOORS = {
    "records": 0, "errors": 0, "units": 0,
    "config": 1, "resources": 1,
    "models": 2,
    "data": 3, "cost": 3, "simulate": 3,
    "schedule": 4, "correct": 4, "parallel": 4,
    "plan": 5, "profile": 5, "train": 5,
    "store": 6, "launch": 6, "report": 6,
    "jobs": 7, "sampler": 7,
    "cli": 8,
}  # fmt: skip
HEAVY = {
    "PIL", "av", "cvxpy", "cyclopts", "duckdb", "flash_attn", "jinja2", "matplotlib", "numba", "orjson", "polars",
    "prefect", "pyarrow", "pydantic", "rich", "ruamel", "scipy", "submitit", "tokenizers", "torch", "transformers",
}  # fmt: skip
ALLOWED: dict[str, set[str]] = {
    "records": set(), "errors": set(), "units": set(), "resources": set(),
    "config": {"pydantic", "ruamel"},
    "models": {"torch", "transformers", "flash_attn"},
    "data": {"polars", "PIL", "av", "tokenizers", "jinja2"},
    "cost": {"scipy"},
    "simulate": {"numba"},
    "schedule": {"cvxpy"},
    "correct": set(),
    "parallel": {"torch"},
    "plan": {"cvxpy"},
    "profile": {"torch"},
    "train": {"torch", "flash_attn"},
    "store": {"duckdb", "pyarrow", "polars"},
    "launch": {"submitit"},
    "report": {"matplotlib", "rich", "jinja2"},
    "jobs": {"torch", "pyarrow"}, "sampler": {"torch"},
    "cli": {"cyclopts", "rich", "prefect"},
}  # fmt: skip
PURE = {"cost", "simulate", "schedule", "correct", "plan"}
EFFECTS = {"asyncio", "datetime", "os", "random", "socket", "subprocess", "tempfile", "threading", "time", "urllib"}
TORCH_FILES_OF_MODELS = {
    "build.py", "slices.py", "attention.py", "encoders.py", "positions.py", "ways.py", "weights.py", "export.py",
    "taps.py",
}  # fmt: skip
SPOOL_FILES = ("store/__init__.py", "store/spool.py", "store/schema.py", "store/durable.py")

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int, bool]]:
    """(dotted module, line, whether at module level) of every import in a file."""
    tree = ast.parse(path.read_text())
    top = set(tree.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, node in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield str(node.module), node.lineno, node in top


def problems_of(path: Path) -> list[str]:
    room, found = room_of(path), []
    for name, line, at_top in imports(path):
        parts = name.split(".")
        where = f"{path.relative_to(ROOT)}:{line}: {name}"
        if parts[0] == "flows":
            found.append(f"{where}: nothing in dflop imports flows")
        if parts[0] == "dflop" and len(parts) > 1:
            other = parts[1]
            if other != room and FLOORS[other] >= FLOORS[room]:
                found.append(f"{where}: `{room}` (floor {FLOORS[room]}) may not import floor {FLOORS[other]}")
        if parts[0] in HEAVY and parts[0] not in ALLOWED[room]:
            found.append(f"{where}: not a library of `{room}`")
        if room in PURE and parts[0] in EFFECTS:
            found.append(f"{where}: `{room}` is pure: values in, values out")
        if parts[0] == "flash_attn" and at_top:
            found.append(f"{where}: only inside a function, it is optional")
        if room == "models" and parts[0] == "torch" and path.name not in TORCH_FILES_OF_MODELS:
            found.append(f"{where}: torch in models/ only in {', '.join(sorted(TORCH_FILES_OF_MODELS))}")
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(p) for p in FILES} - {"__init__"}
    assert rooms == set(FLOORS) == set(ALLOWED)


@pytest.mark.parametrize(
    "path", [p for p in FILES if p != PACKAGE / "__init__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_doors(path):
    assert problems_of(path) == []


def test_the_test_sees_a_forbidden_import(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_doors.PACKAGE", tmp_path)
    monkeypatch.setattr("tests.test_doors.ROOT", tmp_path)
    (tmp_path / "plan").mkdir()
    bad = tmp_path / "plan" / "bad.py"
    bad.write_text(
        "def f():\n    import torch\n    from dflop.store import reader\n    import flows.pipeline\n    import time\n"
    )
    assert len(problems_of(bad)) == 4


def test_ruff_bans_the_same_imports():
    for room, allowed in ALLOWED.items():
        if not (PACKAGE / room).is_dir():
            continue
        lint = tomllib.loads((PACKAGE / room / "ruff.toml").read_text())["lint"]
        assert set(lint["flake8-tidy-imports"]["banned-api"]) == {*(HEAVY - allowed), "flows"}, room


def test_spool_needs_neither_duckdb_nor_polars():
    for name in SPOOL_FILES:
        assert not {n.split(".")[0] for n, _, _ in imports(PACKAGE / name)} & {"duckdb", "polars"}, name


def test_files_stay_small():
    lines = {p: len(p.read_text().splitlines()) for p in [*FILES, *(ROOT / "flows").glob("*.py")]}
    assert {str(p.relative_to(ROOT)): n for p, n in lines.items() if n > 400} == {}
    assert sorted(lines.values())[len(lines) // 2] <= 180


def test_probes_on_a_bare_machine_need_torch_transformers_and_arrow_alone():
    blocked = "scipy pydantic polars duckdb ruamel prefect cvxpy submitit PIL av"
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked.split()!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
import tests.gpu.real_size
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_lint_sees_every_file():
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    seen = {Path(line).resolve() for line in shown.stdout.splitlines()}
    files = {path for room in ("dflop", "flows", "tests") for path in (PACKAGE.parent / room).rglob("*.py")}
    assert {str(path) for path in files - seen} == set()


def test_every_folder_of_tests_is_a_package():
    """Of one that is none, pytest puts the folder on the path, and its files hide what others import by name."""
    folders = {file.parent for file in (ROOT / "tests").rglob("*.py")}
    assert sorted(str(folder) for folder in folders if not (folder / "__init__.py").is_file()) == []
