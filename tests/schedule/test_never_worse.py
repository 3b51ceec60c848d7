"""Random steps: every sample once and its media beside it, caps kept, no baseline ends sooner, same again.

Small steps on small budgets. `make test` plays some; the ten thousand of the lane `instances` take four minutes.
Examples are the same in every run.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop.cost.model import CostModel
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.schedule.assignment import assignment_of
from dflop.schedule.caps import keeps, plan_caps
from dflop.schedule.items import module_items
from dflop.schedule.policies import Effort
from dflop.schedule.step_scheduler import schedule_step
from tests.builders import make_inline_plan, make_plan, make_sample, make_table
from tests.schedule.steps import limited, with_reruns

BASELINES = ("arrival", "length_grouped", "token_lpt", "bottleneck")
EFFORT = Effort(num_profiles=3, num_ops=30_000, max_simulations=60)
COSTS = {
    "per token": {},
    "per microbatch": {"fixed_s": 2e-2},
    "quadratic": {"per_sq_token_s": 1e-6},
    "next to nothing": {"fixed_s": 0.0, "per_token_s": 1e-12, "per_sq_token_s": 0.0, "edge_per_token_s": 0.0},
}
ENCODERS = ("vision", "audio")
FEW, MANY = 25, 10_000 // (2 * len(COSTS))


@functools.cache
def cost_of(kind: str, llm_scale: float) -> CostModel:
    llm = {**COSTS[kind], "per_token_s": llm_scale * COSTS[kind].get("per_token_s", 1e-5)}
    return with_reruns(CostModel([*(make_table(name, **COSTS[kind]) for name in ENCODERS), make_table(LLM, **llm)]))


@st.composite
def batches(draw: st.DrawFn, encoders: tuple[str, ...]) -> tuple[SampleShape, ...]:
    """Up to 16 samples: usual ones, all alike, some without a token, one that outweighs all others."""
    kind = draw(st.sampled_from(["usual", "alike", "empty ones", "a giant"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = []
    for index in range(draw(st.integers(1, 16))):
        text = 100 if kind == "alike" else int(rng.lognormal(4.0, 1.0))
        count = 1 if kind == "alike" else int(rng.integers(0, 3))
        media = [(name, 64 if kind == "alike" else int(rng.lognormal(4.5, 0.8)) + 1) for name in encoders] * count
        if kind == "empty ones" and rng.random() < 0.4:
            text, media = 0, []
        samples.append(make_sample(index, text, media))
    if kind == "a giant":
        samples[0] = make_sample(0, 20_000, [(name, 9_000) for name in encoders])
    return tuple(samples)


@st.composite
def steps(draw: st.DrawFn, layout: str) -> tuple[Plan, tuple[SampleShape, ...]]:
    """A plan and a batch for it, often shorter than planned; memory binds in every other plan."""
    encoders = ENCODERS[: draw(st.integers(0, 2))]
    num_microbatches, pp = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    if layout == "inline":
        dp, cp = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 3]))
        plan = make_inline_plan(dp, pp=pp, cp=cp, modules=(*encoders, LLM), num_microbatches=num_microbatches)
    else:
        dp = {name: draw(st.integers(1, 3)) for name in (*encoders, LLM)}
        encoder_pp = draw(st.integers(1, 2))
        plan = make_plan(dp, llm_pp=pp, encoder_pp=encoder_pp, num_microbatches=num_microbatches)
    batch = draw(batches(encoders))
    room = draw(st.sampled_from([0.0, 0.0, 1.3, 3.0]))  # in average microbatches
    modules = []
    for m in plan.modules:
        total = int(module_items(batch, m.module).num_tokens.sum())
        modules.append(replace(m, max_tokens=int(room * total / (num_microbatches * m.parallel.dp))))
    return draw(limited(replace(plan, modules=tuple(modules)), batch)), batch


def schedule(
    plan: Plan, batch: tuple[SampleShape, ...], cost: CostModel, max_concurrency: int | None, policy: str
) -> StepPlan:
    return schedule_step(
        run_id="run", step=0, plan=plan, batch=batch, cost=cost, max_concurrency=max_concurrency, policy=policy,
        effort=EFFORT,
    )  # fmt: skip


def check_every_item_once(plan: Plan, batch: tuple[SampleShape, ...], step_plan: StepPlan) -> None:
    home = {i: (k, r) for k, ranks in enumerate(step_plan.of(LLM).owner) for r, ids in enumerate(ranks) for i in ids}
    for m in plan.modules:
        work = step_plan.of(m.module)
        owned = [(i, (k, r)) for k, ranks in enumerate(work.owner) for r, ids in enumerate(ranks) for i in ids]
        num_items = len(batch) if m.module == LLM else sum(x.module == m.module for s in batch for x in s.items)
        assert sorted(i for i, _ in owned) == list(range(num_items))
        for i, place in owned:
            beside = home[work.item_sample[i]]
            assert place == beside if len(plan.grids) == 1 else place[0] == beside[0]


@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize("layout", ["split", "inline"])
@pytest.mark.parametrize("num_examples", [FEW, pytest.param(MANY, marks=pytest.mark.lane("instances"))])
def test_never_worse(layout, kind, num_examples):
    @settings(
        max_examples=num_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(steps(layout), st.sampled_from([0.3, 1.0, 3.0]), st.sampled_from([None, 2]))
    def check(step, llm_scale, max_concurrency):
        plan, batch = step
        case = (plan, batch, cost_of(kind, llm_scale), max_concurrency)
        balanced = schedule(*case, "balanced")
        check_every_item_once(plan, batch, balanced)
        items = {m.module: module_items(batch, m.module) for m in plan.modules}
        caps = plan_caps(plan, items)

        def is_kept(step_plan: StepPlan) -> bool:
            return keeps(caps, plan, items, assignment_of(plan, step_plan))

        is_within = is_kept(balanced)
        if not caps.media_tokens and caps.window == 1:
            assert is_within, "a cap on single microbatches of the language model can always be kept"
        for policy in BASELINES:
            baseline = schedule(*case, policy)
            if is_kept(baseline):
                assert is_within, f"`{policy}` keeps the caps"
                assert balanced.predicted_step_s <= baseline.predicted_step_s, policy
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(schedule, *case, "balanced").result() == balanced

    check()
