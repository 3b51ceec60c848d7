"""Random plans with a batch; random linear steps, of eighths of seconds: orders of summation do not matter."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from dflop.cost.curve import combine
from dflop.cost.model import CostModel
from dflop.records import LLM, ModuleLoad, Plan, SampleShape, StepPlan
from dflop.schedule.assignment import assignment_of
from dflop.schedule.evaluate import StepEvaluator
from dflop.schedule.items import module_items
from dflop.schedule.linear import LinearStep, Part
from dflop.schedule.step_scheduler import PredictedSpan
from dflop.simulate.step import Node
from tests.builders import make_inline_plan, make_plan, random_batch

EIGHTHS = st.integers(1, 40).map(lambda n: n / 8)
MESSAGES = st.sampled_from([(0.0, 0.0), (0.5, 0.25), (2.0, 1.0)])
SLOWNESS = st.sampled_from([1.0, 1.0, 0.5, 1.5, 2.0])


@st.composite
def plans_with_batches(draw: st.DrawFn) -> tuple[Plan, tuple[SampleShape, ...]]:
    """Either layout, up to two encoders; the batch may be shorter than the plan's."""
    encoders = draw(st.sampled_from([(), ("vision",), ("vision", "audio")]))
    num_slots, pp = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    if draw(st.booleans()):
        plan = make_inline_plan(draw(st.integers(1, 3)), pp=pp, modules=(*encoders, LLM), num_microbatches=num_slots)
    else:
        dp = {name: draw(st.integers(1, 3)) for name in (*encoders, LLM)}
        plan = make_plan(dp, llm_pp=pp, encoder_pp=draw(st.integers(1, 2)), num_microbatches=num_slots)
    return plan, random_batch(draw(st.integers(1, 24)), encoders=encoders, seed=draw(st.integers(0, 10_000)))


@st.composite
def limits(draw: st.DrawFn, most: int, num_layers: int) -> tuple[int, ...]:
    """Tokens above each of which one more layer runs again."""
    return tuple(sorted(draw(st.lists(st.integers(0, most), max_size=num_layers))))


@st.composite
def limited(draw: st.DrawFn, plan: Plan, batch: tuple[SampleShape, ...]) -> Plan:
    """The plan, sometimes with limits for the LLM's stages."""
    llm, most = plan.modules[-1], sum(s.num_llm_tokens for s in batch)
    found = tuple(draw(limits(most // draw(st.sampled_from([1, 4, 16])), n)) for n in llm.layers_per_stage)
    if not any(found) or draw(st.booleans()):
        return plan
    return replace(plan, modules=(*plan.modules[:-1], replace(llm, recompute=True, recompute_tokens=found)))


def with_reruns(cost: CostModel) -> CostModel:
    """The costs, of a model that may run layers of the LLM again, too."""
    llm = cost.table(LLM)
    backward_s = combine([(1.0, llm.backward_s), (1.0, llm.forward_s)], [1.0, 0.0])
    return CostModel([*cost.tables, replace(llm, recompute=True, backward_s=backward_s)])


@st.composite
def linear_steps(draw: st.DrawFn, *, is_capped: bool = True) -> LinearStep:
    """Up to two encoders of up to two stages; without `is_capped` nothing but the bucket's tokens is limited."""
    num_slots, num_ranks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    encoder_pp = draw(st.lists(st.integers(1, 2), max_size=2))
    is_inline = not encoder_pp and draw(st.booleans())
    pp, num_samples = draw(st.integers(1, 3)), draw(st.integers(1, 10))

    def row(values: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(values, min_size=num_samples, max_size=num_samples))

    num_items = [row(st.integers(0, 2)) for _ in encoder_pp]
    slot_s = [[n * s for n, s in zip(items, row(EIGHTHS), strict=True)] for items in num_items for _ in range(2)]
    chain_s = np.array([row(EIGHTHS) for _ in range(draw(st.integers(1, 2)))])
    tokens = np.array(row(st.integers(1, 50)), dtype=np.int64)
    window = min(num_slots, pp)
    kinds = [2 * e + draw(st.integers(0, 1)) for e, stages in enumerate(encoder_pp) for _ in range(stages)]
    parts = [(Part(row, draw(EIGHTHS), 0.25, 1, *draw(MESSAGES)),) for row in kinds]
    for _ in range(pp):  # of modules that share out parameters each meets its group by itself
        rows = draw(st.lists(st.integers(0, len(chain_s) - 1), min_size=1, max_size=2, unique=True))
        group = draw(st.sampled_from([1, 1, 2, num_ranks]))
        messages = draw(MESSAGES)
        *first, last = (Part(q, draw(EIGHTHS), 0.25, group, *messages) for q in rows[: 1 if group == 1 else 2])
        parts.append((*first, last._replace(limits=draw(limits(int(tokens.sum()), 4)))))
    media = np.array([row(st.integers(0, 50)) for _ in range(max(len(encoder_pp), int(is_inline)))], dtype=np.int64)
    cap = draw(st.integers(int(tokens.max()), int(tokens.sum())))
    return LinearStep(
        num_slots=num_slots, num_ranks=num_ranks, chain_s=chain_s, tokens=tokens, window=window, cap_tokens=cap,
        chain_slowness=np.array(draw(st.lists(SLOWNESS, min_size=chain_s[:, :1].size * num_ranks,
            max_size=chain_s[:, :1].size * num_ranks))).reshape(-1, num_ranks),
        slot_s=np.array(slot_s, dtype=float).reshape(-1, num_samples),
        largest_s=np.array([[n and draw(EIGHTHS) * 2 for n in items] for items in num_items for _ in range(2)]).reshape(
            -1, num_samples
        ),
        num_items=np.array(num_items, dtype=np.int64).reshape(-1, num_samples),
        pipe_pp=np.array([*encoder_pp, pp], dtype=np.int64),
        stage_parts=tuple(parts),
        num_after=np.array([*(pp + left for n in encoder_pp for left in reversed(range(n))), *reversed(range(pp))]),
        cap_in_flight_tokens=draw(st.integers(int(tokens.max()), window * cap)) if is_capped else window * cap,
        media_tokens=media.reshape(-1, num_samples),
        cap_media_tokens=np.array(
            [draw(st.sampled_from([0, int(m.max()), int(m.sum())])) if is_capped else 0 for m in media], dtype=np.int64
        ),
        on_chain=np.full(len(media), is_inline), rerun_s=np.array(row(EIGHTHS)), rerun_fixed_s=draw(EIGHTHS),
    )  # fmt: skip


def keeps_caps(step: LinearStep, bucket) -> bool:
    """Every cap by its definition, one sum at a time."""
    slot, lane = np.asarray(bucket) // step.num_ranks, np.asarray(bucket) % step.num_ranks
    for r in range(step.num_ranks):
        sums = [int(step.tokens[(slot == k) & (lane == r)].sum()) for k in range(step.num_slots)]
        if max(sums) > step.cap_tokens:
            return False
        for k in range(step.num_slots - step.window + 1):
            if sum(sums[k : k + step.window]) > step.cap_in_flight_tokens:
                return False
    where = np.asarray(bucket) if step.on_chain.any() else slot
    return all(
        not cap or row[where == place].sum() <= cap
        for row, cap in zip(step.media_tokens, step.cap_media_tokens.tolist(), strict=True)
        for place in np.unique(where)
    )


def llm_step(seconds, tokens, *, num_slots: int, num_ranks: int = 1, pp: int = 1, fixed_s: float = 0.0) -> LinearStep:
    """Samples of the language model alone, which all fit into one bucket."""
    seconds, tokens, total = np.array(seconds, dtype=float), np.array(tokens), int(np.sum(tokens))
    nothing, no_items = np.zeros((0, len(tokens))), np.zeros((0, len(tokens)), dtype=np.int64)
    return LinearStep(
        num_slots=num_slots, num_ranks=num_ranks, chain_s=seconds[None], chain_slowness=np.ones((1, num_ranks)),
        slot_s=nothing, largest_s=nothing, tokens=tokens, num_items=no_items, pipe_pp=np.array([pp]),
        stage_parts=((Part(0, fixed_s, 0.25),),) * pp, num_after=np.arange(pp)[::-1].copy(), cap_tokens=total,
        window=pp, cap_in_flight_tokens=pp * total, media_tokens=no_items,
        cap_media_tokens=np.zeros(0, dtype=np.int64), on_chain=np.zeros(0, dtype=np.bool_),
    )  # fmt: skip


def stage_durations(plan: Plan, items, owners, cost):
    """(forward_s, backward_s) per node of every module and microbatch, load by load."""
    return {
        (m.module, stage, rank): [
            cost.stage_seconds(
                m, stage, ModuleLoad(*(int(row[list(ids[rank])].sum()) for row in items[m.module].loads))
            )
            for ids in owners[m.module]
        ]
        for m in plan.modules
        for stage in range(m.parallel.pp)
        for rank in range(m.parallel.dp)
    }


def step_seconds(plan, step_plan, batch, cost, slowness=None) -> float:
    """Simulated seconds of a step plan under any costs; for those it was made with, `predicted_step_s`."""
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    judge = StepEvaluator(plan, items, cost.extrapolating(), slowness=slowness)
    return judge.step_s(assignment_of(plan, step_plan))


def module_spans(
    plan: Plan, step_plan: StepPlan, batch: Sequence[SampleShape], cost: CostModel
) -> dict[Node, list[PredictedSpan]]:
    """As `predicted_spans`, of every module by itself."""
    items = {m.module: module_items(batch, m.module) for m in plan.modules}
    judge, assignment = StepEvaluator(plan, items, cost), assignment_of(plan, step_plan)
    loads, found = judge.loads(assignment), {}
    for m in plan.modules:
        for stage, seconds in enumerate(judge.part_seconds(m, loads[m.module], assignment)):
            for rank in range(m.parallel.dp):
                columns = *loads[m.module][:, :, rank].astype(int), *seconds[:, :, rank]
                rows = zip(range(plan.num_microbatches), *columns, strict=True)
                found[m.module, stage, rank] = [PredictedSpan(*row) for row in rows]
    return found
