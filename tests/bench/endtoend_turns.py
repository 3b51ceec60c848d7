"""Training jobs of which one moves at a time, a step each in turn, so that what the machine does hits all alike.

The first step and the last one are not timed: the first is where processes find each other, load weights and warm up,
behind the last one there is none whose data they would prepare. In between a job that is not in turn is stopped with
all of its processes, the scheduler among them (SIGSTOP). The order turns round with every step.

`python -m tests.bench.endtoend_turns RUN_DIR PORT [given]` is a rank of such a job, started as any rank is. It trains
as `dflop.jobs.train` does, and behind every step reports and waits for its next turn. By then the next step's data is
there, so that nothing is left to do in the turn of another job. With `given` the step plans are those of the run
directory.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dflop.jobs import train
from dflop.jobs.rank import Rank
from dflop.records import StepObservation
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.messages import say
from dflop.steps.submit import CPU_ENV
from dflop.train.liveness import Activity
from tests.bench.jobs import take_given_steps
from tests.jobs.training import log_of, start_ranks

LIMIT_S = 240
"""Of anything that is waited for."""
POLL_S = 0.0005
TURN, GIVEN = b".", "given"


@dataclass
class Taken:
    """What was seen of one job from outside."""

    step_s: list[float] = field(default_factory=list)
    """Of steps 1 to the last but one: from when it may begin until every rank holds the next step's data."""
    cpu_s: list[float] = field(default_factory=list)
    """Of all of its processes."""
    peak_bytes: list[int] = field(default_factory=list)
    """The most that each rank held in memory, interpreter and libraries included."""


class Job:
    """The processes of one job."""

    def __init__(self, run: RunDir, *, is_given: bool) -> None:
        self._run, self.taken = run, Taken()
        self._connections: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LIMIT_S)
            args = [str(run.path), str(server.getsockname()[1]), *([GIVEN] if is_given else [])]
            self._ranks = start_ranks(run, "tests.bench.endtoend_turns", *args, env=CPU_ENV)
            try:
                self._connections = [server.accept()[0] for _ in self._ranks]
            except BaseException:
                self.__exit__()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for connection in self._connections:
            connection.close()

    def wait_and_stop(self) -> None:
        """Until every rank has reported the end of its step.

        Raises:
            RuntimeError: a rank ended, or took too long.
        """
        for connection in self._connections:
            connection.settimeout(LIMIT_S)
            if not connection.recv(1):
                logs = "\n".join(log_of(self._run, rank).read_text()[-2000:] for rank in range(len(self._ranks)))
                raise RuntimeError(f"a rank ended\n{logs}")
        self._signal(signal.SIGSTOP)

    def turn(self) -> None:
        """Let it train one step."""
        cpu_s, began_s = self._cpu_s(), time.perf_counter()
        self.resume()
        self.wait_and_stop()
        self.taken.step_s.append(time.perf_counter() - began_s)
        self.taken.cpu_s.append(self._cpu_s() - cpu_s)

    def resume(self) -> None:
        """Let it train a step; behind the last one it ends."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.sendall(TURN)

    def finish(self) -> None:
        """The last step.

        Raises:
            RuntimeError: a rank failed.
        """
        lines = [Path(f"/proc/{rank.pid}/status").read_text().splitlines() for rank in self._ranks]
        self.taken.peak_bytes = [1024 * int(x.split()[1]) for of in lines for x in of if x.startswith("VmHWM")]
        self.resume()
        if codes := [code for rank in self._ranks if (code := rank.wait(LIMIT_S))]:
            raise RuntimeError(f"ranks ended with {codes}: {log_of(self._run, 0).read_text()[-2000:]}")

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, number)

    def _cpu_s(self) -> float:
        """CPU seconds of all processes of the ranks' groups, those of their children that have ended too."""
        groups, ticks = {rank.pid for rank in self._ranks}, 0
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # ended meanwhile
                # Behind the name in brackets: state, parent, group; from the 12th on times of it and of its children.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) in groups:
                    ticks += sum(map(int, fields[11:15]))
        return ticks / os.sysconf("SC_CLK_TCK")


def take_turns(runs: Mapping[str, tuple[RunDir, bool]], num_steps: int) -> dict[str, Taken]:
    """Train runs, each with whether its step plans are given, to their end, a step each in turn.

    Raises:
        RuntimeError: a rank failed.
    """
    with contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(Job(run, is_given=is_given)) for name, (run, is_given) in runs.items()
        }  # fmt: skip
        for job in jobs.values():
            job.wait_and_stop()
        for step in range(1, num_steps - 1):
            for job in list(jobs.values())[:: 1 if step % 2 else -1]:
                job.turn()
            told = ", ".join(f"{name} {job.taken.step_s[-1]:.2f} s" for name, job in jobs.items())
            say(f"step {step + 1} of {num_steps}: {told}")
        for job in jobs.values():
            job.finish()
        return {name: job.taken for name, job in jobs.items()}


def wait_for_feed(feed: Activity, next_step: int) -> None:
    """Until the data of the next step is prepared.

    Raises:
        RuntimeError: it never is; the message says what is being done for it.
    """
    for _ in range(int(LIMIT_S / 2 / POLL_S)):
        if feed.spell().what == f"step {next_step + 1}, the step before":  # as the training loop says it
            return
        time.sleep(POLL_S)
    raise RuntimeError(f"step {next_step + 1} is not prepared: {feed.spell().what}")


def main(run_path: str, port: str, given: str = "") -> None:
    """A rank."""
    os.setpgid(0, 0)  # with all it starts, it stands still as one
    connection = socket.create_connection(("127.0.0.1", int(port)))
    if given == GIVEN:
        take_given_steps()
    observed = Rank._observed

    def observed_and_waited(self: Any, seen: StepObservation) -> None:
        observed(self, seen)
        is_last = seen.step + 1 == len(self.steps)
        if not is_last:
            wait_for_feed(self.activities.feed, seen.step + 1)
        connection.sendall(TURN)
        if not is_last and not connection.recv(1):
            raise SystemExit("the bench has ended")

    Rank._observed = observed_and_waited  # type: ignore[method-assign]  # the rank is otherwise as it is
    train.main(run_path, TRAIN)


if __name__ == "__main__":
    main(*sys.argv[1:])
