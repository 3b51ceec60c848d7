"""Whole jobs under plans of every kind: the losses of the plain split plan.

That each goes on from what another saved: `tests/train/test_resume.py` and `test_checkpoint.py`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from dflop.parallel.topology import seats
from dflop.records import LLM, Plan, StepObservation, StepPlan
from dflop.run.batches import QUICK
from dflop.run.directory import RunDir
from dflop.steps.planning import bound_family
from tests.jobs.training import fresh, give_plan, losses_of, set_config, train
from tests.store.spooled import read_spool
from tests.train.synthetic import ALL, make_inline_plan, make_plan, sharing

NUM_STEPS, NUM_MICROBATCHES = 6, 4
TOLERANCE = 1e-4
SPLIT, REPLICAS = "split", "inline dp2, ZeRO-1"
NAMES = (
    REPLICAS, "inline pp2, a stage of both, recomputed", "vision dp2 | llm tp2",
    "vision dp2 | llm pp2, recomputed, ZeRO-1", "vision dp2 | llm tp2 dp2, FSDP2", "inline dp2 cp2, FSDP2, limited",
)  # fmt: skip

pytestmark = [pytest.mark.lane("layouts"), pytest.mark.timeout(600)]


def all_of(plan: Plan, **fields: float) -> Plan:
    return dataclasses.replace(plan, modules=tuple(dataclasses.replace(m, **fields) for m in plan.modules))


def limited(plan: Plan) -> Plan:
    """Large microbatches run more of the LLM's six layers again than small ones."""
    llm = dataclasses.replace(plan.module(LLM), recompute=True, recompute_tokens=(tuple(range(40, 280, 40)),))
    return dataclasses.replace(plan, modules=(*plan.encoders, llm))


def plan_of(run: RunDir, name: str) -> Plan:
    """The tiny model has 4 layers of vision and 6 of the LLM, both of which two ranks can share."""
    family, m = bound_family(run.config()), NUM_MICROBATCHES
    plans = {
        SPLIT: make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=m, of=family),
        REPLICAS: all_of(make_inline_plan([{"vision": 4, LLM: 6}], dp=2, num_microbatches=m), shard_optimizer=True),
        NAMES[1]: all_of(
            make_inline_plan([{"vision": 4, LLM: 2}, {LLM: 4}], dp=1, num_microbatches=m), recompute=True
        ),
        NAMES[2]: make_plan({"vision": (1, 2), LLM: (1, 1, 2)}, num_microbatches=m, of=family),
        NAMES[3]: all_of(
            make_plan({"vision": (1, 2), LLM: (2, 1)}, num_microbatches=3, of=family),
            recompute=True, shard_optimizer=True,
        ),
        NAMES[4]: sharing(make_plan({"vision": (1, 2), LLM: (1, 2, 2)}, num_microbatches=m, of=family), ALL),
        NAMES[5]: limited(all_of(
            sharing(make_inline_plan([{"vision": 4, LLM: 6}], dp=2, cp=2, num_microbatches=m), ALL), cost_growth=0.01
        )),
    }  # fmt: skip
    return plans[name]


def trained(planned: RunDir, folder: Path, name: str) -> RunDir:
    """A copy of the run, trained under another plan."""
    run = fresh(planned, folder)
    set_config(run, f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=100")
    give_plan(run, plan_of(run, name))
    train(run)
    return run


@pytest.fixture(scope="module")
def split_losses(planned, tmp_path_factory) -> dict[int, float]:
    losses = losses_of(trained(planned, tmp_path_factory.mktemp("split"), SPLIT))
    assert len(losses) == NUM_STEPS
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_a_job_under_any_plan_has_the_losses_of_the_split_plan(planned, tmp_path, name, split_losses):
    run = trained(planned, tmp_path, name)
    assert losses_of(run) == pytest.approx(split_losses, rel=TOLERANCE)
    assert_observed(run)


def assert_observed(run: RunDir) -> None:
    """Every rank has seen every step as the seat that it is, and what was planned in full was predicted."""
    plan, store = run.plan(), run.config().store
    found = {(o.step, o.rank): o for o in read_spool(store, StepObservation)}
    assert sorted(found) == [(step, rank) for step in range(NUM_STEPS) for rank in range(plan.num_processes)]
    plans = {p.step: p for p in read_spool(store, StepPlan)}
    for seat in seats(plan):
        for step in range(NUM_STEPS):
            seen = found[step, seat.rank]
            assert (seen.module, seen.stage, seen.dp_rank) == (seat.module, seat.stage, seat.dp_rank)
            slots = list(enumerate(plans[step].of(seat.module).owner))
            owned = [k for k, ranks in slots if ranks[seat.dp_rank]]
            together = [k for k, ranks in slots if any(ranks)]  # who has nothing runs something all the same
            is_sharded = plan.module(seat.module).parameter_shards > 1
            assert [s.microbatch for s in seen.spans] == (together if is_sharded else owned)
            assert all(s.forward_compute_s > 0 and s.backward_compute_s > 0 for s in seen.spans)
            for span in seen.spans if plans[step].policy != QUICK else ():
                if span.microbatch not in owned:
                    continue
                assert span.predicted_forward_s > 0
