from collections import Counter

import pytest

from dflop.errors import DataError
from dflop.run.batches import (
    COMPARE,
    NUM_WARMUP_STEPS,
    TRAIN,
    GlobalBatches,
    Stage,
    job_steps,
    profiled_ways,
    stage_at,
    stage_of_job,
    stages_of,
)
from dflop.run.directory import RunDir
from tests.builders import make_sample, random_batch
from tests.jobs.configs import make_config
from tests.jobs.made import save_step

STAGES = "stages=[{name: align, num_steps: 3, frozen: [vision.tower, llm], learning_rate: 0.01}, {name: all}]"


def test_stages_share_out_the_steps(tmp_path):
    config = make_config(tmp_path, STAGES, "train.num_steps=8", "train.learning_rate=0.002", "model.frozen=[audio]")
    align = Stage(0, "align", 0, 3, ("vision.tower", "llm"), 0.01)
    rest = Stage(1, "all", 3, 8, (), 0.002)
    assert stages_of(config) == (align, rest)
    assert [stage_at(config, step).index for step in range(10)] == [0] * 3 + [1] * 7
    assert job_steps(config, TRAIN, align) == job_steps(config, TRAIN)[:3]
    assert job_steps(config, TRAIN, rest) == job_steps(config, TRAIN)


def test_frozen_modules_are_profiled_where_a_stage_has_some(tmp_path):
    assert profiled_ways(make_config(tmp_path)) == ("train",)
    assert profiled_ways(make_config(tmp_path, "model.frozen=[vision]")) == ("train", "frozen")
    assert profiled_ways(make_config(tmp_path, STAGES)) == ("train", "frozen")
    given = make_config(tmp_path, STAGES, "model_profile.ways=[frozen, recompute]")
    assert profiled_ways(given) == ("frozen", "recompute")
    assert profiled_ways(make_config(tmp_path, "stages=[{name: all}]", "model.frozen=[vision]")) == ("train",)


def test_a_job_belongs_to_the_stage_its_newest_checkpoint_has_reached(tmp_path):
    config, run = make_config(tmp_path, STAGES, "train.num_steps=8"), RunDir(tmp_path)
    assert stage_of_job(config, TRAIN, run.next_step()).name == "align"
    for next_step, name in ((2, "align"), (3, "all"), (8, "all")):
        save_step(run, next_step)
        assert stage_of_job(config, TRAIN, run.next_step()).name == name
    assert stage_of_job(config, COMPARE, 0).name == "all"


def test_without_stages_there_is_one_that_takes_the_batches_in_order(tmp_path):
    config = make_config(tmp_path, "train.num_steps=5", "train.learning_rate=0.002", "model.frozen=[audio]")
    assert stages_of(config) == (Stage(0, "train", 0, 5, ("audio",), 0.002),)
    steps = job_steps(config, TRAIN)
    assert [(s.batch_step, s.policy, s.label) for s in steps] == [(t, "balanced", "") for t in range(5)]


@pytest.mark.parametrize("baselines", [[], ["length_grouped"], ["token_kk", "length_grouped"]])
@pytest.mark.parametrize(("num_batches", "num_repeats"), [(1, 1), (3, 2), (5, 2), (2, 3)])
def test_a_comparison_is_fair(tmp_path, num_batches, num_repeats, baselines):
    policies = ["arrival", *baselines, "balanced"]
    config = make_config(
        tmp_path, f"compare.num_batches={num_batches}", f"compare.num_repeats={num_repeats}",
        f"compare.baselines=[{','.join(baselines)}]",
    )  # fmt: skip
    steps = job_steps(config, COMPARE)
    warmup, counted = steps[:NUM_WARMUP_STEPS], steps[NUM_WARMUP_STEPS:]
    assert {s.label for s in warmup} == {"warmup"}
    assert all(s.label == s.policy for s in counted)
    assert Counter((s.batch_step, s.policy) for s in counted) == {
        (b, p): num_repeats for b in range(num_batches) for p in policies
    }
    turns = [counted[i : i + len(policies)] for i in range(0, len(counted), len(policies))]
    for turn in turns:
        assert len({s.batch_step for s in turn}) == 1, "a turn shares its batch"
        assert {s.policy for s in turn} == {*policies}
    firsts = Counter(turn[0].policy for turn in turns)
    assert max(firsts.values()) - min(firsts[p] for p in policies) <= 1, "one policy always goes first"


def test_batches_depend_on_seed_and_step_alone(tmp_path):
    shapes = random_batch(40, seed=0)
    config = make_config(tmp_path, "plan.global_batch_size=16")
    batches = [GlobalBatches(config, shapes).at(t) for t in range(6)]
    assert [len(b) for b in batches] == [16, 16, 8] * 2
    assert batches[0] != batches[1]
    assert GlobalBatches(make_config(tmp_path, "plan.global_batch_size=16", "train.seed=1"), shapes).at(0) != batches[0]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(s.sample_index for b in epoch for s in b) == list(range(40)), "an epoch is every sample once"


def test_samples_that_are_held_out_are_in_no_global_batch(tmp_path):
    shapes = list(random_batch(40, seed=3))
    config = make_config(tmp_path, "validation.num_samples=10", "plan.global_batch_size=8")
    batches = GlobalBatches(config, shapes)
    validated = [s.sample_index for batch in batches.validated for s in batch]
    epoch = [s.sample_index for step in range(4) for s in batches.at(step)]
    assert sorted(validated + epoch) == list(range(40))
    assert [len(batch) for batch in batches.validated] == [8, 2]
    assert GlobalBatches(make_config(tmp_path, "plan.global_batch_size=8"), shapes).validated == []


@pytest.mark.parametrize(
    ("num_samples", "num_supervised", "what"),
    [
        (33, 5, "33 samples are held out and 7 left: less than a global batch of 8"),
        (1, 0, "of 40 samples none can be held out"),
    ],
)
def test_a_validation_that_leaves_too_little_is_refused(tmp_path, num_samples, num_supervised, what):
    config = make_config(tmp_path, f"validation.num_samples={num_samples}", "plan.global_batch_size=8")
    shapes = [make_sample(index, 20, num_supervised_tokens=num_supervised) for index in range(40)]
    with pytest.raises(DataError, match=what) as caught:
        GlobalBatches(config, shapes)
    assert (caught.value.where, bool(caught.value.hint)) == ("validation.num_samples", True)


@pytest.mark.parametrize("num_samples", [3, 8, 12, 99])
def test_overfitting_takes_the_first_samples_again_and_again(tmp_path, num_samples):
    shapes = list(random_batch(40, seed=3))
    whole = GlobalBatches(make_config(tmp_path, "plan.global_batch_size=8"), shapes)
    first = [s.sample_index for step in range(5) for s in whole.at(step)][:num_samples]
    overfit = make_config(tmp_path, "plan.global_batch_size=8", f"train.overfit_samples={num_samples}")
    batches, num_steps = GlobalBatches(overfit, shapes), -(-min(num_samples, 40) // 8)
    for epoch in range(2):
        seen = [s.sample_index for step in range(num_steps) for s in batches.at(epoch * num_steps + step)]
        assert sorted(seen) == sorted(first)
