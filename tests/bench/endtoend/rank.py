"""A rank of one arm: `python -m tests.bench.endtoend.rank RUN_DIR PORT [given]`, started as any rank is.

It trains as `dflop.jobs.train` does, but for one thing: behind every step it tells the bench so and waits for its next
turn. By then the next step's data is there, so that what a step takes is all of what it takes, and nothing is left that
would run on in the turn of another arm. With `given` the step plans are those of the run directory.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from dflop.jobs import supervisor, train
from dflop.jobs.steps import TRAIN
from dflop.records import StepObservation
from dflop.train.activity import Activity

GIVEN = "given"
TURN = b"."
POLL_S, MAX_POLLS = 0.0005, 240_000
START_PATIENCE_S = 60.0
"""For step plans that are published all at once: none may be replaced by a quick one."""


def wait_for_feed(feed: Activity, next_step: int) -> None:
    """Until the data of the next step is prepared.

    Raises:
        RuntimeError: it never is; the message says what is being done for it.
    """
    for _ in range(MAX_POLLS):
        if feed.now.what == f"step {next_step + 1}, the step before":  # as the training loop says it
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"step {next_step + 1} is not prepared: {feed.now.what}")


def take_turns(connection: socket.socket) -> None:
    """Make this rank wait behind every step but the last one."""
    observed = train._Rank._observed

    def observed_and_waited(self: Any, seen: StepObservation) -> None:
        observed(self, seen)
        is_last = seen.step + 1 == len(self.steps)
        if not is_last:
            wait_for_feed(self.activities.feed, seen.step + 1)
        connection.sendall(TURN)
        if not is_last and not connection.recv(1):
            raise SystemExit("the bench has ended")

    train._Rank._observed = observed_and_waited  # type: ignore[method-assign]  # the rank is otherwise as it is


def main(run_path: str, port: str, given: str = "") -> None:
    os.setpgid(0, 0)  # with all it starts, it stands still as one
    connection = socket.create_connection(("127.0.0.1", int(port)))
    connection.sendall(bytes([int(os.environ["RANK"])]))
    if given == GIVEN:
        supervisor.SCHEDULER_MODULE = "tests.bench.correct.replayed"
        supervisor.EXIT_S = 0.0  # who publishes them lives until it is ended
        train.START_PATIENCE_S = START_PATIENCE_S
    take_turns(connection)
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
