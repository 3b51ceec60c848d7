"""Everything that store and run directory know about one run, gathered once into the values the report room takes."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflop import files
from dflop.config import Config, shown_config
from dflop.errors import ConfigError, StoreError, did_you_mean
from dflop.models import GENERIC, cache_of_models
from dflop.models.generic.exactness import KeptCheck, check_file
from dflop.models.generic.facts import kept
from dflop.records import (
    ROUTERS,
    Correction,
    JobRecord,
    Plan,
    QuarantinedSample,
    RankFactor,
    RankMemory,
    RunInput,
    RunRecord,
    SourceLoss,
    StepFlops,
    StepObservation,
    StepPlan,
)
from dflop.report.history_table import COLUMNS, HistoryEntry
from dflop.report.summary import RunSummary
from dflop.run.batches import COMPARE, stages_of
from dflop.run.directory import RunDir
from dflop.run.plan_scope import basis_of
from dflop.store import console
from dflop.store.reader import Reader


def load_summary(run: RunDir) -> RunSummary:
    """Summary of a run from the newest snapshot of its store.

    Raises:
        ConfigError: the run has no plan yet.
        StoreError: the store does not know the run.
    """
    config = run.config()
    if not run.has_plan():
        raise ConfigError(
            f"run `{run.run_id}` has no plan yet, there is nothing to summarize",
            where=str(run.path),
            hint="dflop runs show has its state",
        )
    history = load_history(config.store, run.run_id)
    own, compared = {"run_id": run.run_id}, {"run_id": f"{run.run_id}/{COMPARE}"}
    with Reader(config.store) as reader:
        states = sorted(reader.records(RunRecord, where=own), key=lambda r: r.observed_at_s)
        if not states:
            raise StoreError(f"run `{run.run_id}` is not in the store", where=str(config.store))
        chosen, profile = run.plan(), reader.profile(run.profile_key())
        of_search = [p for p in reader.records(Plan, where=own) if p.snapshot_seq == chosen.snapshot_seq]
        return RunSummary(
            run=states[-1],
            cluster=config.cluster.spec(),
            plan=replace(chosen, run_id=run.run_id),
            candidates=sorted(of_search, key=lambda p: p.candidate_rank),
            train=reader.records(StepObservation, where=own),
            compare=reader.records(StepObservation, where=compared),
            compare_plans=reader.records(StepPlan, where=compared),
            speedups=reader.speedups(run.run_id),
            quarantined=_quarantined(reader, run),
            correction_rows=reader.records(Correction, where=own),
            rank_factors=reader.records(RankFactor, where=own),
            peaks=reader.records(RankMemory, where=own),
            flops=reader.records(StepFlops, where=own),
            losses=reader.records(SourceLoss, where={**own, "split": ["validation", ROUTERS]}),
            jobs=reader.records(JobRecord, where=own),
            inputs=_last_inputs(reader.records(RunInput, where={"run_id": [run.run_id, compared["run_id"]]})),
            history=history,
            facts=_facts(config, run),
            cost_sources=_cost_sources(run, chosen),
            terms=basis_of(run).terms,
            model_check=_model_check(config, run),
            num_steps_planned=config.train.num_steps,
            epoch_steps=profile.num_rows / config.plan.global_batch_size if profile else math.nan,
            config_text=shown_config(config),
        )


def load_history(store: Path, run_id: str) -> list[HistoryEntry]:
    """Everything that was noticed and decided in a run, in order, from the newest snapshot.

    Raises:
        StoreError: the store does not know the run, or was never published.
    """
    sql = f"select {', '.join(COLUMNS)} from v_history where run_id = $run_id order by number"
    _, rows = console.query(store, sql, {"run_id": run_id})
    if not rows:
        newest = console.query(store, "select run_id from v_run order by started_at desc limit 20")[1]
        raise StoreError(
            f"run `{run_id}` is not in the store",
            where=str(store),
            hint=did_you_mean(run_id, [row[0] for row in newest]),
        )
    return [HistoryEntry(*row) for row in rows]


def write_report(run: RunDir, usd_per_gpu_hour: float = 0.0) -> RunSummary:
    """Write report.html into the run directory and return the summary it shows; a price of 0 is not known."""
    from dflop.report.run_page import render_report  # with matplotlib, which a driver needs at the end

    summary = replace(load_summary(run), usd_per_gpu_hour=usd_per_gpu_hour)
    files.replace(run.report_file, render_report(summary))
    return summary


def _facts(config: Config, run: RunDir) -> tuple[tuple[str, str], ...]:
    facts = [("model", f"{config.model.family}, {config.model.dtype}"), ("dataset", str(config.dataset.annotations))]
    if config.model.weights is not None:
        facts.append(("weights", str(config.model.weights)))
    if config.stages:
        stages = "; ".join(
            f"{s.name}: steps {s.first_step} to {s.end_step - 1}, frozen {', '.join(s.frozen) or 'nothing'}"
            for s in stages_of(config)
        )
        facts.append(("stages", stages))
    return (*facts, ("run directory", str(run.path)))


def _model_check(config: Config, run: RunDir) -> tuple[KeptCheck | None, str]:
    """(newest check of the model in the store, what the report says without one)."""
    model = config.model
    if model.family != GENERIC or model.processor is None:
        tests = f"dflop's tests compare gradients of a tiny {model.family}, trained in stages"
        return None, f"{tests}, with those of plain transformers (float32, CPU)."
    check = kept(KeptCheck, check_file(cache_of_models(config.store), model.hf_config, model.processor))
    command = shlex.join(["dflop", "model", "check", str(model.processor), "--store", str(config.store)])
    return check, f"Not checked. To check it: {command}; then: dflop report {shlex.quote(str(run.path))}"


def _quarantined(reader: Reader, run: RunDir) -> list[QuarantinedSample]:
    """Quarantined samples of the data profile, training and comparison: a sample once per phase."""
    jobs = [run.run_id, f"{run.run_id}/{COMPARE}"]
    found = (
        *reader.records(QuarantinedSample, where={"profile_key": run.profile_key(), "phase": "profile"}),
        *reader.records(QuarantinedSample, where={"run_id": jobs, "phase": "train"}),
    )
    return sorted(
        {(q.sample_index, q.phase): q for q in found}.values(), key=lambda q: (q.sample_index, q.phase, q.path)
    )


def _last_inputs(inputs: Sequence[RunInput]) -> tuple[RunInput, ...]:
    """The newest of every job: what it read when it last started."""
    return tuple({(i.run_id, i.job): i for i in sorted(inputs, key=lambda i: i.observed_at_s)}.values())


def _cost_sources(run: RunDir, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Where the cost tables of the plan's modules come from; nothing where the run directory has lost them."""
    with contextlib.suppress(ConfigError):
        sources = {(t.module, t.tp): t.source for t in run.cost_tables()}
        degrees = ((m.module, m.parallel.tp) for m in plan.modules)
        return tuple((f"{module} tp{tp}", sources[module, tp]) for module, tp in degrees if (module, tp) in sources)
    return ()
