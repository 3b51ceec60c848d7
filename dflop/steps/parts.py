"""The parts of a run, in the order they are done, and all of them in a row.

Everybody who drives a run calls these: `dflop train` directly, the flows as tasks. What is done already is found in the
store, in the journal and in checkpoints, so that each of them may be called again at any time.
"""

from __future__ import annotations

import asyncio

from dflop.config import Config
from dflop.data.demo import make_demo_dataset
from dflop.data.distribution import shapes_frame, summary_text
from dflop.errors import ConfigError
from dflop.launch import JobState, Journal
from dflop.records import Plan
from dflop.report.summary import RunSummary
from dflop.run.batches import COMPARE, TRAIN
from dflop.run.console import Say
from dflop.run.directory import RunDir, rules_of
from dflop.steps import continuing, planning, profiling, submit
from dflop.steps.continuing import Todo
from dflop.steps.drive import Drive
from dflop.steps.follow import follow_job, ingest_run, stored_profile
from dflop.steps.replanning import Advice
from dflop.steps.retrying import while_it_gets_on, with_retries
from dflop.store.freshen import freshen
from dflop.store.reader import Reader
from dflop.views import run_results


async def demo_data(drive: Drive) -> None:
    """Build the demo dataset unless it is there."""
    d, rules = drive.config.dataset, rules_of(drive.config)
    folder, num_samples = d.annotations.parent, d.demo_num_samples
    await asyncio.to_thread(make_demo_dataset, folder, num_samples, progress=drive.say, rules=rules)


async def data_profile(drive: Drive) -> None:
    """Shapes of every sample, from the store or from jobs over shards; healthy ones go to the run directory.

    Once training has begun they stay: the order of samples is made from them.

    Raises:
        DataError: the dataset cannot be read, is unusable, or has changed under a run that trains on it.
    """
    run, say = drive.run, drive.say
    drive.check()
    has_begun = run.num_attempts(TRAIN) and (run.path / "shapes.parquet").is_file()
    if has_begun and not await asyncio.to_thread(profiling.is_as_begun, run, say):
        return
    found = await with_retries(lambda: profiling.data_profile(run, drive.launcher, say), say)
    told = await asyncio.to_thread(_keep_shapes, run, drive.config, found.profile_key)
    say(f"{found.num_rows} healthy samples, {found.num_quarantined} quarantined\n{told}")


def _keep_shapes(run: RunDir, config: Config, profile_key: str) -> str:
    """Bring a profile into the run directory, where jobs look for it; its distribution as a table."""
    with Reader(config.store) as reader:
        shapes = reader.shapes(profile_key)
    run.write_shapes(shapes)
    return summary_text(shapes_frame(shapes))


async def model_profile(drive: Drive) -> str:
    """Measurements of every module, from the store or from jobs; returns the profile's key."""
    drive.check()
    return await with_retries(lambda: profiling.model_profile(drive.run, drive.launcher, drive.say), drive.say)


async def profile(drive: Drive) -> None:
    """Everything that a plan is made from."""
    if drive.config.dataset.demo:
        await demo_data(drive)
    await data_profile(drive)
    await model_profile(drive)


async def what_next(drive: Drive) -> Todo:
    """What training needs next: a plan, a job, or nothing more."""
    return await asyncio.to_thread(continuing.what_next, drive.run, drive.launcher)


async def plan(drive: Drive) -> tuple[Plan, ...]:
    """Choose layout and number of microbatches for what comes next.

    Returns:
        Candidates, the one to run first; empty if the run stays with its plan.

    Raises:
        ConfigError: the run has no profiles yet.
    """
    drive.check()
    key = await asyncio.to_thread(_profiled_key, drive)
    plans = await asyncio.to_thread(continuing.plan_next, drive.run, key, drive.advice, drive.say)
    drive.advice = None
    if plans:
        drive.say(f"plan: {plans[0].reason}")
    await drive.teller.tell()
    return plans


async def train(drive: Drive) -> None:
    """Train to the end of the stage, or until another plan pays.

    On Slurm a job that had to stop with a checkpoint, for its time limit or somebody else's job, is followed by another
    one. On this machine whoever told it to stop meant it.

    Raises:
        ConfigError: the run has no plan yet.
        Interrupted: the job was told to stop.
        LaunchError: the job failed.
    """
    run, say = drive.run, drive.say
    if not run.has_plan():
        raise ConfigError("the run has no plan yet", where=str(run.path), hint="plan first: dflop train does all of it")
    drive.check()

    async def once() -> Advice | None:
        return await with_retries(lambda: continuing.train_once(run, drive.launcher, say, drive.teller), say)

    if drive.config.cluster.backend == "slurm":
        drive.advice = await while_it_gets_on(once, lambda: continuing.next_step(run), say)
    else:
        drive.advice = await once()


async def campaign(drive: Drive) -> None:
    """Plan and train in turns, to the end of training."""
    while (todo := await what_next(drive)) is not Todo.NOTHING:
        if todo is Todo.PLAN:
            await plan(drive)
        else:
            await train(drive)


def wants_comparison(drive: Drive) -> bool:
    """Whether the data-blind comparison is still to be trained."""
    if not drive.config.compare.num_batches:
        return False
    key = submit.train_key(drive.run, COMPARE)
    states = [r.state for r in Journal(drive.run.path, drive.run.run_id).records() if r.job_key == key]
    return not states or states[-1] != JobState.DONE


async def compare(drive: Drive) -> None:
    """Train the first batches under both policies."""
    run, say = drive.run, drive.say
    drive.check()
    spec = submit.train_job(run, drive.config, COMPARE, run.plan().num_processes)
    await with_retries(lambda: follow_job(run, drive.launcher, spec, say), say)
    await ingest_run(run, say)


async def finish(drive: Drive) -> None:
    """Note that the run is done, if nothing is left to do of it."""
    if await what_next(drive) is Todo.NOTHING and not wants_comparison(drive):
        drive.done()


async def report(drive: Drive) -> RunSummary:
    """Last ingest, and report.html from what the store then knows."""
    await ingest_run(drive.run, drive.say)
    return await asyncio.to_thread(run_results.write_report, drive.run)


def report_again(run: RunDir, say: Say) -> RunSummary:
    """report.html of a run that somebody else may be driving, and summary and history beside it.

    Rows that wait in the spool are brought in first, unless somebody else is at it.
    """
    store = run.config().store
    if num_waiting := freshen(store, run.run_id):
        say(f"{num_waiting} files of the run wait to be ingested: dflop store ingest --store {store}")
    return run_results.write_report(run)


async def everything(drive: Drive) -> RunSummary:
    """All that is left of a run, to its report."""
    await profile(drive)
    await campaign(drive)
    if wants_comparison(drive):
        await compare(drive)
    drive.done()
    return await report(drive)


def _profiled_key(drive: Drive) -> str:
    """Key of the model profile, which must be complete, as must be the shapes in the run directory."""
    key, hardware, _ = planning.model_profile_key(drive.config)
    hint = "profile first: dflop train does all of it"
    if not (drive.run.path / "shapes.parquet").is_file():
        raise ConfigError("the dataset of the run is not profiled yet", where=str(drive.run.path), hint=hint)
    if stored_profile(drive.config.store, key) is None:
        raise ConfigError(f"the model is not profiled on {hardware} yet", where=str(drive.config.store), hint=hint)
    return key
