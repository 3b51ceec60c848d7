"""docs/security.md stays true: each of its rules has a test that exists, and what has no other test is tested here."""

import ast
import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from dflop.config import load_config, load_with_origins, shown_config, shown_keys
from dflop.config.show import annotated
from dflop.errors import ConfigError, DflopError, StoreError, printable, redacted
from dflop.models.weights import WeightFolder
from dflop.report.rows import print_rows
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from tests import dependencies
from tests.forked import run_module
from tests.jobs.configs import make_dataset, write_config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
FILES = sorted([*ROOT.glob("dflop/**/*.py"), *ROOT.glob("flows/**/*.py")])

RUN_WHAT_THEY_READ = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads",
    "pickle.Unpickler", "cloudpickle.load", "cloudpickle.loads", "marshal.loads", "shelve.open", "torch.load",
    "dcp.FileSystemReader", "FileSystemReader", "yaml.load", "yaml.unsafe_load", "importlib.import_module",
    "tempfile.mktemp", "tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive",
}  # fmt: skip
LISTED = {
    # Answers of decode workers, processes of our own, over a socket without a name.
    ("dflop/train/prefetch.py", "pickle.load"),
    # What tasks of a job have left in its folder, mode 0700.
    ("dflop/launch/results.py", "pickle.loads"),
    # Sizes in the archives of a checkpoint's tensors; nothing is extracted. Torch reads them, weights-only.
    ("dflop/train/blocks.py", "zipfile.ZipFile"),
    # Entries of jobs, named by dflop itself; the others are looked up in tables of their files.
    ("dflop/launch/payload.py", "importlib.import_module"),
    ("dflop/launch/controller.py", "importlib.import_module"),
    ("dflop/models/__init__.py", "importlib.import_module"),
    ("dflop/models/attention.py", "importlib.import_module"),
    ("dflop/balance/__init__.py", "importlib.import_module"),
    ("dflop/sampler/__init__.py", "importlib.import_module"),
    ("dflop/sampler/plugins/llama_factory.py", "importlib.import_module"),
    # Transformers' own file of a class of its own.
    ("dflop/models/generic/shrink.py", "importlib.import_module"),
    # Headers of an archive that is not packed; nothing is extracted.
    ("dflop/data/formats/tar_shard.py", "tarfile.open"),
}
"""Calls that could run what they are given, and why each may stay."""


RULES = re.findall(r"^- .*(?:\n  .*)*", PAGE.partition("## What is enforced")[2].partition("\n## ")[0], re.MULTILINE)
"""Of "What is enforced", each with the names of the tests that hold it."""
NAMED = [name for rule in RULES for name in re.findall(r"`(test_\w+)`", rule)]


def functions_of(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_rule_of_the_page_has_a_test_that_exists():
    assert len(NAMED) > 40
    assert len(set(NAMED)) == len(NAMED), "a test for every rule"
    assert [rule for rule in RULES if "`test_" not in rule] == []
    assert set(NAMED) <= set().union(*map(functions_of, ROOT.glob("tests/**/test_*.py")))


def test_every_test_of_this_file_is_of_the_page_or_about_it():
    about = ("_the_page", "_about_it", "_that_exists", "_network")
    assert {name for name in functions_of(Path(__file__)) if not name.endswith(about)} <= set(NAMED)


def calls_of(path: Path) -> set[str]:
    """Names of everything a file calls or subclasses, with what they were imported as resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    alias: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            alias |= {a.asname or a.name: a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            alias |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    used = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = set()
    for function in used:
        text = ast.unparse(function)
        head, _, rest = text.partition(".")
        names |= {text, f"{alias.get(head, head)}.{rest}".rstrip(".")}
    return names


def test_calls_that_run_what_they_read_are_those_listed():
    found = {(str(path.relative_to(ROOT)), name) for path in FILES for name in calls_of(path) & RUN_WHAT_THEY_READ}
    assert found == LISTED
    shells = [
        p for p in FILES if re.search(r"shell\s*=\s*True|allow_pickle\s*=\s*True|weights_only\s*=", p.read_text())
    ]
    assert shells == []


def test_code_of_models_is_never_run():
    text = {path: path.read_text(encoding="utf-8") for path in FILES}
    assert [path for path, content in text.items() if re.search("trust_remote_code(?!=False)", content)] == []
    fetching = re.compile(r"\b(from_pretrained|snapshot_download|hf_hub_download|load_dataset)\(")
    found = {
        (str(path.relative_to(ROOT)), name) for path, content in text.items() for name in fetching.findall(content)
    }
    # What `--download` asks for; an exported folder, from which safetensors alone are read; settings of a model.
    assert found == {
        ("dflop/starter/hub_files.py", "snapshot_download"),
        ("dflop/models/weights.py", "from_pretrained"),
        ("dflop/models/generic/media_processor.py", "from_pretrained"),
    }
    processor = text[ROOT / "dflop/models/generic/media_processor.py"]
    assert "local_files_only=True, trust_remote_code=False" in processor
    assert "local_files_only=True, use_safetensors=True" in text[ROOT / "dflop/models/weights.py"]


@pytest.mark.parametrize("name", ["../w.safetensors", "/etc/passwd", "pytorch_model.bin", "a/b.safetensors"])
def test_an_index_of_weights_names_safetensors_beside_it(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(ConfigError, match="names files outside its folder, or other than safetensors"):
        WeightFolder(tmp_path, nn.Linear(1, 1))
    torch.save({}, tmp_path / "model.safetensors")
    os.unlink(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ConfigError, match="cannot read weights"):
        WeightFolder(tmp_path, nn.Linear(1, 1))


def test_a_command_leaves_nothing_that_everybody_may_change(tmp_path):
    code = "import os; os.umask(0); from dflop.cli import main; main()"
    arguments = ("store", "ingest", "--store", "made/store")
    done = run_module("tests.store.snippet", code, *arguments, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    made = [tmp_path / "made", *(tmp_path / "made").rglob("*")]
    assert len(made) > 3
    open_to_all = [path for path in made if not path.is_symlink() and path.stat().st_mode & stat.S_IWOTH]
    assert open_to_all == []


def test_a_name_is_no_sql(tmp_path):
    ingest(tmp_path)
    with Reader(tmp_path) as reader, pytest.raises(StoreError):
        reader.arrays('correction" union select 1 --', ["run_id"])
    with Reader(tmp_path) as reader, pytest.raises(StoreError):
        reader.arrays("correction", ['run_id" from correction; drop table correction --'])


HOSTILE = "a\x1b[2Jb\rc\x9b1md\u202ee\x00f\u2028g\ud800"
WRITTEN_OUT = r"a\x1b[2Jb\rc\x9b1md\u202ee\x00f\u2028g\ud800"


def test_an_error_cannot_drive_a_terminal():
    error = DflopError(HOSTILE, where=HOSTILE, hint=HOSTILE)
    assert str(error) == f"{WRITTEN_OUT}\n  where: {WRITTEN_OUT}\n  hint:  {WRITTEN_OUT}"
    assert error.args == (WRITTEN_OUT,)
    assert printable("two\nlines\tétage 日本 🙂") == "two\nlines\tétage 日本 🙂"


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_table_cannot_drive_a_terminal(capsys, form):
    print_rows(("path", "reason"), [(HOSTILE, "[red]x[/red]")], form)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert not set(out) & set("\r\x9b\u202e\x00\u2028")
    assert "[red]x[/red]" in out
    assert r"\x1b[2J" in out or r"\u001b[2J" in out


SHOWN = {
    "export WANDB_API_KEY=abc123 && x": "export WANDB_API_KEY=*** && x",
    "PREFECT_API_AUTH_STRING='admin:a b' x": "PREFECT_API_AUTH_STRING=*** x",
    "docker://u:pw@registry/x": "docker://u:***@registry/x",
    "postgresql+asyncpg://prefect:pw@db:5432/x": "postgresql+asyncpg://prefect:***@db:5432/x",
    "HF_TOKEN=abc": "HF_TOKEN=***", "key hf_abcdefghijklmnopqrst": "key ***",
    "Authorization: Basic dXNlcjpwYXNz": "Authorization: Basic ***", "SLURM_JWT=ey.j.z": "SLURM_JWT=***",
    "login --token abc": "login --token ***",
    "num_tokens: 5, pad_token='<pad>', max_llm_tokens=8192": "num_tokens: 5, pad_token='<pad>', max_llm_tokens=8192",
    "http://127.0.0.1:4200/api": "http://127.0.0.1:4200/api", "profile_key: deadbeef": "profile_key: deadbeef",
    "me@host:/data": "me@host:/data",
}  # fmt: skip


def test_an_error_shows_no_secret():
    for text, shown in SHOWN.items():
        assert DflopError(text, where=text, hint=text).args == (shown,)
        assert str(DflopError("x", where=text)) == f"x\n  where: {shown}"
        assert redacted(redacted(text)) == redacted(text)


@pytest.fixture
def secretive(tmp_path):
    """A configuration whose cluster exports a password."""
    make_dataset(tmp_path)
    path = write_config(tmp_path)
    setup = ["module load x", 'export MY_PASSWORD="pass word"', "export HF_TOKEN=tok123456"]
    return path, [
        f"cluster.slurm.setup={json.dumps(setup)}",
        "cluster.slurm.container={image: 'docker://me:pass word@registry/i', python: p}".replace(
            "pass word", "pw123456"
        ),
        "model.hf_config.api_key=key123456",
    ]


def test_a_configuration_that_is_shown_holds_no_secret(secretive):
    loaded = load_with_origins(*secretive)
    texts = (shown_config(loaded.config), annotated(loaded), repr(shown_keys(loaded)))
    for text in texts:
        for secret in ("pass word", "tok123456", "pw123456", "key123456"):
            assert secret not in text
        assert "module load x" in text
        assert "docker://me:***@registry/i" in text
    assert load_config(*secretive).cluster.slurm.setup[2] == "export HF_TOKEN=tok123456", "jobs get what was written"


def test_the_table_of_dependencies_is_that_of_the_page():
    text = dependencies.PAGE.read_text(encoding="utf-8")
    assert dependencies.written(text) == text


@pytest.mark.lane("jobs")
def test_imports_ask_nothing_of_the_network():
    found = dependencies.network_at_import()
    assert found["seen"] == []
    assert {"torch", "transformers", "prefect", "duckdb", "polars"} <= set(found["modules"])
