"""`dflop config` as a person uses it: its own process, problems as lines that an editor can jump to."""

from pathlib import Path

import pytest

from dflop.data.demo_content import train_tokenizer
from tests.jobs.configs import make_dataset, write_config
from tests.test_cli import assert_refused, dflop

SPREAD_OUT = """\
name: small
model:
  family: internvl
cluster:
  name: here
  num_processes_per_node: 4
  memory_per_process_gib: 1
dataset:
  annotations: data/a.jsonl
  media_root: data/media
  tokenizer: data/tokenizer.json
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path)
    (tmp_path / "run.yaml").write_text(SPREAD_OUT)
    return tmp_path


def test_show_says_where_values_come_from_and_reads_back(tmp_path):
    write_config(tmp_path)
    done = dflop("config", "show", "run.yaml", "--set", "train.num_steps=7", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "num_steps: 7 # --set" in lines
    assert "max_grad_norm: 1.0 # default" in lines
    assert "name: small # run.yaml:1" in lines
    (tmp_path / "again.yaml").write_text(done.stdout)
    plain = dflop("config", "show", "again.yaml", "--plain", cwd=tmp_path).stdout
    assert "#" not in plain
    (tmp_path / "again.yaml").write_text(plain)
    assert dflop("config", "show", "again.yaml", "--plain", cwd=tmp_path).stdout == plain


def validate(folder: Path, *arguments: object, exit_code: int = 2) -> tuple[list[str], str]:
    done = dflop("config", "validate", "run.yaml", *arguments, cwd=folder)
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_sound_configuration_is_ok(folder):
    lines, talk = validate(folder, "--set", "model.family=qwen2_5_omni_thinker", exit_code=0)
    assert lines == ["run.yaml: ok"]
    random, small = talk.splitlines()
    assert random.startswith("warning: run.yaml:2: model: weights are random")
    assert "on 4 x 1.0 GiB: no plan fits" in small


def test_a_tokenizer_without_the_familys_tokens_is_one_line_with_file_and_key(folder):
    (line,), talk = validate(folder)
    assert line.startswith("run.yaml:11: dataset.tokenizer: `data/tokenizer.json`: tokenizer lacks special tokens of")
    for token in ("</img>", "<IMG_CONTEXT>", "<img>"):
        assert token in line
    assert talk == "dflop: 1 problem in run.yaml\n"
    done = dflop("run", "run.yaml", cwd=folder, PREFECT_HOME=str(folder / "prefect"))
    assert_refused(done, 2, "lacks special tokens", "where: run.yaml:11: dataset.tokenizer")
    assert not (folder / "prefect").exists()


def test_several_problems_are_told_at_once(folder):
    given = ("model.media={max_tile: 3}", "dataset.media_root=nowhere", "stages=[{name: a}, {name: a}]")
    lines, talk = validate(folder, *(f"--set={override}" for override in given))
    assert [line.partition(": ")[0] for line in lines] == [
        "--set model.media.max_tile", "--set dataset.media_root",
    ]  # fmt: skip
    assert "did you mean `max_tiles`?" in lines[0]
    assert "dflop: 2 problems in run.yaml" in talk
    (line,), _ = validate(folder, "--set=cluster.backend=inline")
    assert line.startswith("--set cluster.backend: ")
    assert "local" in line
    assert "slurm" in line


def test_a_laptop_may_validate_what_a_cluster_will_run(folder):
    train_tokenizer(["x\n"], folder / "data" / "tokenizer.json")
    given = ("model.family=qwen2_5_omni_thinker", "cluster.backend=slurm", "cluster.hardware=A100")
    done = dflop(
        "config", "validate", "run.yaml", *(f"--set={override}" for override in given), cwd=folder, PATH="/nowhere"
    )
    assert (done.returncode, done.stdout) == (0, "run.yaml: ok\n")
    assert "on this machine: --set cluster.backend: backend `slurm` needs sbatch" in done.stderr
