"""What Slurm's clients print, and what srun and people leave in the environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.launch.answers import epoch_s, sacct_rows, scontrol_rows, squeue_rows
from dflop.launch.ranks import srun_environment
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt

_NOW_S = 1.8e9
_MAX_ROWS = 5_000_000
_SQUEUE = (
    "123|RUNNING|1700000000|1700000100|None|dflop-a", "123_[4-6,9%2]|PENDING|1700000000|N/A|Priority|b",
    "9_3|CONFIGURING|2026-01-01T00:00:00|2026-01-01T00:00:00|(null)|c|d",
)  # fmt: skip
_SACCT = ("123_0|COMPLETED|1700000000|None|allocation", "7|CANCELLED by 0|Unknown|None|x", "8|OUT_OF_MEMORY|1|a|b")
_SCONTROL = (
    "JobId=12 ArrayJobId=10 ArrayTaskId=2 JobName=a b UserId=root(0) JobState=RUNNING Reason=None Restarts=1 "
    "SubmitTime=1700000000",
    "JobId=10 ArrayJobId=10 ArrayTaskId=3-5%2 JobState=PENDING Reason=JobHeldUser Restarts=0 "
    "SubmitTime=2026-01-01T00:00:00",
)
_WORDS = (
    "|", "\n", "123_[0-99999999999]", "1_[0-9:0]", "1_[9-1]", "1_[1-", "[", "N/A", "Unknown", "CANCELLED by -1",
    "CANCELLED by 99999999999999999999",
    "JobId=", "ArrayTaskId=0-999999999", "Restarts=-1", "99999999999999999999", "9999-12-31T23:59:59", "0000-00-00",
    "1_[" + "1," * 500 + "1]", "٣",
)  # fmt: skip
_ENVIRONMENT = {
    "SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_ID": "77", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345",
}  # fmt: skip


def _answers(folder: Path) -> Callable[[Any], None]:
    def check(text: str) -> None:
        for rows in (list(squeue_rows(text, _NOW_S)), list(sacct_rows(text)), list(scontrol_rows(text))):
            for row in rows:
                assert row.job_ids
                assert len(row.job_ids) <= _MAX_ROWS, "elements that no array has"
                assert isinstance(row.status.reason, str)
        for line in text.splitlines():
            epoch_s(line)

    return check


def _texts() -> st.SearchStrategy[str]:
    ids = tuple(word for word in _WORDS if "[" in word)
    lines = (*_SQUEUE, *_SACCT, *_SCONTROL, *(f"{job_id}|PENDING|{9:0>20}|9|None|a" for job_id in ids))
    return hostile.broken_text(("\n".join(_SQUEUE), "\n".join(_SACCT), "\n".join(_SCONTROL), *lines), _WORDS)


def _environments() -> st.SearchStrategy[Any]:
    counts = st.sampled_from(("2(x99999999999)", "1(x", "0", "-1", "1,", "2(x2),3(x0)", "(x2)"))
    return hostile.broken(_ENVIRONMENT, hostile.TEXTS | counts | hostile.INTEGERS.map(str)).filter(_is_environment)


def _is_environment(example: Any) -> bool:
    return all(isinstance(v, str) and isinstance(k, str) for k, v in example.items())


def _ranks(folder: Path) -> Callable[[Any], None]:
    def check(example: dict[str, str]) -> None:
        found = attempt(srun_environment, example)
        if found is not None:
            assert 0 <= int(found["RANK"]) < int(found["WORLD_SIZE"])
            assert 0 <= int(found["LOCAL_RANK"]) < int(found["LOCAL_WORLD_SIZE"])
            assert 0 < int(found["MASTER_PORT"]) < 65536

    return check


TARGETS = (
    Target("slurm-answers", "answers of squeue, sacct and scontrol cut up", _texts, _answers),
    Target("rank-environment", "variables of a task that srun started", _environments, _ranks),
)
