import sys

import pytest

from dflop.launch.commands import client_environment, is_away, job_environment, run_command

INSIDE_A_JOB = {
    "HOME": "/home/a", "PREFECT_API_AUTH_STRING": "admin:secret", "SUBMITIT_EXECUTOR": "slurm",
    "SLURM_CPUS_PER_TASK": "3", "SLURM_TRES_PER_TASK": "cpu:7", "SLURM_MEM_PER_NODE": "4096", "SBATCH_EXPORT": "NONE",
    "SBATCH_TIMELIMIT": "1", "SRUN_CPUS_PER_TASK": "3", "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_JWT": "token",
    "SLURM_CLUSTERS": "big",
}  # fmt: skip


def test_a_job_submitted_from_a_job_gets_nothing_of_it_but_what_clients_need():
    kept = job_environment(INSIDE_A_JOB, ())
    assert sorted(kept) == ["HOME", "SLURM_CLUSTERS", "SLURM_CONF", "SLURM_JWT"]


def test_a_persons_account_stays_unless_the_script_says_one():
    environ = {"SBATCH_ACCOUNT": "mine", "SBATCH_PARTITION": "gpu", "SBATCH_QOS": "high"}
    assert job_environment(environ, ()) == environ
    assert job_environment(environ, ("account", "time")) == {"SBATCH_PARTITION": "gpu", "SBATCH_QOS": "high"}


def test_clients_show_what_they_are_asked_for():
    environ = {"SQUEUE_STATES": "running", "SACCT_FORMAT": "x", "SCANCEL_STATE": "RUNNING", "SLURM_JWT": "t"}
    assert client_environment(environ) == {"SLURM_JWT": "t", "SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["/no/such/client"], "/no/such/client: No such file or directory"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "no answer within 0.2 s"),
    ],
)
def test_a_client_that_is_missing_or_hangs_is_an_ordinary_failure(args, why):
    done = run_command(args, timeout_s=0.2)
    assert (done.returncode, done.stdout, done.stderr) == (127, "", why)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("no answer within 600 s", True),
        ("sbatch: error: invalid partition specified: nowhere", False),
        ("sbatch: error: Memory specification can not be satisfied", False),
    ],
)
def test_a_controller_that_is_away_is_told_from_one_that_refuses(said, expected):
    assert is_away(said) is expected


def test_bytes_that_are_no_text_end_nothing():
    done = run_command([sys.executable, "-c", "import os; os.write(1, b'a\\xff')"])
    assert done.stdout == "a\ufffd"
