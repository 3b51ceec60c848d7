from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.cost.model import stage_kind
from dflop.records import LLM, ModuleLoad
from dflop.schedule.step_scheduler import predicted_spans, schedule_step
from dflop.simulate.pieces import deal_tiles, pieces
from tests.builders import make_cost, make_inline_plan, make_plan, make_sample, random_batch
from tests.schedule.steps import limited, module_spans, plans_with_batches, with_reruns

ENCODERS = ("vision", "audio")


@st.composite
def cases(draw: st.DrawFn):
    """(plan, batch, cost); the batch may be shorter than the plan's."""
    plan, batch = draw(plans_with_batches())
    cost = make_cost(*(m.module for m in plan.encoders), scale={LLM: draw(st.sampled_from([0.2, 1.0, 3.0]))})
    return draw(limited(plan, batch)), batch, with_reruns(cost)


def schedule(plan, batch, cost, max_concurrency=None, **kwargs):
    return schedule_step(
        run_id="run", step=7, plan=plan, batch=batch, cost=cost, max_concurrency=max_concurrency, **kwargs
    )


@settings(max_examples=25, deadline=None)
@given(cases(), st.sampled_from(["balanced", "arrival"]))
def test_a_step_plan_tells_which_items_there_are_and_what_the_batch_holds(case, policy):
    plan, batch, cost = case
    step_plan = schedule(plan, batch, cost, policy=policy)
    assert [w.module for w in step_plan.work] == [m.module for m in plan.modules]
    for encoder in plan.encoders:
        work = step_plan.of(encoder.module)
        wanted = [
            (s, r) for s, x in enumerate(batch) for r, item in enumerate(x.items) if item.module == encoder.module
        ]
        assert list(zip(work.item_sample, work.item_rank_in_sample, strict=True)) == wanted
        assert list(work.item_rows) == [batch[s].items[r].num_rows for s, r in wanted]
    for w in step_plan.work:
        assert len(w.owner) == plan.num_microbatches
        assert {len(ranks) for ranks in w.owner} == {plan.module(w.module).parallel.dp}
    assert (step_plan.run_id, step_plan.step, step_plan.num_microbatches) == ("run", 7, plan.num_microbatches)
    assert step_plan.num_supervised_tokens == sum(s.num_supervised_tokens for s in batch)
    assert step_plan.sample_index == tuple(s.sample_index for s in batch)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_spans_hold_the_loads_of_their_items_and_their_cost(case):
    plan, batch, cost = case
    step_plan = schedule(plan, batch, cost)
    spans = module_spans(plan, step_plan, batch, cost)
    for (module, stage, rank), found in spans.items():
        work = step_plan.of(module)
        for k, span in enumerate(found):
            load = ModuleLoad(0, 0, 0)
            for i in work.owner[k][rank]:
                sample = batch[work.item_sample[i]]
                load += sample.load(LLM) if module == LLM else sample.items[work.item_rank_in_sample[i]].load
            assert (span.microbatch, ModuleLoad(span.num_items, span.num_tokens, span.sum_sq_tokens)) == (k, load)
            seconds = cost.stage_seconds(plan.module(module), stage, load)
            assert (span.forward_s, span.backward_s) == pytest.approx(seconds)


def test_a_stage_that_holds_several_modules_is_expected_to_take_what_all_of_them_do():
    plan = make_inline_plan(2, pp=2, modules=(*ENCODERS, LLM))
    batch, cost = random_batch(16), make_cost(*ENCODERS)
    step_plan = schedule(plan, batch, cost)
    spans = module_spans(plan, step_plan, batch, cost)
    stages = predicted_spans(plan, step_plan, batch, cost)
    assert set(stages) == {(LLM, stage, rank) for stage in (0, 1) for rank in (0, 1)}
    for node, found in stages.items():
        for k, span in enumerate(found):
            of = {m.module: spans[m.module, *node[1:]][k] for m in plan.modules}
            assert span.forward_s == pytest.approx(sum(s.forward_s for s in of.values()))
            assert (span.num_items, span.num_tokens) == (of[LLM].num_items, of[LLM].num_tokens)
    # 12 layers in two stages: the encoders' first 6, the other 2 before those of the LLM.
    assert all(not spans[LLM, 0, rank][k].forward_s for rank in (0, 1) for k in range(4))
    assert any(spans["audio", 1, rank][k].forward_s for rank in (0, 1) for k in range(4))
    busy_s = max(sum(s.forward_s + s.backward_s for s in found) for found in stages.values())
    assert busy_s <= step_plan.predicted_step_s * (1 + 1e-9)


def test_ranks_that_share_samples_take_a_part_of_the_tokens_and_of_the_items():
    plan = make_inline_plan(2, cp=3, pp=2, modules=(*ENCODERS, LLM))
    llm = replace(plan.module(LLM), recompute=True, recompute_tokens=((), (200, 300, 400, 500)))
    plan = replace(plan, modules=(*plan.encoders, llm))
    batch, cost = random_batch(24), with_reruns(make_cost(*ENCODERS))
    step_plan = schedule(plan, batch, cost)
    spans = module_spans(plan, step_plan, batch, cost)
    num_uneven, counts = 0, set()
    for (module, stage, dp_rank), found in spans.items():
        work = step_plan.of(module)
        kind = stage_kind(plan.module(module), stage)
        for k, span in enumerate(found):
            loads = []  # of the ranks, which wait for who takes longest
            if module == LLM:
                for of in pieces(plan, step_plan, k, dp_rank):
                    items = [(p.end - p.first) / batch[p.sample].num_llm_tokens for p in of]
                    items = [n * batch[p.sample].num_supervised_tokens for n, p in zip(items, of, strict=True)]
                    squares = sum(p.end**2 - p.first**2 for p in of)
                    loads.append((sum(items), sum(p.end - p.first for p in of), squares))
            else:
                owned = work.owner[k][dp_rank]
                media = [batch[work.item_sample[i]].items[work.item_rank_in_sample[i]] for i in owned]
                for ranges in deal_tiles([m.num_tokens for m in media], [m.grid[0] for m in media], 3):
                    own = [media[r.item].load for r in ranges]  # of one tile each
                    loads.append((len(own), sum(x.num_tokens for x in own), sum(x.sum_sq_tokens for x in own)))
            # The tokens of all ranks say how many layers run again on each.
            num_rerun = plan.module(module).num_rerun(stage, span.num_tokens)
            counts |= {num_rerun} if module == LLM else set()
            own = kind.of_one_rank().costs(num_rerun)
            of_ranks = np.array([cost.module_seconds(module, load, **own) for load in loads])
            num_uneven += bool(np.ptp(of_ranks[:, 0]) if len(of_ranks) else 0)
            longest = of_ranks.max(axis=0, initial=0.0)
            assert (span.forward_s, span.backward_s) == pytest.approx(longest, rel=0.02 if module == LLM else 1e-9)
    assert num_uneven
    assert len(counts) > 2
    alone = replace(plan, modules=tuple(replace(m, parallel=replace(m.parallel, cp=1)) for m in plan.modules))
    assert schedule(alone, batch, cost).predicted_step_s > step_plan.predicted_step_s


def test_arrival_cuts_by_count():
    plan = make_plan({"vision": 2, LLM: 2}, num_microbatches=2)
    batch = [make_sample(i, 10, [("vision", 40)] * (i % 2)) for i in range(7)]
    arrival = schedule(plan, batch, make_cost("vision"), policy="arrival")
    assert arrival.of(LLM).owner == (((0, 1), (2, 3)), ((4, 5), (6,)))
    assert arrival.of("vision").item_sample == (1, 3, 5)
    assert arrival.of("vision").owner == (((0,), (1,)), ((2,), ()))


def test_skewed_batch_is_balanced_and_faster():
    plan = make_plan({"vision": 1, LLM: 1}, num_microbatches=4)
    batch = [make_sample(i, 2000 if i < 2 else 50, [("vision", 1000)] if i % 8 > 5 else []) for i in range(16)]
    step_plan = schedule(plan, batch, make_cost("vision"))
    assert step_plan.policy == "balanced"
    assert step_plan.predicted_step_s < 0.9 * step_plan.arrival_step_s


def test_nothing_to_gain_keeps_the_arrival_order():
    plan = make_plan({LLM: 1}, num_microbatches=4)
    batch = [make_sample(i, 100) for i in range(8)]
    assert schedule(plan, batch, make_cost()) == schedule(plan, batch, make_cost(), policy="arrival")


def test_contention_is_part_of_the_prediction():
    plan, batch = make_plan({"vision": 1, "audio": 1, LLM: 2}), random_batch(16)
    cost = make_cost(*ENCODERS)
    free, contended = schedule(plan, batch, cost), schedule(plan, batch, cost, 1)
    spans = predicted_spans(plan, contended, batch, cost)
    compute_s = sum(s.forward_s + s.backward_s for node in spans.values() for s in node)
    assert contended.predicted_step_s >= compute_s * (1 - 1e-9) > free.predicted_step_s
