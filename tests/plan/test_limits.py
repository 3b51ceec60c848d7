"""What a plan uses of every limit, and who set the limit."""

import pytest

from dflop.plan.drafts import draft as plan_of
from dflop.plan.grid_choice import GridChoice
from dflop.plan.limits import Limit, plan_limits
from dflop.plan.space import Problem
from dflop.records import LLM, ParallelSpec, Plan
from tests.builders import make_sample
from tests.plan.problems import make_problem


def draft(problem: Problem, *, tp: int = 1, num_microbatches: int = 4) -> Plan:
    grids = [GridChoice.of(ParallelSpec(tp, 1, 1), {spec.module: (spec.num_layers,)}) for spec in problem.specs]
    return plan_of(problem, num_microbatches, grids, 0.0)


def limits(problem: Problem, plan: Plan, largest: int = 100) -> dict[str, Limit]:
    return {x.name: x for x in plan_limits(problem, plan, {m.module: largest for m in plan.modules})}


@pytest.mark.parametrize(
    ("choices", "each", "why"), [((1, 2), 8, "heads and sizes of llm"), ((1, 2, 4, 8), 2, "2 processes of a node")]
)
def test_the_largest_tp_is_set_by_what_refuses_the_next_one(choices, each, why):
    problem = make_problem("vision", num_processes=each, num_nodes=2, tps=choices)
    found = limits(problem, draft(problem, tp=1))["tp of llm"]
    assert found.used_frac == 0.5
    assert found.text == f"tp 1 of at most 2, limited by {why}"


def test_tokens_are_those_the_scheduler_may_not_exceed():
    problem = make_problem("vision", memory_bytes=2**28)
    plan = draft(problem)
    cap = plan.module(LLM).max_tokens
    assert cap > 0
    assert limits(problem, plan, largest=cap)["tokens of llm"].used_frac == 1.0
    roomy = make_problem("vision", memory_bytes=2**80)
    assert not [name for name in limits(roomy, draft(roomy)) if name.startswith("tokens")]


@pytest.mark.parametrize(("pp", "of", "average"), [(2, "microbatch", 3500 / 8), (1, "step", 3500 / 2)])
def test_a_longest_sample_stands_beside_what_it_can_be_balanced_with(pp, of, average):
    samples = tuple(make_sample(i, 100 if i else 1200) for i in range(24))
    problem = make_problem(batches=[samples])  # 23 * 100 + 1200 tokens
    plan = plan_of(problem, 4, [GridChoice.of(ParallelSpec(1, pp, 2), {LLM: (4 // pp,) * pp})], 0.0)
    found = limits(problem, plan)["longest sample"]
    assert found.used_frac == pytest.approx(1200 / average)
    assert found.text == f"`s0` has 1200 LLM tokens; an average {of} of a replica has {round(average)}"


def test_a_model_whose_samples_ranks_cannot_share_says_why():
    problem = make_problem(whole_samples="layers carry a state")
    assert limits(problem, draft(problem))["cp"] == Limit("cp", 1.0, "cp 1 of at most 1: layers carry a state")
    assert "cp" not in limits(make_problem(), draft(make_problem()))
