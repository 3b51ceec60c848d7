"""The time in which one process drives a run: it is the only one, and how it ends is noted in run and store.

`dflop train` and the flows drive the same way; what they do in between are the steps of this package.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from dflop import errors
from dflop.config import Config, Origins, load_with_origins
from dflop.data.demo import make_demo_dataset
from dflop.errors import Cancelled, ConfigError, DflopError, Interrupted, Stopped, StoreError
from dflop.launch import JobState, Journal, Launcher, cancel_jobs
from dflop.records import ProfileRecord
from dflop.run import lifecycle
from dflop.run.directory import RunDir, family_of
from dflop.run.driver_lock import check_free, drive_alone
from dflop.run.find import find_run, runs_folder
from dflop.run.messages import Meter, Say
from dflop.run.queue import as_cancelled, launcher_of, live_jobs
from dflop.steps import next_plan, planning, profiling, training
from dflop.steps.follow import Listener, ingest_run, is_infrastructure_failure
from dflop.steps.preflight import preflight
from dflop.store.ingest import ingest
from dflop.units import counted, seconds
from dflop.views import run_results

RETRIES, RETRY_DELAY_S = 2, 5.0
"""Retries of a step that an infrastructure failure ended, and the seconds before each."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a limit of the login node, a session that is closed."""

T = TypeVar("T")


def run_meant(
    config: Config | None = None, path: Path | str = "", overrides: Sequence[str] = (), name: str = "", *,
    folder: Path | None = None, say: Say,
) -> RunDir:  # fmt: skip
    """The run that is meant: an existing one by its name, or the unfinished or a new one of a configuration.

    A name, as `find_run` takes it, goes before a configuration, and a configuration before the path of one and what
    overrides it. Runs are where the configuration says, else in `folder`. What cannot run here leaves no trace.

    Raises:
        ConfigError: there is no such run, or the configuration cannot run here.
        LaunchError: somebody drives the run.
    """
    if not (name or config or path):
        hint = "set `config`, or a file as `config_path`, or an existing run as `run`"
        raise ConfigError("no configuration and no run given", where="parameters", hint=hint)
    if config is not None and path:
        say(f"both `config` and `config_path` ({path}) are set")
    if overrides and (config is not None or not path):
        raise ConfigError("`overrides` need `config_path`", where="parameters", hint="change `config` itself")
    origins = Origins(Path("config"))
    if config is None and path:
        loaded = load_with_origins(Path(path), overrides)
        config, origins = loaded.config, loaded.origins
    if name or config is None:
        run = find_run(name, config.runs if config is not None else folder or runs_folder())
        say(f"run {run.run_id} in {run.path}")
        return run
    preflight(config, origins)
    return begun(config, say)


def begun(config: Config, say: Say) -> RunDir:
    """The unfinished run of a configuration, which can run here, or a new one."""
    run, is_resumed = lifecycle.begin(config, say)
    say(f"{'resuming' if is_resumed else 'starting'} run {run.run_id} in {run.path}")
    return run


def finished_text(run: RunDir) -> str:
    """What there is to say about a run of which nothing is left to do."""
    return f"run {run.run_id} is finished, nothing to do; report: {run.report_file}"


@contextlib.asynccontextmanager
async def driver_session(run: RunDir, say: Say) -> AsyncIterator[None]:
    """Drive a run for the length of the block; how it ends is noted in the run directory and in the store.

    A run that is not there to train is done when the block ends.

    Raises:
        Cancelled: `dflop cancel` was called for the run.
        Stopped: a signal came; the jobs are cancelled.
        LaunchError: somebody else drives the run.
        DflopError: as the block raised it.
    """
    config, began_s = run.config(), time.time()

    def note_end(state: str) -> None:
        if lifecycle.is_finished(run):  # a report that cannot be written undoes no training
            return
        try:
            lifecycle.note(run, state)
        except (StoreError, OSError) as error:  # why it ended is the thing to tell, not that the disk is full, too
            say(f"that the run is {state} cannot be recorded: {error}")

    await asyncio.to_thread(check_free, run, say)  # this may take a minute
    with _named_disk(), drive_alone(run, say), _stopped_by_signals() as signals:
        run.mark_cancelled(False)
        lifecycle.note(run, lifecycle.RUNNING)
        try:
            if (d := config.dataset).demo:
                rules, num_samples = family_of(config), d.demo_num_samples
                make = partial(make_demo_dataset, d.annotations.parent, num_samples, rules=rules)
                await asyncio.to_thread(make, progress=say, at=Meter(say))
            yield
        except DflopError as error:
            ended = error
            if run.is_cancelled() and not isinstance(error, Cancelled):  # a job that ended of it has not failed
                ended = as_cancelled(run, error.what.splitlines()[0])
            states = ((Cancelled, lifecycle.CANCELLED), (Interrupted, lifecycle.INTERRUPTED))
            note_end(next((state for kind, state in states if isinstance(ended, kind)), lifecycle.FAILED))
            if not isinstance(error, StoreError):
                _record(run, config)
            if ended is error:
                raise
            raise ended from error
        except BaseException as error:  # a signal, a flow run that is cancelled, or a fault of ours
            if not isinstance(error, Exception | GeneratorExit):
                _sweep(run, config)
            note_end(lifecycle.FAILED if isinstance(error, Exception) else lifecycle.INTERRUPTED)
            _record(run, config)
            if not signals:
                raise
            jobs = Journal(run.path, run.run_id).jobs().values()
            left = [job.handle.job_id for job in jobs if not job.state.is_final]
            cancelled = [job for job in jobs if job.state is JobState.CANCELLED and job.last.observed_at_s >= began_s]
            what = f"interrupted by {signals[0].name}: "
            if left:
                what += f"jobs that may still run: {', '.join(left)} (dflop cancel)"
            else:
                what += f"{counted(len(cancelled), 'job')} cancelled"
            step = run.next_step()
            goes_on = f"at step {step}" if step else "from the profiles and plans that are there"
            stopped = Stopped(f"{what}; the same command resumes {goes_on}", where=str(run.path))
            stopped.exit_code = 128 + signals[0]
            raise stopped from None
        note_end(lifecycle.READY if run.state().get("trains", True) else lifecycle.DONE)


@contextlib.contextmanager
def _stopped_by_signals() -> Iterator[list[signal.Signals]]:
    """Signals that ask to end cancel this task, instead of ending the process with its jobs left; lists those."""
    task, loop, came = asyncio.current_task(), asyncio.get_running_loop(), list[signal.Signals]()
    assert task is not None
    # Whoever starts a driver with nohup means it to outlive its session. Only a main thread hears signals.
    is_main = threading.current_thread() is threading.main_thread()
    before = {n: h for n in STOPPING if is_main and (h := signal.getsignal(n)) not in (None, signal.SIG_IGN)}

    def stop(number: signal.Signals) -> None:
        came.append(number)
        if len(came) == 1:  # the second time it is at work already
            task.cancel()

    for number in before:
        loop.add_signal_handler(number, stop, number)
    try:
        yield came
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        if came:
            task.uncancel()


@contextlib.contextmanager
def _named_disk() -> Iterator[None]:
    """A disk that fails under the run directory is an error of the machine, and none of ours."""
    try:
        yield
    except OSError as error:
        if (named := errors.of_disk(error)) is None:
            raise
        raise named from error


def _sweep(run: RunDir, config: Config) -> None:
    """End jobs that nobody was waiting for in the moment when the signal to stop came."""
    with contextlib.suppress(DflopError):
        launcher = launcher_of(run, config)
        cancel_jobs(launcher, [handle for handle, _ in live_jobs(run, launcher)], Journal(run.path, run.run_id))


def _record(run: RunDir, config: Config) -> None:
    """Bring what is known of the run and its jobs into the store; why the run ended is the thing to tell, not this."""
    with contextlib.suppress(StoreError, OSError):
        lifecycle.spool_journal(run, config)
        ingest(config.store)


async def with_retries(work: Callable[[], Awaitable[T]], run: RunDir, say: Say) -> T:
    """What `work` returns, done up to `RETRIES` times again after a lost node, a preemption or a lost job.

    What it had finished stays finished: profiles are kept by shard, training goes on from its checkpoint. Flows leave
    this to Prefect's retries.

    Raises:
        DflopError: of the last time, or at once what the job did to itself.
    """
    for num_left in range(RETRIES, -1, -1):
        try:
            return await work()
        except DflopError as error:
            if not num_left or not is_infrastructure_failure(error, run):
                raise
            times = "once more" if num_left == 1 else f"{num_left} more times"
            say(f"{error.what.splitlines()[0]}; retrying in {seconds(RETRY_DELAY_S)}, {times} if need be")
            await asyncio.sleep(RETRY_DELAY_S)
    raise AssertionError("unreachable")


async def run_to_end(run: RunDir, to: Listener) -> None:
    """All that is left of a run, to its report: what `flows/pipeline.py` does, without Prefect."""
    launcher, say = launcher_of(run, run.config()), to.say
    await profiled(run, to)
    await train_to_end(run, to)
    if training.wants_comparison(run):
        await with_retries(lambda: training.compare(run, launcher, to), run, say)
    lifecycle.note(run, lifecycle.DONE)
    await ingest_run(run, say)
    await asyncio.to_thread(run_results.write_report, run)


async def profiled(run: RunDir, to: Listener) -> ProfileRecord:
    """The profile of a run's modules, made after that of its samples, which then lie in its directory."""
    launcher = launcher_of(run, run.config())
    data = await profiled_data(run, launcher, to)
    await asyncio.to_thread(profiling.take_samples, run, data, to.say)
    return await with_retries(lambda: profiling.profile_model(run, launcher, to, data), run, to.say)


async def profiled_data(run: RunDir, launcher: Launcher, to: Listener) -> ProfileRecord:
    """The profile of a run's samples."""
    key = await asyncio.to_thread(profiling.data_profile_key, run, to.say)
    return await with_retries(lambda: profiling.profile_data(run, launcher, to, key), run, to.say)


async def train_to_end(run: RunDir, to: Listener) -> None:
    """Plan and train in turns, to the end of training, a run that is profiled."""
    launcher = launcher_of(run, run.config())
    trained = await asyncio.to_thread(training.trained_so_far, run, launcher)
    while not trained.is_over:
        await asyncio.to_thread(next_plan.next_plan, run, launcher, trained.advice, to.say)
        trained = await with_retries(lambda: training.train(run, launcher, to), run, to.say)


@contextlib.asynccontextmanager
async def own_run(config: Config, suffix: str, say: Say) -> AsyncIterator[RunDir]:
    """A run directory for work that trains nothing, named after it, with its state in the store."""
    run, _ = lifecycle.begin(config.model_copy(update={"name": f"{config.name}-{suffix}"}), say, trains=False)
    async with driver_session(run, say):
        yield run


async def profile_dataset(config: Config, say: Say) -> ProfileRecord:
    """Profiles a dataset.

    Raises:
        DataError: the dataset cannot be read, or too much of it is unusable.
        LaunchError: a job cannot be submitted.
    """
    async with own_run(config, "data", say) as run:
        return await judged_data(run, launcher_of(run, run.config()), say)


async def judged_data(run: RunDir, launcher: Launcher, say: Say) -> ProfileRecord:
    """The profile of a run that trains nothing, judged; raises as `profile_dataset`."""
    found = await profiled_data(run, launcher, Listener(say))
    await asyncio.to_thread(profiling.judge, run, found, say)
    return found


async def profile_modules(config: Config, say: Say) -> str:
    """Key of the profile of a model's modules over its dataset, with cost tables; raises as `profile_dataset`."""
    async with own_run(config, "model", say) as run:
        model = await profiled(run, Listener(say))
        specs = profiling.specs_of(run)
        await asyncio.to_thread(planning.cost_tables, run.run_id, run.config(), model.profile_key, specs, say)
        return model.profile_key
