"""Routes with tensor parallelism; that every row gets to its placeholder: `test_feed.py`."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dflop.parallel.topology import peers_of, rank_of, seats
from dflop.records import LLM
from dflop.train.routes import routes
from tests.train.synthetic import assign, make_plan, make_shapes

ENCODER_GRIDS = st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]))
LLM_GRIDS = st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([1, 2, 3, 4]))


@st.composite
def assigned_plans(draw):
    """Any (pp, dp, tp) of every module, any owner of every item; degrees of tensor parallelism need not divide."""
    layout = {"vision": draw(ENCODER_GRIDS), "audio": draw(ENCODER_GRIDS), LLM: draw(LLM_GRIDS)}
    plan = make_plan(layout, num_microbatches=draw(st.integers(1, 3)))
    batch = make_shapes(draw(st.integers(1, 6)), seed=draw(st.integers(0, 3)))
    slot = st.integers(0, plan.num_microbatches - 1)
    return plan, assign(
        plan, batch, 0,
        slots=draw(st.lists(slot, min_size=len(batch), max_size=len(batch))),
        replica=lambda dp: draw(st.integers(0, dp - 1)),
        shuffled=lambda count: draw(st.permutations(range(count))),
    )  # fmt: skip


def messages(plan, step_plan, module, k, senders, receivers):
    """(rows by item, sender, receiver) of all that an encoder and the LLM exchange in a microbatch, as each end has it.

    `senders` and `receivers` are (grid, stage): the encoder's last and the LLM's first, or the other way round.
    """
    (source, source_stage), (target, target_stage) = senders, receivers
    sent, received = [], []
    for route in routes(step_plan, module, k):
        rows = tuple(zip(route.items, route.source_rows, strict=True))
        dp = {module: route.encoder_dp, LLM: route.llm_dp}
        for seat in seats(plan):
            here = seat.module, seat.stage, seat.dp_rank
            if here == (source.module, source_stage, dp[source.module]):
                peers = peers_of(seat, source.parallel.tp, target, target_stage, dp[target.module])
                sent += [(rows, seat.rank, peer) for peer in peers.gives_to]
            if here == (target.module, target_stage, dp[target.module]):
                peers = peers_of(seat, target.parallel.tp, source, source_stage, dp[source.module])
                received.append((rows, peers.takes_from, seat.rank))
    return sent, received


@given(assigned_plans())
def test_every_tensor_parallel_rank_gets_every_row_once_in_both_directions(given_):
    plan, step_plan = given_
    llm_work = step_plan.of(LLM)
    for encoder in plan.encoders:
        work, llm, last = step_plan.of(encoder.module), plan.module(LLM), encoder.parallel.pp - 1
        ends = {True: (encoder, last), False: (llm, 0)}
        for k in range(plan.num_microbatches):
            llm_dp = {llm_work.item_sample[i]: dp for dp, ids in enumerate(llm_work.owner[k]) for i in ids}
            owned = [(dp, item) for dp, items in enumerate(work.owner[k]) for item in items]
            for is_forward in (True, False):
                sent, received = messages(plan, step_plan, encoder.module, k, ends[is_forward], ends[not is_forward])
                assert Counter(sent) == Counter(received), "one end expects what the other does not do"
                got = Counter((item, rank) for rows, _, rank in received for item, _ in rows)
                wanted = Counter()
                for dp, item in owned:
                    to = llm_dp[work.item_sample[item]] if is_forward else dp
                    grid, stage = ends[not is_forward]
                    wanted.update((item, rank_of(grid, stage, to, t)) for t in range(grid.parallel.tp))
                assert got == wanted, "an item misses a rank or gets there twice"
