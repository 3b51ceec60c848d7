"""What a report shows of a run beyond its summary, out of the newest snapshot of its store and its run directory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from dflop.config import Config, shown_config
from dflop.errors import ConfigError
from dflop.records import (
    Correction,
    JobRecord,
    Plan,
    RankFactor,
    RankMemory,
    RunInput,
    SampleShape,
    StepFlops,
    StepPlan,
)
from dflop.report.history_table import HistoryEntry
from dflop.report.run_details import RunDetails
from dflop.report.summary import RunSummary
from dflop.run.batches import COMPARE, stages_of
from dflop.run.directory import RunDir
from dflop.store.reader import Reader


def load_details(run: RunDir, summary: RunSummary, history: Sequence[HistoryEntry]) -> RunDetails:
    """Details of a run whose summary is known.

    Args:
        run: Run directory.
        summary: Of the run; tells which batch is shown in full.
        history: Of the run.

    Raises:
        StoreError: nothing was published yet.
    """
    config = run.config()
    compare_id = f"{run.run_id}/{COMPARE}"
    own = {"run_id": run.run_id}
    with Reader(config.store) as reader:
        return RunDetails(
            history=tuple(history),
            facts=_facts(config, run),
            compare_plans=_plans_shown(reader, compare_id, summary),
            shapes=_shapes_shown(reader, run, summary),
            corrections=tuple(reader.records(Correction, where=own)),
            rank_factors=tuple(reader.records(RankFactor, where=own)),
            peaks=tuple(reader.records(RankMemory, where=own)),
            flops=tuple(reader.records(StepFlops, where=own)),
            jobs=tuple(reader.records(JobRecord, where=own)),
            inputs=tuple(_last_of_each(reader.records(RunInput, where={"run_id": [run.run_id, compare_id]}))),
            cost_sources=_cost_sources(run, summary.plan),
            memory_limit_bytes=config.cluster.spec().memory_per_process_bytes,
            num_steps_planned=config.train.num_steps,
            config_text=shown_config(config),
        )


def _facts(config: Config, run: RunDir) -> tuple[tuple[str, str], ...]:
    facts = [("model", f"{config.model.family}, {config.model.dtype}"), ("dataset", str(config.dataset.annotations))]
    if config.model.weights is not None:
        facts.append(("weights", str(config.model.weights)))
    if config.stages:
        stages = "; ".join(
            f"{s.name}: steps {s.first_step + 1} to {s.end_step}, frozen {', '.join(s.frozen) or 'nothing'}"
            for s in stages_of(config)
        )
        facts.append(("stages", stages))
    return (*facts, ("run directory", str(run.path)))


def _plans_shown(reader: Reader, compare_id: str, summary: RunSummary) -> tuple[StepPlan, ...]:
    """Of the steps that the timeline shows."""
    pair = summary.comparison.typical_pair() if summary.comparison else None
    if pair is None:
        return ()
    steps = [step.step for step in pair.typical()]
    return tuple(reader.records(StepPlan, where={"run_id": compare_id, "step": steps}))


def _shapes_shown(reader: Reader, run: RunDir, summary: RunSummary) -> dict[int, SampleShape]:
    pair = summary.comparison.typical_pair() if summary.comparison else None
    if pair is None:
        return {}
    where: dict[str, str | list[int]] = {"profile_key": run.profile_key(), "sample_index": list(pair.sample_index)}
    return {shape.sample_index: shape for shape in reader.records(SampleShape, where=where)}


def _last_of_each(inputs: Sequence[RunInput]) -> list[RunInput]:
    """The newest of every job: what it read when it last started."""
    newest: dict[tuple[str, str], RunInput] = {}
    for seen in sorted(inputs, key=lambda i: i.observed_at_s):
        newest[seen.run_id, seen.job] = seen
    return list(newest.values())


def _cost_sources(run: RunDir, plan: Plan) -> tuple[tuple[str, str], ...]:
    """Where the cost tables of the plan's modules come from; nothing where the run directory has lost them."""
    found: list[tuple[str, str]] = []
    with contextlib.suppress(ConfigError):
        sources = {(t.module, t.tp): t.source for t in run.cost_tables()}
        found = [
            (f"{m.module} tp{m.parallel.tp}", sources[m.module, m.parallel.tp])
            for m in plan.modules
            if (m.module, m.parallel.tp) in sources
        ]
    return tuple(found)
