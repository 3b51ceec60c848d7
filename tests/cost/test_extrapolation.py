"""Who may ask for what was never probed: the planner and the scheduler may, and the planner says so."""

import dataclasses

import pytest

from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.plan.search import plan_problem
from dflop.plan.space import Problem, SearchSpace
from dflop.schedule.step_scheduler import predicted_spans, schedule_step
from tests.builders import make_cluster, make_cost, make_plan, make_specs, random_batch

NARROW = CostModel(
    dataclasses.replace(t, min_tokens=1, max_tokens=40, max_mean_length=40.0) for t in make_cost("vision").tables
)


def test_the_scheduler_never_refuses_a_batch():
    plan, batch = make_plan({"vision": 1, "llm": 1}), random_batch(16, encoders=("vision",))
    with pytest.raises(CostError):
        NARROW.module_seconds("llm", (1, 4000, 4000**2), num_layers=1, edge=True)
    steps = [
        schedule_step(run_id="run", step=0, plan=plan, batch=batch, cost=cost) for cost in (NARROW, make_cost("vision"))
    ]
    assert steps[0] == steps[1]
    assert all(
        span.forward_s >= 0 for spans in predicted_spans(plan, steps[0], batch, NARROW).values() for span in spans
    )


def test_the_planner_looks_beyond_the_probes_and_says_so():
    def planned(cost: CostModel) -> tuple[str, list[str]]:
        said: list[str] = []
        batches = tuple(random_batch(16, encoders=("vision",), seed=s) for s in range(2))
        space = SearchSpace(share_ranks=(False,), microbatches=(2, 4))
        problem = Problem("run", make_specs("vision"), make_cluster(4), cost.extrapolating(), batches, 16, 0, space)
        return plan_problem(problem, top=2, progress=said.append)[0].plan_id, said

    (narrow_id, told), (wide_id, told_nothing) = planned(NARROW), planned(make_cost("vision"))
    assert narrow_id == wide_id
    assert any("`llm`: an average microbatch has" in x and "the largest probe had 40" in x for x in told)
    assert not any("extrapolated" in x for x in told_nothing)
