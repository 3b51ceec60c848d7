"""The whole loop as a Prefect flow: demo data -> data profile -> model profile -> plan -> train -> compare -> summary.

The flow watches and records; it owns nothing. Jobs are journalled before anybody waits, profiles are looked up in the
store before anything is submitted, training resumes from its checkpoint: run it again after any crash and it goes on.
Deploy by path: `flows/pipeline.py:pipeline`.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from prefect import State, flow, get_run_logger, task
from prefect.artifacts import acreate_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed

from dflop.config import load_config
from dflop.data.demo import make_demo_dataset
from dflop.data.distribution import shapes_frame, summary
from dflop.data.profile import profile_key
from dflop.errors import DataError, DflopError, InfrastructureError, StoreError
from dflop.jobs import planning, results, runs, submit
from dflop.jobs.preflight import preflight
from dflop.jobs.rundir import RunDir, dataset_ref, family_of
from dflop.jobs.steps import COMPARE, TRAIN
from dflop.launch import JobSpec, Journal, Launcher, run_job_async
from dflop.records import ProfileRecord, QuarantinedSample
from dflop.report.terminal import markdown_plan, markdown_summary
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter
from dflop.units import count, seconds

LOCAL_POLL_S = 0.5


def _failed_with_the_machine(_task: Any, _run: Any, state: Any) -> bool:
    """Retry what the cluster did to a job, never what the job did to itself."""
    return isinstance(state.data, InfrastructureError)


# The store knows what is done, under keys that cover code, hardware and data; Prefect's cache does not.
_STEP: dict[str, Any] = {"tags": ["dflop"], "cache_policy": NO_CACHE}
_JOB_STEP = _STEP | {"retries": 2, "retry_delay_seconds": 5, "retry_condition_fn": _failed_with_the_machine}


@flow(name="dflop-pipeline", flow_run_name="{config_path}", log_prints=False)
async def pipeline(config_path: str, overrides: list[str] | None = None) -> str | State[str]:
    """Run, or go on with, the pipeline of a configuration file.

    Args:
        config_path: YAML file.
        overrides: `a.b=value` strings.

    Returns:
        The run directory.
    """
    config = load_config(Path(config_path), overrides or [])
    preflight(config, Path(config_path))
    run, is_resumed = runs.begin(config)
    key, config = config.key, run.config()
    say = get_run_logger().info
    say(f"{'resuming' if is_resumed else 'starting'} run {run.run_id} in {run.path}")
    runs.note(run, config, runs.RUNNING, config_key=key)
    launcher = submit.launcher_of(run, config)
    try:
        if config.dataset.demo:
            await demo_data(run)
        await data_profile(run, launcher)
        model_key = await model_profile(run, launcher)
        if not run.has_plan():
            await plan(run, model_key)
        await train(run, launcher, TRAIN)
        if config.compare.num_batches:
            await train(run, launcher, COMPARE)
    except DflopError as error:
        runs.note(run, config, runs.FAILED, config_key=key)
        if not isinstance(error, StoreError):
            await asyncio.to_thread(ingest, config.store)
        # A state, not a raise: Prefect would log a traceback above a message that already says what to do.
        return Failed(message=error.what, data=error)
    runs.note(run, config, runs.DONE, config_key=key)
    await summarise(run)
    return str(run.path)


@task(name="demo-data", **_STEP)
async def demo_data(run: RunDir) -> None:
    """Build the demo dataset unless it is there."""
    d = run.config().dataset
    await asyncio.to_thread(make_demo_dataset, d.annotations.parent, d.demo_num_samples, progress=get_run_logger().info)


@task(name="data-profile", **_JOB_STEP)
async def data_profile(run: RunDir, launcher: Launcher) -> None:
    """Shapes of every sample, from the store or from jobs over shards; healthy ones go to the run directory."""
    config, say = run.config(), get_run_logger().info
    dataset, family = dataset_ref(config), family_of(config)
    key = await asyncio.to_thread(profile_key, dataset, family)
    found = _stored_profile(config.store, key)
    if found is None:
        started = time.time()
        done = await asyncio.gather(*(_job(run, launcher, spec) for spec in submit.data_jobs(run, config, key)))
        counts = [result for (result,) in done]
        found = _note_profile(
            run, key, "data", counts, time.time() - started, {"annotations": str(dataset.annotations)}
        )
        await _ingest(run)
    else:
        say(f"data profile {key} is in the store: {found.num_rows} samples, not repeated")
    _check_quarantine(run, key, found)
    with Reader(config.store) as reader:
        shapes = reader.shapes(key)
    run.write_shapes(shapes)
    say(f"{len(shapes)} healthy samples, {found.num_quarantined} quarantined\n{summary(shapes_frame(shapes))}")


@task(name="model-profile", **_JOB_STEP)
async def model_profile(run: RunDir, launcher: Launcher) -> str:
    """Measurements of every module, from the store or from a job; returns the profile's key."""
    config, say = run.config(), get_run_logger().info
    key, hardware, inputs = await asyncio.to_thread(planning.model_profile_key, config)
    found = _stored_profile(config.store, key)
    if found is not None:
        say(f"model profile {key} is in the store: {found.num_rows} measurements, not repeated")
        return key
    say(f"profiling on {hardware}")
    started = time.time()
    (result,) = await _job(run, launcher, submit.model_job(run, config, key, hardware))
    _note_profile(run, key, "model", [result], time.time() - started, inputs)
    await _ingest(run)
    return key


@task(name="plan", **_STEP)
async def plan(run: RunDir, model_key: str) -> None:
    """Choose the layout and the number of microbatches."""
    say = get_run_logger().info
    plans = await asyncio.to_thread(planning.plan_run, run, run.config(), model_key, say)
    say(f"plan: {plans[0].reason}")
    await acreate_markdown_artifact(markdown_plan(plans), key="dflop-plan", description=plans[0].reason)
    await _ingest(run)


@task(name="train", task_run_name="{mode}", **_JOB_STEP)
async def train(run: RunDir, launcher: Launcher, mode: str) -> None:
    """Train, or train the first batches under both policies (`compare`)."""
    config = run.config()
    await _job(run, launcher, submit.train_job(run, config, mode, run.plan().num_processes))
    await _ingest(run)


@task(name="summary", **_STEP)
async def summarise(run: RunDir) -> None:
    """Last ingest, report.html and the summary artifact."""
    await _ingest(run)
    found = await asyncio.to_thread(results.write_report, run)
    await acreate_markdown_artifact(markdown_summary(found), key="dflop-summary", description=found.verdict)


async def _job(run: RunDir, launcher: Launcher, spec: JobSpec) -> list[Any]:
    """Submit or adopt a job and follow it; its state and log lines go to the run's log."""
    config, say = run.config(), get_run_logger().info
    name = spec.folder.name
    poll_s = config.cluster.slurm.poll_interval_s if config.cluster.backend == "slurm" else LOCAL_POLL_S
    return await run_job_async(
        launcher,
        spec,
        Journal(run.path, run.run_id),
        on_state=lambda handle, status: say(f"{handle} is {status.state} {status.reason}".rstrip()),
        on_log_line=lambda line: say(f"{name} | {line}"),
        poll_interval_s=min(poll_s, 5.0),
    )


async def _ingest(run: RunDir) -> None:
    """Bring what jobs spooled, and the job journal so far, into the database."""
    config, say = run.config(), get_run_logger().info
    runs.spool_journal(run, config)
    report = await asyncio.to_thread(ingest, config.store)
    say(f"ingested {count(report.num_rows)} rows of {report.num_files} files in {seconds(report.elapsed_s)}")


def _stored_profile(store: Path, key: str) -> ProfileRecord | None:
    """The finished profile of this key; None also for a store that has never been written."""
    ingest(store)
    with Reader(store) as reader:
        return reader.profile(key)


def _note_profile(
    run: RunDir, key: str, kind: str, counts: list[dict[str, Any]], elapsed_s: float, inputs: dict[str, object]
) -> ProfileRecord:
    record = ProfileRecord(
        profile_key=key,
        kind=kind,
        run_id=run.run_id,
        inputs=json.dumps(inputs),
        num_rows=sum(int(c.get("num_samples", c.get("num_measurements", 0))) for c in counts),
        num_quarantined=sum(int(c.get("num_quarantined", 0)) for c in counts),
        created_at_s=time.time(),
        elapsed_s=elapsed_s,
    )
    with SpoolWriter(run.config().store, run.run_id, "profile-record") as spool:
        spool.append(record)
    return record


def _check_quarantine(run: RunDir, key: str, profile: ProfileRecord) -> None:
    config = run.config()
    total = profile.num_rows + profile.num_quarantined
    if profile.num_quarantined <= config.data_profile.max_bad_frac * total:
        return
    with Reader(config.store) as reader:
        bad = reader.records(QuarantinedSample, where={"profile_key": key, "phase": "profile"})
    examples = "\n".join(f"    row {b.sample_index} `{b.sample_id}`: {b.path} {b.reason}" for b in bad[:5])
    raise DataError(
        f"{profile.num_quarantined} of {total} samples are unusable, more than max_bad_frac = "
        f"{config.data_profile.max_bad_frac:g}; the first ones:\n{examples}",
        where=str(config.dataset.annotations),
        hint="mend the dataset or raise data_profile.max_bad_frac",
    )
