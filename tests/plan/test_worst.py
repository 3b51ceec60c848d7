"""Memory is judged by the largest samples of the data, whatever the batches drew."""

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflop.plan.search import plan_problem
from dflop.plan.space import Problem
from dflop.records import LLM, Plan, SampleShape
from tests.builders import make_sample, random_batch
from tests.plan.problems import make_problem
from tests.plan.test_limits import limits

HUGE = {
    "text": make_sample(900, 20_000),
    "image": make_sample(901, 20, [("vision", 20_000)]),
    "many images": make_sample(902, 20, [("vision", 700)] * 30),
}


def with_worst(memory_bytes: int, *worst: SampleShape, **changes) -> Problem:
    problem = make_problem("vision", memory_bytes=memory_bytes, microbatches=(4,), **changes)
    return dataclasses.replace(problem, worst_samples=worst)


def planned(problem: Problem) -> tuple[Plan, list[str]]:
    lines = list[str]()
    return plan_problem(problem, top=4, progress=lines.append)[0], lines


@pytest.mark.parametrize("layout", ["split", "inline"])
@pytest.mark.parametrize("name", HUGE)
def test_a_plan_holds_a_sample_that_no_batch_drew(layout, name):
    problem = with_worst(2**32, HUGE[name], share_ranks=(layout == "inline",))
    plan, lines = planned(problem)
    assert lines[-1].endswith("fit in memory together with the largest samples of the data")
    assert "Not every sample" not in plan.reason
    blind, _ = planned(with_worst(2**32, share_ranks=(layout == "inline",)))
    peak, blind_peak = (max(b for m in p.modules for b in m.stage_memory_bytes) for p in (plan, blind))
    assert blind_peak < peak <= problem.usable_bytes
    assert plan.module(LLM).max_tokens == 0 or plan.module(LLM).max_tokens >= HUGE[name].num_llm_tokens


@pytest.mark.parametrize(
    ("layout", "name", "module", "num_tokens"),
    [
        ("split", "text", LLM, "20k"), ("inline", "text", LLM, "20k"), ("split", "image", "vision", "20k"),
        ("inline", "many images", "vision", "21k"),
    ],
)  # fmt: skip
def test_a_sample_that_nothing_holds_is_named_in_the_plan_and_its_limits(layout, name, module, num_tokens):
    problem = with_worst(150_000_000, HUGE[name], make_sample(903, 50), share_ranks=(layout == "inline",))
    plan, lines = planned(problem)
    assert "no plan fits the largest samples of the data: planning for the sampled batches alone" in lines
    said = f"sample `{HUGE[name].sample_id}` with {num_tokens} tokens in `{module}`, where a microbatch holds "
    assert f"Not every sample fits: {said}" in plan.reason
    assert "s903" not in plan.reason
    found = limits(problem, plan)["largest samples"]
    assert found.used_frac > 1
    assert found.text.startswith(said)


def test_the_longest_sample_is_that_of_the_data():
    problem = with_worst(2**34, make_sample(5000, 12), HUGE["text"])
    assert limits(problem, planned(problem)[0])["longest sample"].text.startswith("`s900` has 20k LLM tokens; ")


def largest_of(samples: Sequence[SampleShape]) -> list[SampleShape]:
    """The first of those that are the largest in each quantity, in the order of the file."""
    found = {}
    for module in {LLM, *(item.module for s in samples for item in s.items)}:
        for quantity in ("num_items", "num_tokens", "sum_sq_tokens"):
            largest = max(samples, key=lambda s: getattr(s.load(module), quantity))
            found[largest.sample_index] = largest
        items = [(i.num_tokens, -s.sample_index, s) for s in samples for i in s.items if i.module == module]
        if items:
            largest = max(items, key=lambda each: each[:2])[2]
            found[largest.sample_index] = largest
    return [found[index] for index in sorted(found)]


@given(st.integers(0, 60), st.integers(0, 23), st.integers(1, 12), st.booleans())
def test_no_batch_of_the_data_takes_more_than_the_plan_is_charged_with(other, place, num_buckets, whole):
    everything = random_batch(61, encoders=("vision",), seed=7)
    worst = largest_of(everything)
    first = [sample for sample in everything if sample not in worst][:24]
    problem = dataclasses.replace(make_problem("vision", batches=[first]), worst_samples=tuple(worst))
    drawn = make_problem("vision", batches=[[*first[:place], everything[other], *first[place + 1 :]]])
    loads, charged = (p.sample_loads if whole else p.loads for p in (drawn, problem))
    for module in ("vision", LLM):
        assert (loads[module].largest(num_buckets) <= charged[module].largest(num_buckets)).all()
