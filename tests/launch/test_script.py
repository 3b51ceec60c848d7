"""The batch script: what it says, in which dialect, and that a shell reads what was meant."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop.errors import LaunchError
from dflop.launch import Container, JobSpec, Resources, Site
from dflop.launch.script import Batch, batches, options, render
from tests.launch.helpers import REPO

SITE = Site(python="/opt/python")
UNTIL_IT_LISTENS = (
    'trap "" USR2; env --block-signal=USR2 true 2>/dev/null && exec env --block-signal=USR2 "$@"; exec "$@"'
)
SHARDS = Resources(cpus_per_task=2, time_limit_min=30)


def spec_of(folder: Path, number: int = 0, **fields: object) -> JobSpec:
    spec = JobSpec(
        name=f"run-data-{number}", entry="dflop.jobs.data_profile:main", args=("/runs/run", str(number)),
        key=f"k{number}", folder=folder, resources=SHARDS, array="run-data",
    )  # fmt: skip
    return dataclasses.replace(spec, **fields)


def lone(spec: JobSpec) -> Batch:
    return Batch((spec,), (0,))


def directives(text: str) -> dict[str, str]:
    """Options of a script, as sbatch reads them."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    words = [shlex.split(line.removeprefix("#SBATCH "))[0] for line in lines]
    return {word.partition("=")[0]: word.partition("=")[2] for word in words}


def check_syntax(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_training_job_asks_for_and_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resources = Resources(
        num_nodes=2, tasks_per_node=2, num_idle_slots=1, gpus_per_node=2, memory_bytes=3 << 30, time_limit_min=1,
        partition="gpu", setup=("module load cuda",), extra={"account": "a1", "exclusive": ""},
    )  # fmt: skip
    spec = spec_of(
        Path("/runs/run/jobs/train"), name="run-train", entry="dflop.jobs.train:main", args=("/runs/run", "train"),
        key="run/train", resources=resources, env={"B": "it's", "A": "1"}, array="", is_resumable=True,
    )  # fmt: skip
    text = render(lone(spec), SITE, "dflop:run")
    check_syntax(text)
    assert text.startswith(
        "#!/bin/bash\n# dflop job `run-train`: dflop.jobs.train:main /runs/run train\n# key run/train\n"
    )
    assert directives(text) == {
        "--job-name": "run-train", "--comment": "dflop:run", "--partition": "gpu", "--nodes": "2", "--ntasks": "3",
        "--ntasks-per-node": "2", "--cpus-per-task": "1", "--gpus-per-node": "2", "--mem": "3072M", "--time": "1",
        "--signal": "USR2@30", "--requeue": "", "--open-mode": "append", "--chdir": str(tmp_path),
        "--output": "/runs/run/jobs/train/%j_batch.log", "--account": "a1", "--exclusive": "",
    }  # fmt: skip
    assert {"""export B='it'"'"'s'""", "export PYTHONSAFEPATH=1"} <= set(text.splitlines())
    assert 'rm -f "$folder/$job"_*_result.pkl "$folder/${job}_interrupted"\n' in text
    setup, what, srun = (
        text.index(f"\n{line}") for line in ("module load cuda\n", "set -- dflop.jobs.train:", "srun --")
    )
    assert setup < what < srun
    assert text[srun + 1 : text.index(" &\nsrun=$!")].split(" \\\n    ") == [
        "srun --kill-on-bad-exit=1",
        "--unbuffered",
        "--open-mode=append",
        "--cpus-per-task=1",
        "--output=/runs/run/jobs/train/${job}_%t_log.out",
        "--error=/runs/run/jobs/train/${job}_%t_log.err",
        f'sh -c \'{UNTIL_IT_LISTENS}\' sh /opt/python -P -u -m dflop.launch.task "$folder" "$job" "$@"',
    ]


def test_an_array_says_what_each_element_does(tmp_path):
    specs = [spec_of(tmp_path, number) for number in range(3)]
    (batch,) = batches(specs, 1001)
    text = render(batch, dataclasses.replace(SITE, max_jobs_at_once=2), "dflop:run")
    check_syntax(text)
    found = directives(text)
    assert (found["--job-name"], found["--array"]) == ("run-data", "0-2%2")
    assert found["--output"] == f"{tmp_path}/%A_%a_batch.log"
    assert "job=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}\n" in text
    assert "1) set -- dflop.jobs.data_profile:main /runs/run 1 ;;  # run-data-1\n" in text
    assert [h.job_id for h in batch.handles("7", 0.0)] == ["7_0", "7_1", "7_2"]
    assert [h.name for h in batch.handles("7", 0.0)] == [s.name for s in specs]
    assert "requeue" not in text.partition("#!/bin/bash")[2].partition("#SBATCH --requeue")[2], "nothing to go on from"


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "expected"),
    [
        ("gpus-per-node", "a100", {"--gpus-per-node": "a100:4"}),
        ("gres", "a100", {"--gres": "gpu:a100:4"}),
        ("none", "a100", {}),
    ],
)
def test_gpus_are_asked_for_in_the_sites_words(tmp_path, gpus, gpu_type, expected):
    site = Site(gpus=gpus, gpu_type=gpu_type)
    spec = spec_of(tmp_path, resources=Resources(gpus_per_node=4))
    found = directives(render(lone(spec), site, "c"))
    assert {name: value for name, value in found.items() if "gpu" in name or "gres" in name} == expected
    without = spec_of(tmp_path, resources=Resources())
    assert not any("gpu" in n or "gres" in n for n in options(lone(without), site, "c")), "some sites refuse even zero"


def test_what_a_site_refuses_is_not_asked_for(tmp_path):
    spec = spec_of(tmp_path, resources=Resources(memory_bytes=1 << 30), is_resumable=True)
    text = render(lone(spec), Site(ask_for_memory=False, requeue=False), "c")
    check_syntax(text)
    assert "--mem" not in directives(text)
    assert "--no-requeue" in directives(text)
    assert "scontrol requeue" not in text
    assert "exit 75" in text


def test_options_of_the_cluster_file_go_before_ours(tmp_path):
    spec = spec_of(tmp_path, resources=Resources(memory_bytes=1 << 30, extra={"mem": "0", "mail_type": "FAIL"}))
    found = directives(render(lone(spec), SITE, "c"))
    assert (found["--mem"], found["--mail-type"]) == ("0", "FAIL")


def test_apptainer_is_a_command_before_python(tmp_path):
    box = Container("/images/d f.sif", mounts=("/scratch", "/a:/b"), args=("--writable-tmpfs",), python="python3.11")
    text = render(lone(spec_of(tmp_path, resources=Resources(gpus_per_node=1))), Site(container=box), "c")
    check_syntax(text)
    assert (
        "apptainer exec --nv --bind /scratch --bind /a:/b --writable-tmpfs '/images/d f.sif' python3.11 -P -u -m"
        in text
    )
    assert "--nv" not in render(lone(spec_of(tmp_path)), Site(container=box), "c")


def test_pyxis_is_options_of_srun(tmp_path):
    box = Container("registry#dflop:0.1", "pyxis", ("/scratch", "/a:/b"), ("--no-container-mount-home",))
    text = render(lone(spec_of(tmp_path)), Site(container=box, srun_args=("--cpu-bind=none",)), "c")
    check_syntax(text)
    srun = text[text.index("srun ") :]
    for option in (
        "--cpu-bind=none",
        "'--container-image=registry#dflop:0.1'",
        "--container-mounts=/scratch:/scratch,/a:/b",
        "--no-container-mount-home",
    ):
        assert option in srun
    assert "sh python3 -P -u -m dflop.launch.task" in srun


@settings(max_examples=30)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12), max_size=4))
def test_a_shell_reads_the_arguments_that_were_given(args):
    """Quotes, newlines, dollars, patterns: what tasks are started with is what the spec says."""
    spec = spec_of(Path("/runs/r"), args=tuple(args), key="a\nb")
    text = render(lone(spec), SITE, "c")
    what = text[text.index("\nset -- ") : text.index("\nsrun ")]
    printed = subprocess.run(
        ["bash", "-c", f'{what}\nshift; printf "%s\\0" "$@"'], capture_output=True, check=True
    ).stdout.decode()
    assert printed == "".join(f"{arg}\0" for arg in args) or (not args and printed == "\0")
    assert [line for line in text.splitlines()[:4] if not line.startswith("#")] == [], "a key broke out of its comment"


def test_jobs_that_are_not_alike_do_not_share_an_array(tmp_path):
    more = dataclasses.replace(SHARDS, cpus_per_task=3)
    specs = [
        spec_of(tmp_path, 0),
        spec_of(tmp_path, 1, resources=more),
        spec_of(tmp_path, 2),
        spec_of(tmp_path / "alone", 3, array=""),
        spec_of(tmp_path, 4, env={"X": "1"}),
        spec_of(tmp_path, 5, resources=more),
    ]
    found = batches(specs, 1001)
    assert [b.positions for b in found] == [(0, 2), (1, 5), (3,), (4,)]
    assert [b.script_name for b in found] == ["job.sbatch", "job-2.sbatch", "job.sbatch", "job-3.sbatch"]
    assert [b.name for b in found] == ["run-data", "run-data", "run-data-3", "run-data-4"]


def test_an_array_larger_than_the_site_lets_is_cut(tmp_path):
    found = batches([spec_of(tmp_path, n) for n in range(7)], 3)
    assert [b.positions for b in found] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert len({b.script for b in found}) == 3


@pytest.mark.parametrize("bad", ["\n#SBATCH --wrap=evil", "\x1b[2J", "\r"])
@pytest.mark.parametrize("field", ["folder", "comment", "extra"])
def test_a_line_break_in_an_option_is_refused(tmp_path, bad, field):
    """sbatch would take the second line for an option of its own, quotes or not."""
    spec = spec_of(tmp_path / bad if field == "folder" else tmp_path)
    if field == "extra":
        spec = dataclasses.replace(spec, resources=Resources(extra={"reservation": bad}))
    with pytest.raises(LaunchError, match="a line break or control character in sbatch's option --"):
        render(lone(spec), SITE, f"dflop:{bad}" if field == "comment" else "c")


def test_a_line_break_in_the_working_directory_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a\n#SBATCH --wrap=evil").mkdir()
    monkeypatch.chdir(tmp_path / "a\n#SBATCH --wrap=evil")
    with pytest.raises(LaunchError, match=r"--chdir: [\s\S]*rename the folder"):
        render(lone(spec_of(Path("/runs/r"))), SITE, "c")


@settings(max_examples=40)
@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp", "Cf"], exclude_characters="/"), min_size=1
    )
)
@example("50%j")
def test_a_folder_of_any_other_name_is_one_word_of_one_line(name):
    """Quotes, dollars, hashes, percent signs: the options are the same, and the folder is read as it is."""
    spec = spec_of(Path("/runs") / f"r{name}", is_resumable=True)
    text = render(lone(spec), SITE, "c")
    check_syntax(text)
    plain = render(lone(spec_of(Path("/runs/r"), is_resumable=True)), SITE, "c")
    assert directives(text).keys() == directives(plain).keys()
    assert len(text.split("\n")) == len(plain.split("\n"))
    assert directives(text)["--output"] == f"/runs/r{name}".replace("%", "%%") + "/%j_batch.log"
    assert name != "50%j" or "--error=/runs/r50%%j/${job}_%t_log.err" in text
    line = next(line for line in text.split("\n") if line.startswith("folder="))
    assert shlex.split(line) == [f"folder=/runs/r{name}"]


def test_a_signal_that_comes_early_waits_until_somebody_listens():
    code = (
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"  # blocked and ignored: Linux keeps it
        "from dflop.train.signals import StopRequest\n"
        "stop = StopRequest(); stop.listen()\n"
        "print(stop.is_set())\n"
    )
    command = ["sh", "-c", UNTIL_IT_LISTENS, "sh", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert "SIGUSR2: stops behind the step" in done.stderr
