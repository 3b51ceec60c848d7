"""A run whose mixture changes midway: that is noticed, planned anew, and the run goes on under the other plan."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from dflop.records import LLM, Plan, SampleShape, StepObservation, StepPlan
from dflop.run.batches import GlobalBatches
from dflop.run.directory import RunDir
from dflop.run.plan_scope import basis_of
from dflop.steps import planning
from dflop.steps.follow import Listener
from dflop.steps.session import train_to_end
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.train.manifest import read_latest
from tests.jobs.training import BATCH_SIZE, ROOT, fresh, losses_of, planned_run, train
from tests.store.spooled import read_spool

NUM_TEXT_STEPS, NUM_STEPS, PROFILE_KEY = 10, 40, "model"
MAX_PICTURES = 1
"""Per batch of texts: without any there would be no process for them."""
DEPTHS = {
    "    depth: 4": "    depth: 8",
    "[0, 1, 2, 3]": "[0, 1, 2, 3, 4, 5, 6, 7]",
    "num_hidden_layers: 6": "num_hidden_layers: 2",
}
"""Of the tiny Omni model: more encoder than language model."""

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(900)]


def changing_run(folder: Path, *overrides: str) -> RunDir:
    """Texts first, pictures behind them, trained in the order in which they are listed."""
    model = (ROOT / "configs/models/tiny_omni.yaml").read_text()
    for old, new in DEPTHS.items():
        assert model.count(old) == 1
        model = model.replace(old, new)
    (folder / "encoder_heavy.yaml").write_text(model)
    run = planned_run(
        folder, f"model={folder}/encoder_heavy.yaml", f"dataset.shuffle_window={BATCH_SIZE}",
        f"train.num_steps={NUM_STEPS}", *overrides, num_rows=192, num_kept=144,
    )  # fmt: skip
    texts = [s for s in run.shapes() if not s.items]
    pictures = sorted((s for s in run.shapes() if s.items), key=lambda s: len(s.items))
    first = batches(texts, NUM_TEXT_STEPS, BATCH_SIZE - MAX_PICTURES)
    few, many = (
        batches(pictures, NUM_TEXT_STEPS, MAX_PICTURES),
        batches(pictures, NUM_STEPS - NUM_TEXT_STEPS, BATCH_SIZE),
    )
    mixed = [shape for batch in zip(first, few, strict=True) for part in batch for shape in part]
    run.write_shapes([*mixed, *itertools.chain.from_iterable(many)])
    return run


def batches(shapes: Sequence[SampleShape], num_batches: int, size: int) -> list[list[SampleShape]]:
    """Samples in turn, over and over."""
    endless = itertools.cycle(shapes)
    return [list(itertools.islice(endless, size)) for _ in range(num_batches)]


def processes(plan: Plan) -> dict[str, int]:
    return {m.module: m.parallel.num_processes for m in plan.modules}


def test_a_change_of_the_mixture_is_noticed_and_the_run_goes_on_under_a_plan_for_it(tmp_path):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    run = changing_run(
        tmp_path, "cluster.num_processes_per_node=3", "cluster.num_cores_per_node=3", "plan.share_ranks=[false]",
        f"plan.horizon_steps={NUM_TEXT_STEPS}", "plan.microbatch_choices=[2, 4]", "plan.num_scenarios=3", "plan.top=6",
        "replan.mode=act", "replan.check_every_s=0.5", "replan.restart_cost_s=0", "replan.min_steps=22",
        "replan.max_replans=1", "replan.reprofile=false", "train.checkpoint_every=2",
    )  # fmt: skip
    planning.plan_run(run, run.config(), PROFILE_KEY, print)
    before = run.plan()
    straight = fresh(run, tmp_path / "straight")
    train(straight, limit_s=600)
    asyncio.run(train_to_end(run, Listener(print)))

    ingest(run.config().store)
    with Reader(run.config().store) as reader:
        decisions = reader.decisions(run.run_id)
    (replanned,) = [d for d in decisions if (d.kind, d.verdict) == ("replan", "done")]
    noticed = [d for d in decisions if d.kind == "drift_shapes" and d.verdict == "noticed"]
    assert noticed[0].step >= NUM_TEXT_STEPS, "nothing had changed yet"
    assert replanned.step >= noticed[0].step
    assert replanned.gain_s > 0

    after = run.plan()
    assert (replanned.plan_id, replanned.new_plan_id) == (before.plan_id, after.plan_id)
    assert processes(before)["vision"] == 1
    assert processes(after) == {"vision": 2, LLM: 1}
    assert basis_of(run).from_step > NUM_TEXT_STEPS

    seen = sorted(read_spool(run.config().store, StepObservation), key=lambda o: (o.step, o.rank))
    attempts = {o.step: o.attempt for o in seen}
    assert set(attempts.values()) == {1, 2}
    ranks = {1: range(before.num_processes), 2: range(after.num_processes)}
    assert [(o.step, o.rank) for o in seen] == [(t, r) for t in range(NUM_STEPS) for r in ranks[attempts[t]]]
    assert losses_of(run) == pytest.approx(losses_of(straight), rel=1e-5)
    assert read_latest(run.checkpoints)["next_step"] == NUM_STEPS
    drawn = GlobalBatches(run.config(), run.shapes())
    for plan in read_spool(run.config().store, StepPlan):
        assert plan.sample_index == tuple(s.sample_index for s in drawn.at(plan.step))
