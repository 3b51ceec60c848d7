"""Whether a run should go on under another plan: asked when something has changed, answered in seconds.

Ranks that are slow are taken to be slow under any plan, by their number: places of ranks are given in order, so the
same number is most likely the same device. Nobody can promise it, and where it matters the decision says so.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflop import files
from dflop.config import Config
from dflop.errors import InfeasiblePlanError
from dflop.parallel.topology import rank_of
from dflop.plan.rank import scheduled_step_s
from dflop.plan.space import Problem
from dflop.records import Decision, JobRecord, Plan, PlanProgram, RankFactor, RankSpan
from dflop.report.tables import layout_text
from dflop.run.batches import stage_at
from dflop.run.directory import RunDir
from dflop.run.messages import Say
from dflop.simulate.step import Node, step_nodes
from dflop.steps.follow import poll_interval_s
from dflop.steps.planning import Task, find_plans, keep_plans, run_task
from dflop.store.reader import Reader
from dflop.store.spool import spool_rows
from dflop.units import count, percent, ratio, seconds

REPLAN, REPROFILE = "replan", "reprofile"
NOTICED, STAY, ADVISED, DONE, FAILED = "noticed", "stay", "advised", "done", "failed"
"""Verdicts of `Decision`."""
SLOW_FACTOR = 1.05
NUM_WEIGHED = 4
"""Candidates that are simulated again where ranks are slow."""
NUM_RECENT = 20
"""Steps that say how fast a run is."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What should be done about a run's plan."""

    decision: Decision
    task: Task | None = None
    plans: tuple[Plan, ...] = ()
    """New ones, the one to run first; empty where none was looked for or found."""
    programs: tuple[PlanProgram, ...] = ()
    """What is proven of plans for the same problem."""

    @property
    def is_to_act(self) -> bool:
        """Whether the job is to leave a checkpoint and to go on under the new plan; see `apply`."""
        return self.decision.verdict == DONE


def consider(run: RunDir, config: Config, say: Say) -> Advice | None:
    """Looks in the store whether anything calls for another plan, and decides; None where nothing does, or not yet.

    Searching takes seconds: call it in a thread. A decision not to act is spooled here; one to act by `apply`.
    """
    rules = config.replan
    if rules.mode == "off":
        return None
    progress, decisions = _standing(run, config)
    if progress is None:
        return None
    done = [d.step for d in decisions if d.kind in (REPLAN, "stage") and d.verdict == DONE]
    noticed = _unanswered(run, decisions)
    num_replans = sum(d.kind == REPLAN and d.verdict == DONE for d in decisions)
    num_since = sum(seen >= max(done, default=0) for seen in progress.steps)
    if not noticed or num_since < rules.min_steps or num_replans >= rules.max_replans:
        return None
    advice = _advise(run, config, progress, noticed, say)
    # Kept in the run directory, as rows take a while to be seen in the store.
    known = [*_answered(run), *(list(_key(d)) for d in noticed)]
    files.replace(run.path / "answered.json", json.dumps(known), is_durable=True)
    if not advice.is_to_act:
        spool_decision(run, config, advice.decision)
    return advice


def advise_now(run: RunDir, config: Config, say: Say) -> Advice | None:
    """The same advice for a run as it stands, once a step is in the store; changes nothing."""
    progress, decisions = _standing(run, config)
    if progress is None:
        return None
    dry = config.model_copy(update={"replan": config.replan.model_copy(update={"mode": "advise"})})
    return _advise(run, dry, progress, _unanswered(run, decisions), say)


def _standing(run: RunDir, config: Config) -> tuple[Progress | None, Sequence[Decision]]:
    with Reader(config.store) as reader:
        return progress_of(reader, run.run_id, run.plan().sync_s), reader.decisions(run.run_id)


def _unanswered(run: RunDir, decisions: Sequence[Decision]) -> list[Decision]:
    """What was noticed, or measured anew, and not yet asked about."""
    answered = {tuple(key) for key in _answered(run)}
    news = [d for d in decisions if d.verdict == NOTICED or (d.kind == REPROFILE and d.verdict == DONE)]
    return [d for d in news if _key(d) not in answered]


def _advise(run: RunDir, config: Config, progress: Progress, noticed: Sequence[Decision], say: Say) -> Advice:
    """Searches for another plan and weighs it against the one that runs; writes nothing."""
    plan = run.plan()
    num_left = stage_at(config, progress.step).end_step - progress.step - 1
    why = f" ({'; '.join(d.detail for d in noticed)})" if noticed else ""

    def decided(verdict: str, detail: str, new: Plan | None = None, **numbers: float) -> Decision:
        say(f"re-planning: {detail}")
        measured, expected, gain_s, cost_s = (numbers.get(n, math.nan) for n in ("old_s", "new_s", "gain_s", "cost_s"))
        return Decision(
            run.run_id, progress.attempt, progress.step, REPLAN, layout_text(new or plan), verdict, measured, expected,
            gain_s, cost_s, max(num_left, 0), plan.plan_id, new.plan_id if new else "", detail + why, time.time(),
        )  # fmt: skip

    if num_left <= 0:
        return Advice(decided(STAY, "replan check: keep current plan, no steps left"))
    key = run.cost_tables()[0].profile_key
    task = run_task(run, config, key, lambda _: None, from_step=progress.step + 1)
    try:
        planned = find_plans(task, config, lambda _: None)
    except InfeasiblePlanError as error:
        return Advice(decided(STAY, f"replan check: keep current plan, none fits the next steps: {error.what}"))
    with Reader(config.store) as reader:
        slow = _slow_nodes(reader, run.run_id, progress.attempt)
        cost_s = config.replan.restart_cost_s
        if cost_s is None:
            # That a job has stopped is noticed by the next look at it.
            cost_s = restart_cost_s(reader, run.run_id, progress) + poll_interval_s(config)
    old_s, new_s, plans = _compared(task.problem, plan, planned.plans, slow)
    num_counted = min(num_left, task.basis.num_steps)
    gain_s = (old_s - new_s) * progress.time_ratio * num_counted
    verdict, detail = _verdict(config, plan, plans[0], old_s, new_s, gain_s, cost_s, num_counted)
    if slow:
        slow_ranks = ", ".join(f"rank {_ranks(plan, node)[0]} {ratio(factor)}" for node, factor in sorted(slow.items()))
        detail += f"; slow ranks ({slow_ranks}) stay slow under the new plan"
    decision = decided(verdict, detail, plans[0], old_s=old_s, new_s=new_s, gain_s=gain_s, cost_s=cost_s)
    return Advice(decision, task, plans, planned.programs)


def apply(run: RunDir, config: Config, advice: Advice) -> None:
    """Makes the new plan the run's plan; call it when the training job has ended, as its scheduler reads the plan."""
    assert advice.task is not None, "no plan to continue with"
    keep_plans(run, config, advice.task, advice.plans, advice.programs)
    spool_decision(run, config, advice.decision)


def spool_decision(run: RunDir, config: Config, decision: Decision) -> None:
    """Writes a decision to the spool; of one to act that came to nothing, with the verdict `failed`."""
    spool_rows(config.store, run.run_id, "replan", [decision])


def _slow_nodes(reader: Reader, run_id: str, attempt: int) -> dict[Node, float]:
    """Factors of the ranks of a start of the job that are surely slow, whether or not its plans reckon with them."""
    rows = reader.records(RankFactor, where={"run_id": run_id, "attempt": attempt})
    newest = {(r.module, r.stage, r.dp_rank): r for r in sorted(rows, key=lambda r: r.observed_at_s)}
    return {node: r.factor for node, r in newest.items() if r.factor > max(SLOW_FACTOR, 1 + 2 * r.sd_frac)}


def _compared(
    problem: Problem, plan: Plan, plans: Sequence[Plan], slow: Mapping[Node, float]
) -> tuple[float, float, tuple[Plan, ...]]:
    """(current step_s, best new step_s, new plans with the best one first)."""
    old_s = scheduled_step_s(problem, plan, slow)
    if not slow:
        return old_s, plans[0].predicted_step_s, tuple(plans)
    found = [(scheduled_step_s(problem, p, _moved(plan, p, slow)), i) for i, p in enumerate(plans[:NUM_WEIGHED])]
    new_s, best = min(found)
    ordered = [plans[best], *plans[:best], *plans[best + 1 :]]
    return old_s, new_s, tuple(replace(p, candidate_rank=i) for i, p in enumerate(ordered))


def _moved(plan: Plan, other: Plan, slow: Mapping[Node, float]) -> dict[Node, float]:
    """What slow ranks of a plan are under another: a group of tensor-parallel ranks is as slow as its slowest."""
    by_rank = {rank: factor for node, factor in slow.items() for rank in _ranks(plan, node)}
    found = {node: max(by_rank.get(rank, 1.0) for rank in _ranks(other, node)) for node in step_nodes(other)}
    return {node: factor for node, factor in found.items() if factor > 1}


def _ranks(plan: Plan, node: Node) -> list[int]:
    module, stage, dp_rank = node
    part = plan.module(module)
    first = rank_of(part, stage, dp_rank * part.parallel.cp)
    return list(range(first, first + part.parallel.group_size))


def _verdict(
    config: Config, plan: Plan, new: Plan, old_s: float, new_s: float, gain_s: float, cost_s: float, num_steps: int
) -> tuple[str, str]:
    """(verdict, why, in words)."""
    keep, steps = "replan check: keep current plan", f"{count(num_steps)} steps"
    # What two plans have in common that run alike, whatever they were predicted to take.
    layouts = [
        (p.num_microbatches, [replace(m, stage_memory_bytes=(), max_tokens=0) for m in p.modules]) for p in (plan, new)
    ]
    if layouts[0] == layouts[1]:
        return STAY, f"{keep} {layout_text(plan)}, still the best for the next {steps}"
    gain_frac, least_frac, verdict = 1 - new_s / old_s, config.replan.min_gain_frac, STAY
    if gain_s <= 0:
        why = f"{keep} {layout_text(plan)}, the fastest on the next {steps}"
    elif math.isnan(cost_s):
        why = f"{keep}, {steps} would save {seconds(gain_s)}, but the cost of a restart is unknown"
    elif gain_s <= cost_s:
        why = f"{keep}, {steps} left save {seconds(gain_s)}, a restart costs {seconds(cost_s)}"
    elif gain_frac < least_frac:
        why = f"{keep}, {steps} left save {percent(gain_frac)}, less than {percent(least_frac)}"
    else:
        verdict, why = ADVISED, "replan check: a new plan would pay off"
        if config.replan.mode == "act":
            verdict, why = DONE, "switching to a new plan"
        why += f": {steps} left save {seconds(gain_s)} ({percent(gain_frac)}), a restart costs {seconds(cost_s)}"
    change = f"{layout_text(new)} instead of {layout_text(plan)} takes {seconds(new_s)} instead of {seconds(old_s)}"
    return verdict, f"{why}; {change} a step, simulated"


def _key(decision: Decision) -> tuple[int, int, str, str]:
    return decision.attempt, decision.step, decision.kind, decision.subject


def _answered(run: RunDir) -> list[list[object]]:
    try:
        found: list[list[object]] = json.loads((run.path / "answered.json").read_text())
    except (OSError, ValueError):
        return []
    return found


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands in its training."""

    attempt: int
    """The newest start of the job that has trained a step."""
    step: int
    """The newest that was observed."""
    steps: tuple[int, ...]
    """All that were, ascending."""
    time_ratio: float
    """Measured over simulated seconds of a step, median of the latest: scales a simulated gain."""
    started_at_s: dict[int, float]
    """Per attempt, when its first step began to be like any other."""


def progress_of(reader: Reader, run_id: str, sync_s: float) -> Progress | None:
    """None before the first step is in the store; `sync_s` is what predictions of its steps leave out."""
    columns = ("attempt", "step", "step_s", "predicted_step_s", "observed_at_s")
    found = reader.arrays("step_rollup", columns, where={"run_id": run_id})
    if not len(found["step"]):
        return None
    order = np.lexsort((found["step"], found["attempt"]))
    attempt, step, step_s, predicted_s, at_s = (found[name][order] for name in columns)
    is_first = np.diff(attempt, prepend=attempt[0] - 1) != 0  # lazy initialisation, page faults
    usual = np.flatnonzero(~is_first & (predicted_s > 0))[-NUM_RECENT:]
    ratios = step_s[usual] / (predicted_s[usual] + sync_s)
    usual_s = float(np.median(step_s))
    return Progress(
        attempt=int(attempt[-1]),
        step=int(step[attempt == attempt[-1]].max()),
        steps=tuple(int(s) for s in np.unique(step)),
        time_ratio=float(np.median(ratios)) if len(ratios) else 1.0,
        started_at_s={int(a): float(t) - usual_s for a, t in zip(attempt[is_first], at_s[is_first], strict=True)},
    )


def restart_cost_s(reader: Reader, run_id: str, progress: Progress) -> float:
    """Seconds from submitting the training job to its first step, queue included, and of a checkpoint; NaN: not known.

    The median of this run's starts. A start that nobody submitted (Slurm's own requeue) does not count.
    """
    jobs = reader.records(JobRecord, where={"run_id": run_id})
    starts = _starts_s([j for j in jobs if j.job_key.split("/")[1:2] == ["train"]], progress)
    if not starts:
        return math.nan
    spans = reader.records(RankSpan, where={"run_id": run_id, "name": "checkpoint"})
    newest = max(((s.attempt, s.step) for s in spans), default=None)  # of it, the slowest rank
    return statistics.median(starts) + max((s.duration_s for s in spans if (s.attempt, s.step) == newest), default=0.0)


def _starts_s(jobs: Sequence[JobRecord], progress: Progress) -> list[float]:
    submitted: dict[str, float] = {}
    for job in jobs:
        submitted[job.job_id] = min(job.observed_at_s, submitted.get(job.job_id, math.inf))
    found: dict[str, float] = {}
    for _, started_s in sorted(progress.started_at_s.items()):
        for at_s, job_id in sorted((at_s, job_id) for job_id, at_s in submitted.items() if at_s <= started_s)[-1:]:
            found.setdefault(job_id, started_s - at_s)
    return list(found.values())
