from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from dflop.launch import JobHandle
from tests.flows.loading import module

HANDLE = JobHandle("slurm", "7", "demo-train", "k", Path("/jobs"), 1, 5.0)


@pytest.fixture(scope="module")
def keeping() -> ModuleType:
    return module("keeping")


class Launcher:
    """Notes what is cancelled."""

    backend = "fake"

    def __init__(self) -> None:
        self.cancelled: list[JobHandle] = []

    def cancel(self, *handles: JobHandle) -> None:
        self.cancelled += handles


@pytest.fixture
def handled():
    """Signals to stop are noted and end nothing, as where Prefect or asyncio takes them."""
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "is_told"), [(signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGUSR1, False)]
)
def test_a_signal_to_stop_is_seen_whoever_handles_it(keeping, handled, number, is_told):
    with keeping.signals_seen() as was_told:
        assert not was_told()
        os.kill(os.getpid(), number)
        assert was_told() == is_told
        assert was_told() == is_told, "for good"
    assert signal.set_wakeup_fd(-1) == -1


def test_who_cannot_know_believes_that_he_was_told(keeping):
    seen: list[bool] = []

    def look() -> None:
        with keeping.signals_seen() as was_told:
            seen.append(was_told())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    with keeping.signals_seen(), keeping.signals_seen() as inner:
        seen.append(inner())
    assert seen == [True, True]


def torn_down(keeping: ModuleType, was_told: bool, lines: list[str]) -> list[JobHandle]:
    """What is cancelled when the task of a flow is cancelled while it waits for a job."""
    launcher = Launcher()

    async def wait(found: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            found.cancel(HANDLE)
            raise

    async def main() -> None:
        found = keeping.KeepsJobs.around(launcher, lambda: was_told, lines.append)
        assert found.backend == "fake"
        await asyncio.gather(wait(found), wait(found))

    async def outer() -> None:
        task = asyncio.create_task(main())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(outer())
    return launcher.cancelled


def test_jobs_end_with_a_flow_that_was_told_to_and_go_on_otherwise(keeping):
    assert torn_down(keeping, True, []) == [HANDLE, HANDLE]
    lines: list[str] = []
    assert torn_down(keeping, False, lines) == []
    assert len(lines) == 1, "said once of a job"
    assert "goes on, the next run adopts it" in lines[0]


def test_what_the_flow_itself_cancels_is_cancelled(keeping):
    launcher = Launcher()

    async def main() -> None:
        keeping.KeepsJobs.around(launcher, lambda: False, str).cancel(HANDLE)

    asyncio.run(main())
    assert launcher.cancelled == [HANDLE]


def test_lines_that_nobody_reads_end_no_flow(keeping, monkeypatch):
    """As after kill -9 of the worker, who read them from a pipe."""
    monkeypatch.setattr(Console, "on_broken_pipe", Console.on_broken_pipe)
    reading, writing = os.pipe()
    os.close(reading)
    file = open(writing, "w")  # noqa: SIM115 - closing it fails
    keeping.outlive_readers()
    console = Console(file=file)
    console.print("lost")
    console.print("lost, too")
    with pytest.raises(BrokenPipeError):
        file.close()
