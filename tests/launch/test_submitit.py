"""What is overridden of submitit is there, under these names and with these parameters, and a test of ours holds it."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from submitit.local.local import LocalExecutor
from submitit.slurm.slurm import SlurmExecutor

from dflop.launch.executor import Executor
from dflop.launch.local import _Executor as OurLocalExecutor

OVERRIDDEN = {
    "SlurmExecutor.__init__(self, folder, max_num_timeout, max_pickle_size_gb, python)": "test_executor.py",
    "SlurmExecutor._internal_process_submissions(self, delayed_submissions)": "test_slurm.py: arrays",
    "SlurmExecutor._submit_command(self, command)": "test_slurm.py: refusals, a silent controller",
    "SlurmExecutor._make_submission_file_text(self, command, uid)": "test_executor.py",
    "SlurmExecutor._make_submission_command(self, submission_file_path)": "test_slurm.py: whatever is submitted",
    "SlurmExecutor._get_job_id_from_submission_command(string)": "test_executor.py: what sbatch prints",
    "SlurmExecutor._num_tasks(self)": "test_slurm.py: tasks of a job",
    "SlurmExecutor._submitit_command_str": "test_executor.py: what srun starts",
    "LocalExecutor._submit_command(self, command)": "test_local.py",
}
"""Names of submitit that are overridden or relied on, with the test that holds each; most are private, so submitit is
pinned below 1.6 and signatures are compared."""
OURS = {SlurmExecutor: Executor, LocalExecutor: OurLocalExecutor}
THEIRS = {theirs.__name__: theirs for theirs in OURS}


@pytest.mark.parametrize("signature", OVERRIDDEN)
def test_submitit_has_what_is_overridden(signature):
    owner, _, rest = signature.partition(".")
    name, _, parameters = rest.rstrip(")").partition("(")
    found = inspect.getattr_static(THEIRS[owner], name)
    if not isinstance(found, property):
        function = getattr(found, "__func__", found)
        assert list(inspect.signature(function).parameters) == parameters.split(", ")
    assert Path(__file__).with_name(OVERRIDDEN[signature].partition(":")[0]).exists()


def test_nothing_else_of_submitit_is_overridden():
    for theirs, ours in OURS.items():
        named = {s.partition(".")[2].partition("(")[0] for s in OVERRIDDEN if s.startswith(f"{theirs.__name__}.")}
        inherited = {name for name in vars(ours) if name[:2] != "__" and hasattr(theirs, name)}
        assert inherited - {"affinity", "_abc_impl"} <= named, theirs
