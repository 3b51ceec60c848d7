from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dflop.records import LLM
from dflop.train.routes import routes
from tests.train.synthetic import make_plan, make_shapes, make_step_plan


@st.composite
def step_plans(draw):
    """Random layouts, batches and uneven ownership; some microbatches and ranks have nothing."""
    layout = {m: (1, draw(st.integers(1, 3))) for m in ("vision", "audio")} | {LLM: (1, draw(st.integers(1, 3)))}
    plan = make_plan(layout, num_microbatches=draw(st.integers(1, 4)))
    shapes = make_shapes(draw(st.integers(1, 14)), seed=draw(st.integers(0, 10_000)))
    return make_step_plan(plan, shapes, draw(st.integers(0, 10_000)), text_only_slot=draw(st.booleans()))


@given(step_plans())
def test_every_row_is_routed_once_to_whoever_packs_its_sample(step_plan):
    llm = step_plan.of(LLM)
    for encoder in ("vision", "audio"):
        work = step_plan.of(encoder)
        sent = 0
        for k in range(step_plan.num_microbatches):
            found = routes(step_plan, encoder, k)
            for encoder_dp, items in enumerate(work.owner[k]):
                own = [r for r in found if r.encoder_dp == encoder_dp]
                spans = sorted((span, item) for r in own for span, item in zip(r.source_rows, r.items, strict=True))
                assert [item for _, item in spans] == list(items), "not every item once, in packed order"
                ends = [0, *(end for (_, end), _ in spans)]
                assert [start for (start, _), _ in spans] == ends[:-1], "rows are skipped or sent twice"
                assert [end - start for (start, end), _ in spans] == [work.item_rows[i] for i in items]
            for route in found:
                packed = {llm.item_sample[i] for i in llm.owner[k][route.llm_dp]}
                assert {work.item_sample[i] for i in route.items} <= packed
                sent += route.num_rows
        assert sent == sum(work.item_rows)


@given(step_plans())
def test_routes_are_unique_ordered_and_never_empty(step_plan):
    for encoder in ("vision", "audio"):
        for k in range(step_plan.num_microbatches):
            found = routes(step_plan, encoder, k)
            ends = [(r.encoder_dp, r.llm_dp) for r in found]
            assert ends == sorted(set(ends))
            assert all(r.items and r.num_rows > 0 for r in found)
