"""The batch script: what it says, in which dialect, and that a shell reads what was meant."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.config import ContainerConfig, SlurmConfig
from dflop.errors import LaunchError
from dflop.launch import JobSpec, Resources
from dflop.launch.executor import Executor, batches
from tests.launch.helpers import REPO

SITE = SlurmConfig()
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


def render(specs: JobSpec | list[JobSpec], site: SlurmConfig = SITE, comment: str = "c") -> str:
    return Executor(specs if isinstance(specs, list) else [specs], site, comment).script_text()


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
    text = render(spec, SITE, "dflop:run")
    check_syntax(text)
    assert text.startswith(
        "#!/bin/bash\n# dflop job `run-train`: dflop.jobs.train:main /runs/run train  (key run/train)\n"
        "# To run it again by hand: sbatch /runs/run/jobs/train/0/job.sbatch\n"
    )
    log = "/runs/run/jobs/train/0/%j_batch.log"
    assert directives(text) == {
        "--job-name": "run-train", "--comment": "dflop:run", "--partition": "gpu", "--nodes": "2", "--ntasks": "3",
        "--ntasks-per-node": "2", "--cpus-per-task": "1", "--gpus-per-node": "2", "--mem": "3072M", "--time": "1",
        "--signal": "USR2@30", "--requeue": "", "--open-mode": "append", "--chdir": str(tmp_path), "--output": log,
        "--error": log, "--account": "a1", "--exclusive": "",
    }  # fmt: skip
    assert {"""export B='it'"'"'s'""", "export PYTHONSAFEPATH=1"} <= set(text.splitlines())
    setup, srun = text.index("\nmodule load cuda\n"), text.index("\nsrun ")
    assert setup < srun
    assert shlex.split(text[srun:].split("\n")[1]) == [
        "srun", "--unbuffered", "--output", "/runs/run/jobs/train/0/%j_%t_log.out", "--error",
        "/runs/run/jobs/train/0/%j_%t_log.err", "--kill-on-bad-exit=1", "--open-mode=append", "--cpus-per-task=1", "sh",
        "-c", UNTIL_IT_LISTENS, "sh", sys.executable, "-P", "-u", "-m", "submitit.core._submit",
        "/runs/run/jobs/train/0",
    ]  # fmt: skip


def test_an_array_says_what_each_element_does(tmp_path):
    specs = [spec_of(tmp_path, number) for number in range(3)]
    text = render(specs, SlurmConfig(max_jobs_at_once=2), "dflop:run")
    check_syntax(text)
    found = directives(text)
    assert (found["--job-name"], found["--array"]) == ("run-data", "0-2%2")
    assert found["--output"] == f"{tmp_path}/0/%A_%a_batch.log"
    assert "\n# dflop jobs `run-data`, an array of 3. What each element runs:\n" in text
    assert "\n#   1: dflop.jobs.data_profile:main /runs/run 1  (key k1)\n" in text
    assert "scontrol requeue" not in text, "nothing to go on from"


@pytest.mark.parametrize(
    ("gpus", "gpu_type", "expected"),
    [
        ("gpus-per-node", "a100", {"--gpus-per-node": "a100:4"}),
        ("gres", "a100", {"--gres": "gpu:a100:4"}),
        ("none", "a100", {}),
    ],
)
def test_gpus_are_asked_for_in_the_sites_words(tmp_path, gpus, gpu_type, expected):
    site = SlurmConfig(gpus=gpus, gpu_type=gpu_type)
    spec = spec_of(tmp_path, resources=Resources(gpus_per_node=4))
    found = directives(render(spec, site, "c"))
    assert {name: value for name, value in found.items() if "gpu" in name or "gres" in name} == expected
    without = spec_of(tmp_path, resources=Resources())
    assert not any("gpu" in n or "gres" in n for n in directives(render(without, site))), "some sites refuse even zero"


def test_what_a_site_refuses_is_not_asked_for(tmp_path):
    spec = spec_of(tmp_path, resources=Resources(memory_bytes=1 << 30), is_resumable=True)
    text = render(spec, SlurmConfig(ask_for_memory=False, requeue=False), "c")
    check_syntax(text)
    assert "--mem" not in directives(text)
    assert "--no-requeue" in directives(text)
    assert "scontrol requeue" not in text
    assert "code=75" in text


def test_options_of_the_cluster_file_go_before_ours(tmp_path):
    spec = spec_of(tmp_path, resources=Resources(memory_bytes=1 << 30, extra={"mem": "0", "mail_type": "FAIL"}))
    found = directives(render(spec, SITE, "c"))
    assert (found["--mem"], found["--mail-type"]) == ("0", "FAIL")


def test_apptainer_is_a_command_before_python(tmp_path):
    box = ContainerConfig(
        image="/images/d f.sif", mounts=("/scratch", "/a:/b"), args=("--writable-tmpfs",), python="python3.11"
    )
    text = render(spec_of(tmp_path, resources=Resources(gpus_per_node=1)), SlurmConfig(container=box), "c")
    check_syntax(text)
    assert (
        "apptainer exec --nv --bind /scratch --bind /a:/b --writable-tmpfs '/images/d f.sif' python3.11 -P -u -m"
        in text
    )
    assert "--nv" not in render(spec_of(tmp_path), SlurmConfig(container=box), "c")


def test_pyxis_is_options_of_srun(tmp_path):
    box = ContainerConfig(
        image="registry#dflop:0.1", runtime="pyxis", mounts=("/scratch", "/a:/b"), args=("--no-container-mount-home",)
    )
    text = render(spec_of(tmp_path), SlurmConfig(container=box, srun_args=("--cpu-bind=none",)), "c")
    check_syntax(text)
    srun = text[text.index("srun ") :]
    for option in (
        "--cpu-bind=none",
        "'--container-image=registry#dflop:0.1'",
        "--container-mounts=/scratch:/scratch,/a:/b",
        "--no-container-mount-home",
    ):
        assert option in srun
    assert "sh python3 -P -u -m submitit.core._submit" in srun


def test_no_argument_breaks_out_of_its_comment(tmp_path):
    text = render(spec_of(tmp_path, args=("a\nb", "$HOME", "#\rx"), key="k\n#SBATCH --wrap=evil"))
    head = text[: text.index("# Parameters")].splitlines()
    assert [line for line in head if not line.startswith("#")] == [""]
    assert not any(line.startswith("#SBATCH") for line in head)


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
    assert batches(specs) == [[0, 2], [1, 5], [3], [4]]
    assert [Executor([specs[n] for n in group], SITE, "").job_name for group in batches(specs)] == [
        "run-data", "run-data", "run-data-3", "run-data-4",
    ]  # fmt: skip


@pytest.mark.parametrize(("said", "job_id"), [("12\n", "12"), ("lua 3\n12;big\n", "12;big"), ("", ""), ("x 1", "")])
def test_what_sbatch_prints_ends_with_the_id(said, job_id):
    assert Executor._get_job_id_from_submission_command(said) == job_id


def test_a_folder_in_which_slurm_would_replace_something_is_refused(tmp_path):
    with pytest.raises(LaunchError, match="Slurm would replace the `%`"):
        render(spec_of(tmp_path / "50%j"))


@pytest.mark.parametrize("bad", ["\n#SBATCH --wrap=evil", "\x1b[2J", "\r"])
@pytest.mark.parametrize("field", ["folder", "comment", "extra", "chdir"])
def test_a_line_break_in_an_option_is_refused(tmp_path, monkeypatch, bad, field):
    """sbatch would take the second line for an option of its own, quotes or not."""
    spec = spec_of(tmp_path / bad if field == "folder" else tmp_path)
    if field == "extra":
        spec = dataclasses.replace(spec, resources=Resources(extra={"reservation": bad}))
    if field == "chdir":
        (tmp_path / f"a{bad}").mkdir()
        monkeypatch.chdir(tmp_path / f"a{bad}")
    with pytest.raises(LaunchError, match="a line break or control character in sbatch's option --") as caught:
        render(spec, SITE, f"dflop:{bad}" if field == "comment" else "c")
    assert field != "chdir" or "rename the folder" in str(caught.value)


@settings(max_examples=40)
@given(
    st.text(
        st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp", "Cf"], exclude_characters="/%"), min_size=1
    )
)
def test_a_folder_of_any_other_name_is_one_word_of_one_line(name):
    """Quotes, dollars, hashes: the options are the same, and the folder is read as it is."""
    spec = spec_of(Path("/runs") / f"r{name}", is_resumable=True)
    text = render(spec, SITE, "c")
    check_syntax(text)
    plain = render(spec_of(Path("/runs/r"), is_resumable=True))
    assert directives(text).keys() == directives(plain).keys()
    assert len(text.split("\n")) == len(plain.split("\n"))
    assert directives(text)["--output"] == f"/runs/r{name}/0/%j_batch.log"
    line = next(line for line in text.split("\n") if line.startswith("folder="))
    assert shlex.split(line) == [f"folder=/runs/r{name}/0"]


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
    assert "SIGUSR2: stopping after the current step" in done.stderr
