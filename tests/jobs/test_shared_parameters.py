"""A whole job whose replicas share out parameters: the losses of whole replicas, and a checkpoint anyone can load."""

from __future__ import annotations

import pytest

from dflop.errors import Interrupted
from dflop.train.manifest import read_latest
from tests.jobs.faulty import STEP
from tests.jobs.training import fresh, give_plan, losses_of, planned_run, run_ranks
from tests.train.synthetic import make_inline_plan

NUM_STEPS, TOLERANCE = 5, 1e-4
SETTINGS = (f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=100", "train.shard_parameters=true")

pytestmark = [pytest.mark.lane("layouts"), pytest.mark.timeout(600)]


def test_losses_are_those_of_whole_replicas_from_its_checkpoint_too(tmp_path):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    planned = planned_run(tmp_path / "planned", *SETTINGS)
    # Its modules have one replica each, so nobody shares anything.
    alone = fresh(planned, tmp_path / "alone")
    end(run_ranks(alone, "dflop.jobs.train", str(alone.path), "train"))
    run = fresh(planned, tmp_path / "replicas")
    give_plan(run, make_inline_plan([{"vision": 4, "llm": 6}], dp=2, num_microbatches=4))
    end(run_ranks(run, "tests.jobs.faulty", "told", "0", str(run.path)), Interrupted.exit_code)
    assert read_latest(run.checkpoints)["next_step"] == STEP + 1 < NUM_STEPS
    # One replica holds all that the two have left.
    give_plan(run, planned.plan())
    end(run_ranks(run, "dflop.jobs.train", str(run.path), "train"))
    assert losses_of(run) == pytest.approx(losses_of(alone), rel=TOLERANCE)
    assert len(losses_of(run)) == NUM_STEPS


def end(ended, code: int = 0) -> None:
    assert set(ended.codes) == {code}, "\n".join(ended.stderr)
