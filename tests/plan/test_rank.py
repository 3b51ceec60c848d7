import dataclasses

import pytest

from dflop.plan.drafts import draft as plan_of
from dflop.plan.grid_choice import GridChoice
from dflop.plan.rank import MAX_ALIKE, Ranked, nominate, rank, scheduled_step_s
from dflop.plan.space import Problem, SearchSpace
from dflop.plan.verdict import SHARING_FRAC, SIMPLICITY_FRAC, prefer_simple, reason
from dflop.records import LLM, ParallelSpec, Plan
from tests.builders import make_cluster, make_cost, make_inline_plan, make_plan, make_specs, random_batch

BATCHES = tuple(random_batch(24, encoders=("vision",), seed=seed) for seed in range(2))


def problem() -> Problem:
    cost, cluster = make_cost("vision").extrapolating(), make_cluster(4, num_cores=4)
    return Problem("run", make_specs("vision"), cluster, cost, BATCHES, 24, 0, SearchSpace(recompute=(False,)))


def draft(formula_s: float, dp: int = 1, num_microbatches: int = 4, plan_id: str = "") -> Plan:
    plan = make_plan({"vision": 1, LLM: dp}, num_microbatches=num_microbatches)
    name = plan_id or f"{formula_s}-{dp}-{num_microbatches}"
    return dataclasses.replace(plan, formula_step_s=formula_s, plan_id=name)


def test_nominees_are_of_many_kinds_best_first_and_named_once():
    alike = [draft(1.0 + i / 100) for i in range(6)]
    others = [draft(2.0, dp=2), draft(3.0, num_microbatches=16)]
    found = nominate([*alike, *others, alike[0]], 5)
    assert found == [*alike[:MAX_ALIKE], *others]
    assert nominate([*alike, *others], 100) == [*alike[:MAX_ALIKE], *others, *alike[MAX_ALIKE:]]
    assert nominate(reversed(alike), 2) == alike[:2]


def replicated(p: Problem, dp: int, formula_s: float) -> Plan:
    grids = [GridChoice.of(ParallelSpec(1, 1, n), {name: (4,)}) for name, n in (("vision", 1), (LLM, dp))]
    return plan_of(p, 4, grids, formula_s)


def test_ranks_by_simulation_not_by_formula():
    p = problem()
    good, bad = replicated(p, 3, 9.0), replicated(p, 1, 1.0)
    found = rank(p, [bad, good])
    assert [r.plan.plan_id for r in found] == [good.plan_id, bad.plan_id]
    assert all(r.plan.predicted_step_s <= r.plan.baseline_step_s for r in found)
    assert all(r.noisy_step_s > r.plan.sync_s for r in found)


def test_a_plan_that_runs_is_measured_as_candidates_are():
    p = problem()
    (found,) = rank(p, [replicated(p, 3, 1.0)])
    step_s = scheduled_step_s(p, found.plan)
    assert step_s == pytest.approx(found.plan.predicted_step_s)
    slow_s = scheduled_step_s(p, found.plan, {(LLM, 0, 1): 3.0})
    # The others take over what they can: far less than three times as long.
    assert 1.02 * step_s < slow_s < 2 * step_s


def timed(plan: Plan, step_s: float, **changes) -> Ranked:
    times = {"predicted_step_s": step_s, "baseline_step_s": 2.0, "uniform_step_s": 2.0} | changes
    return Ranked(dataclasses.replace(plan, **times), step_s, is_final=True)


def test_a_simpler_plan_is_preferred_within_five_per_cent():
    split, inline = make_plan({"vision": 1, LLM: 1}), make_inline_plan(2)
    near, far = timed(inline, 1 + 0.9 * SIMPLICITY_FRAC), timed(inline, 1 + 1.1 * SIMPLICITY_FRAC)
    first = timed(split, 1.0)
    assert prefer_simple([first, near]) == [near, first]
    assert prefer_simple([first, far]) == [first, far]
    assert prefer_simple([near, timed(split, 1.5)])[0] == near
    assert prefer_simple([first, dataclasses.replace(near, is_final=False)])[0] == first
    assert prefer_simple([]) == []


def test_ranks_share_samples_only_where_that_is_worth_it():
    sharing, alone = timed(make_inline_plan(1, cp=2), 1.0), timed(make_inline_plan(2), 1 + 0.9 * SHARING_FRAC)
    assert prefer_simple([sharing, alone]) == [alone, sharing]
    assert prefer_simple([sharing, timed(make_inline_plan(2), 1.1)])[0] == sharing
    apart = timed(make_plan({"vision": 1, LLM: 1}), 0.99)
    assert prefer_simple([apart, sharing, alone]) == [alone, sharing, apart]
    assert "simpler than the fastest of 2 simulated plans" in reason(alone, [alone, sharing])
    assert "on 1 group of 2 replicas of the whole model, tp 1, cp 2" in reason(sharing, [sharing, alone])


def test_plans_that_costs_cannot_tell_apart_are_called_so_and_a_simpler_one_is_named():
    sharing, alone = timed(make_inline_plan(1, cp=2), 1.0), timed(make_inline_plan(2), 1.04)
    every = [sharing, alone, timed(make_inline_plan(1, cp=2), 1.2)]
    told = "Data sheets do not tell it from 1 other plan within 5.0 %, one of them simpler: on 2 replicas of the whole"
    assert told in reason(sharing, every, tie_frac=0.05)
    assert "simpler: on" not in reason(alone, [alone, sharing], tie_frac=0.05)
    assert "do not tell" in reason(alone, [alone, sharing], tie_frac=0.05)
    for frac, others in ((0.0, every), (0.03, every), (0.05, [sharing, dataclasses.replace(alone, is_final=False)])):
        assert "do not tell" not in reason(sharing, others, tie_frac=frac)


def test_words_say_why_and_whether_it_is_worth_it():
    fast = timed(make_plan({"vision": 1, LLM: 1}), 1.0)
    assert "2.00x the speed of the best uniform plan in arrival order" in reason(fast, [fast])
    slow = timed(make_inline_plan(2), 1.96)
    assert "Gain below 5.0 %, keep your current setup: 1.02x" in reason(slow, [slow])
    unknown = timed(fast.plan, 1.0, uniform_step_s=float("nan"), baseline_step_s=1.0)
    assert reason(unknown, [unknown]).endswith("gain nothing over arrival order on this data.")
