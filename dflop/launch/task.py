"""What every task of a Slurm job runs: `python -m dflop.launch.task FOLDER JOB_ID ENTRY ARGS...`, started by srun.

Turns Slurm's words into the variables torch.distributed reads, leaves a pid file, imports the entry, calls it, and
leaves its value or its traceback where the driver looks. It imports nothing heavy, so that a broken entry fails with
its own traceback. An entry that ends the process itself leaves nothing: its exit code is all there is to say.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from dflop.launch.marks import TRACE_BEGINS, TRACE_ENDS
from dflop.launch.payload import load_entry, write_pid_file
from dflop.launch.ranks import srun_environment


def main(folder: str, job_id: str, entry: str, *args: str) -> None:
    """Run this task.

    Args:
        folder: Of the job.
        job_id: As its handle says it; of an element of an array `123_4`.
        entry: `package.module:function`.
        args: Of the function.
    """
    os.environ |= srun_environment(os.environ)
    rank = int(os.environ["RANK"])
    write_pid_file(Path(folder), job_id, rank)
    result = Path(folder) / f"{job_id}_{rank}_result.pkl"
    try:
        content = pickle.dumps(("success", load_entry(entry)(*args)))
    except Exception:
        trace = traceback.format_exc()
        _leave(result, pickle.dumps(("error", trace)))
        print(TRACE_BEGINS, trace.rstrip(), TRACE_ENDS, sep="\n", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    _leave(result, content)


def _leave(path: Path, content: bytes) -> None:
    """Readers on other nodes see all of it or nothing."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
