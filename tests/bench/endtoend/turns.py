"""Training jobs side by side of which one moves at a time, a step each in turn: what the machine does hits all alike.

The first step and the last one are not timed: the first is where processes find each other, load weights and warm up,
behind the last one there is none whose data they would prepare. In between a job that is not in its turn is stopped
with all of its processes, the scheduler among them (SIGSTOP), so that what an arm does beside its ranks costs that arm,
and no other. The order turns round with every step: A B C, C B A, A B C.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dflop.jobs.submit import CPU_ENV
from tests.bench.endtoend.arms import Arm
from tests.bench.endtoend.rank import GIVEN, TURN
from tests.jobs.training import log_of, start_ranks

LIMIT_S = 240
"""Of anything that is waited for."""


@dataclass(frozen=True)
class Turn:
    """One step of one arm."""

    wall_s: float
    """From when it may begin until every rank has ended it and holds the next step's data."""
    cpu_s: float
    """Of all of its processes."""


class Job:
    """The processes of one arm."""

    def __init__(self, arm: Arm) -> None:
        self.arm = arm
        self._connections: list[socket.socket] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            given = [] if arm.has_scheduler else [GIVEN]
            args = [str(arm.run.path), str(server.getsockname()[1]), *given]
            self._ranks = start_ranks(arm.run, "tests.bench.endtoend.rank", *args, env=CPU_ENV)
            try:
                self._connections = self._accept(server)
            except BaseException:
                self.kill()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def warm_up(self) -> None:
        """Until the first step, which nobody has to allow, is over; then the job stands still."""
        self._wait()
        self._signal(signal.SIGSTOP)

    def turn(self) -> Turn:
        """Let it train one step."""
        cpu_s = self._cpu_s()
        began_s = time.perf_counter()
        self.go_on()
        self._wait()
        wall_s = time.perf_counter() - began_s
        self._signal(signal.SIGSTOP)
        return Turn(wall_s, self._cpu_s() - cpu_s)

    def go_on(self) -> None:
        """Let it train a step; behind the last one it ends."""
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            connection.sendall(TURN)

    def join(self) -> None:
        """Until it has ended.

        Raises:
            RuntimeError: a rank failed.
        """
        try:
            codes = [rank.wait(LIMIT_S) for rank in self._ranks]
        except subprocess.TimeoutExpired:
            raise self._failed(f"not over after {LIMIT_S} s") from None
        if any(codes):
            raise self._failed(f"ranks ended with {codes}")

    def peak_bytes(self) -> list[int]:
        """The most that each rank has held in memory until now, interpreter and libraries included."""
        lines = [Path(f"/proc/{rank.pid}/status").read_text().splitlines() for rank in self._ranks]
        return [1024 * int(line.split()[1]) for of in lines for line in of if line.startswith("VmHWM")]

    def kill(self) -> None:
        """End whatever is left of it."""
        self._signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for connection in self._connections:
            connection.close()

    def _accept(self, server: socket.socket) -> list[socket.socket]:
        """Connections of all ranks, by rank."""
        found: dict[int, socket.socket] = {}
        while len(found) < len(self._ranks):
            self._until_readable(server)
            connection, _ = server.accept()
            found[connection.recv(1)[0]] = connection
        return [found[rank] for rank in sorted(found)]

    def _wait(self) -> None:
        """Until every rank has said that its step is over."""
        for connection in self._connections:
            self._until_readable(connection)
            if not connection.recv(1):
                raise self._failed("a rank ended")

    def _until_readable(self, one: socket.socket) -> None:
        for _ in range(LIMIT_S):
            if select.select([one], [], [], 1.0)[0]:
                return
            if any(rank.poll() is not None for rank in self._ranks):
                raise self._failed("a rank ended")
        raise self._failed(f"nothing for {LIMIT_S} s")

    def _failed(self, why: str) -> RuntimeError:
        logs = "\n".join(log_of(self.arm.run, rank).read_text()[-2000:] for rank in range(len(self._ranks)))
        return RuntimeError(f"`{self.arm.name}`: {why}\n{logs}")

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, number)

    def _cpu_s(self) -> float:
        return group_cpu_s({rank.pid for rank in self._ranks})


def group_cpu_s(groups: Collection[int]) -> float:
    """CPU seconds of all processes that live in these process groups, those of their children that have ended too."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # ended meanwhile
            # Behind the name in brackets: state, parent, group, and from the 12th on times of it and of its children.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) in groups:
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def turn_order(names: Sequence[str], step: int) -> list[str]:
    """Names in the order in which they take their turns."""
    return list(names) if step % 2 else list(reversed(names))


@dataclass(frozen=True)
class Taken:
    """What was seen of one arm from outside."""

    turns: tuple[Turn, ...]
    """Of steps 1 to the last but one."""
    peak_bytes: tuple[int, ...]
    """Per rank."""


def take_turns(arms: Sequence[Arm], num_steps: int, progress: Callable[[str], None]) -> Mapping[str, Taken]:
    """Train all arms to their end, a step each in turn.

    Raises:
        RuntimeError: a rank failed.
    """
    with contextlib.ExitStack() as stack:
        jobs = {arm.name: stack.enter_context(Job(arm)) for arm in arms}
        for job in jobs.values():
            job.warm_up()
        turns: dict[str, list[Turn]] = {name: [] for name in jobs}
        for step in range(1, num_steps - 1):
            for name in turn_order(list(jobs), step):
                turns[name].append(jobs[name].turn())
            told = ", ".join(f"{name} {of[-1].wall_s:.2f} s" for name, of in turns.items())
            progress(f"step {step + 1} of {num_steps}: {told}")
        peaks = {name: tuple(job.peak_bytes()) for name, job in jobs.items()}
        for job in jobs.values():
            job.go_on()
        for job in jobs.values():
            job.join()
    return {name: Taken(tuple(of), peaks[name]) for name, of in turns.items()}
