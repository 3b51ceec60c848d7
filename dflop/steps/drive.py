"""Driving a run: being its only driver, with one launcher and one voice, and noting how it ended.

`dflop train` and the flows drive the same way; what they do in between is in `parts.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dflop import errors
from dflop.config import Config, Origins
from dflop.errors import Cancelled, DflopError, Interrupted, StoreError
from dflop.launch import Launcher
from dflop.run import lifecycle
from dflop.run.console import Say
from dflop.run.directory import RunDir
from dflop.run.driver_lock import check_free, drive_alone
from dflop.run.find import find_run
from dflop.run.launcher import launcher_of
from dflop.run.queue import live_jobs
from dflop.steps.preflight import preflight
from dflop.steps.replanning import Advice
from dflop.steps.rounds import Teller
from dflop.store.ingest import ingest


@dataclass
class Drive:
    """A run that this process drives."""

    run: RunDir
    config: Config
    """Of the run, with absolute paths."""
    launcher: Launcher
    """One for all of its jobs: it may share its questions to a cluster among them."""
    say: Say
    teller: Teller
    check: Callable[[], None]
    """Raises a LaunchError once somebody else drives the run."""
    advice: Advice | None = None
    """What the training job was told to stop for, until there is a plan."""
    is_done: bool = field(default=False)

    def done(self) -> None:
        """Note that nothing is left to do: another run of this configuration begins anew."""
        if self.is_done:
            return
        lifecycle.note(self.run, self.config, lifecycle.DONE, config_key=lifecycle.key_of(self.run))
        self.is_done = True


def begin_or_take_up(
    config: Config | None, config_file: Path | Origins, *, name: str = "", folder: Path = Path("runs"), say: Say
) -> RunDir:
    """The run that is meant: an existing one by its name, or the unfinished or a new one of a configuration.

    Args:
        config: Of the run, where no name is given; checked before anything is written.
        config_file: Where it, or each of its keys, comes from, for errors.
        name: As `find_run` takes it; goes before a configuration.
        folder: Of run directories, for names.
        say: Told which run it is.

    Raises:
        ConfigError: there is no such run, or the configuration cannot run here.
        LaunchError: somebody drives the run.
    """
    if name:
        run = find_run(name, folder)
        say(f"run {run.run_id} in {run.path}")
        return run
    assert config is not None, "a run is named, or has a configuration"
    preflight(config, config_file)
    run, is_resumed = lifecycle.begin(config, say)
    say(f"{'resuming' if is_resumed else 'starting'} run {run.run_id} in {run.path}")
    return run


def finished_text(run: RunDir) -> str:
    """What there is to say about a run of which nothing is left to do."""
    return f"run {run.run_id} is finished, nothing is left to do; its report: {run.report_file}"


@contextlib.asynccontextmanager
async def driving(run: RunDir, say: Say, *, show_history: Callable[[], Awaitable[None]]) -> AsyncIterator[Drive]:
    """Drive a run for the length of the block; how it ends is noted in the run directory and in the store.

    Args:
        run: The run.
        say: Told what happens.
        show_history: Called when something was decided.

    Raises:
        Cancelled: `dflop cancel` was called for the run.
        LaunchError: somebody else drives the run.
        DflopError: as the block raised it.
    """
    config, key = run.config(), lifecycle.key_of(run)

    def note_end(state: str) -> None:
        try:
            lifecycle.note(run, config, state, config_key=key)
        except (StoreError, OSError) as error:  # why it ended is the thing to tell, not that the disk is full, too
            say(f"that the run is {state} cannot be noted: {error}")

    await asyncio.to_thread(check_free, run, say)  # this may take a minute
    with _named_disk(), drive_alone(run, say) as check:
        run.mark_cancelled(False)
        lifecycle.note(run, config, lifecycle.RUNNING, config_key=key)
        launcher = launcher_of(run, config)
        drive = Drive(run, config, launcher, say, Teller(run, say, show_history), check)
        try:
            yield drive
        except DflopError as error:
            ended = _as_cancelled(run, error)
            if not drive.is_done:  # a report that cannot be written undoes no training
                note_end(_state_after(ended))
            if not isinstance(error, StoreError):
                with contextlib.suppress(StoreError):  # the first error is the one to tell
                    await asyncio.to_thread(ingest, config.store)
            if ended is error:
                raise
            raise ended from error
        except BaseException as error:  # Ctrl-C, a flow run that is cancelled, or a fault of ours
            if not isinstance(error, Exception | GeneratorExit):
                _sweep(drive)
            if not drive.is_done:
                note_end(lifecycle.FAILED if isinstance(error, Exception) else lifecycle.INTERRUPTED)
            raise
        if not drive.is_done:
            note_end(lifecycle.READY)


@contextlib.contextmanager
def _named_disk() -> Iterator[None]:
    """A disk that fails under the run directory is an error of the machine, and none of ours."""
    try:
        yield
    except OSError as error:
        if (named := errors.of_disk(error)) is None:
            raise
        raise named from error


def _sweep(drive: Drive) -> None:
    """End jobs that nobody was waiting for in the moment when the signal to stop came."""
    with contextlib.suppress(DflopError):
        for handle, _ in live_jobs(drive.run, drive.launcher):
            drive.launcher.cancel(handle)


def _as_cancelled(run: RunDir, error: DflopError) -> DflopError:
    """A job that ended because its run was cancelled has not failed."""
    if isinstance(error, Cancelled) or not run.is_cancelled():
        return error
    return Cancelled(
        f"run `{run.run_id}` was cancelled: {error.what.splitlines()[0]}",
        where=str(run.path),
        hint="dflop run, or dflop train, takes it up again",
    )


def _state_after(error: DflopError) -> str:
    if isinstance(error, Cancelled):
        return lifecycle.CANCELLED
    return lifecycle.INTERRUPTED if isinstance(error, Interrupted) else lifecycle.FAILED
