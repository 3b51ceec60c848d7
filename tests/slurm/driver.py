"""A driver that trains a run which has a plan, as `dflop train` does once the profiles are there.

`python -m tests.slurm.driver RUN_DIR`; says what happens on stderr, ends with the exit code of what ended it. Its jobs
rest behind every step: while a test waits for Slurm, they would fill the machine with steps that nobody looks at.
"""

import asyncio
import sys
import time

from dflop.errors import DflopError
from dflop.run.directory import open_run
from dflop.steps import submit
from dflop.steps.follow import Listener
from dflop.steps.session import driver_session, train_to_end
from tests.jobs.slow_steps import with_slow_steps


def say(line: str) -> None:
    print(f"{time.time():.1f} {line}", file=sys.stderr, flush=True)


async def main(path: str) -> None:
    run = open_run(path)
    async with driver_session(run, say):
        await train_to_end(run, Listener(say))


if __name__ == "__main__":
    submit.train_job = with_slow_steps(submit.train_job)
    try:
        asyncio.run(main(sys.argv[1]))
    except DflopError as error:
        say(f"driver: {error}")
        raise SystemExit(error.exit_code) from None
