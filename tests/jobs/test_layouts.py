"""Whole jobs under plans of every kind: the losses of the plain split plan, from its checkpoint, too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from dflop.errors import Interrupted
from dflop.jobs.planning import bound_family
from dflop.jobs.rundir import RunDir
from dflop.jobs.steps import QUICK
from dflop.parallel.topology import seats
from dflop.records import LLM, Plan, StepObservation, StepPlan
from dflop.store.spool import read_spool
from dflop.train.manifest import read_latest
from tests.jobs.faulty import STEP
from tests.jobs.training import fresh, give_plan, losses_of, planned_run, run_ranks
from tests.train.synthetic import make_inline_plan, make_plan

NUM_STEPS = 6
TOLERANCE = 1e-4

pytestmark = [pytest.mark.lane("layouts"), pytest.mark.timeout(600)]


def all_of(plan: Plan, **fields: bool) -> Plan:
    return dataclasses.replace(plan, modules=tuple(dataclasses.replace(m, **fields) for m in plan.modules))


def plans_of(run: RunDir) -> dict[str, Plan]:
    """By name; the tiny model has 4 layers of vision and 6 of the LLM, both of which two ranks can share."""
    family, m = bound_family(run.config()), 4
    return {
        "inline dp2, ZeRO-1": all_of(
            make_inline_plan([{"vision": 4, LLM: 6}], dp=2, num_microbatches=m), shard_optimizer=True
        ),
        "inline pp2, a stage of both, recomputed": all_of(
            make_inline_plan([{"vision": 4, LLM: 2}, {LLM: 4}], dp=1, num_microbatches=m), recompute=True
        ),
        "vision pp2 | llm tp2": make_plan({"vision": (2, 1), LLM: (1, 1, 2)}, num_microbatches=m, of=family),
        "vision dp2 | llm pp2, recomputed, ZeRO-1": all_of(
            make_plan({"vision": (1, 2), LLM: (2, 1)}, num_microbatches=3, of=family),
            recompute=True, shard_optimizer=True,
        ),
    }  # fmt: skip


NAMES = (
    "inline dp2, ZeRO-1", "inline pp2, a stage of both, recomputed", "vision pp2 | llm tp2",
    "vision dp2 | llm pp2, recomputed, ZeRO-1",
)  # fmt: skip


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    return planned_run(tmp_path_factory.mktemp("layouts"), f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=100")


@pytest.fixture(scope="module")
def split_losses(planned, tmp_path_factory) -> dict[int, float]:
    run = fresh(planned, tmp_path_factory.mktemp("split"))
    train(run)
    return losses_of(run)


def train(run: RunDir, *fault: str, code: int = 0) -> None:
    entry = "tests.jobs.faulty" if fault else "dflop.jobs.train"
    ended = run_ranks(run, entry, *fault, str(run.path), *(() if fault else ("train",)))
    assert set(ended.codes) == {code}, "\n".join(ended.stderr)


@pytest.fixture
def with_plan(planned, tmp_path) -> Callable[[str], RunDir]:
    def copied(name: str) -> RunDir:
        run = fresh(planned, tmp_path)
        give_plan(run, plans_of(run)[name])
        return run

    return copied


@pytest.mark.parametrize("name", NAMES)
def test_a_job_under_any_plan_has_the_losses_of_the_split_plan(name, with_plan, split_losses):
    run = with_plan(name)
    train(run)
    assert losses_of(run) == pytest.approx(split_losses, rel=TOLERANCE)
    assert len(split_losses) == NUM_STEPS
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
            owned = [k for k, ranks in enumerate(plans[step].of(seat.module).owner) if ranks[seat.dp_rank]]
            assert [s.microbatch for s in seen.spans] == owned
            assert all(s.forward_compute_s > 0 and s.backward_compute_s > 0 for s in seen.spans)
            for span in seen.spans if plans[step].policy != QUICK else ():
                assert span.predicted_forward_s > 0


def test_a_job_goes_on_under_another_plan(planned, tmp_path, split_losses):
    run = fresh(planned, tmp_path)
    train(run, "told", "0", code=Interrupted.exit_code)
    assert read_latest(run.checkpoints)["next_step"] == STEP + 1 < NUM_STEPS
    assert sorted(losses_of(run)) == list(range(STEP + 1))
    give_plan(run, plans_of(run)["inline dp2, ZeRO-1"])
    train(run)
    assert losses_of(run) == pytest.approx(split_losses, rel=TOLERANCE)
    steps = [(o.step, o.attempt) for o in read_spool(run.config().store, StepObservation) if o.rank == 0]
    assert sorted(steps) == [(step, 1 if step <= STEP else 2) for step in range(NUM_STEPS)]
