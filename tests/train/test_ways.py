"""Frozen modules and towers, recomputed layers: gradients like Hugging Face's, in pipelines and inline chains."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from dflop.errors import ConfigError
from dflop.parallel.topology import seat_of
from dflop.records import LLM
from dflop.train.stages import make_stages, prepare_stages
from tests.train import synthetic
from tests.train.parity import Omni, Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan

IMAGES = Omni(("image", "video"), num_steps=2)
MEDIA = Omni(num_steps=2)
SPLIT = make_plan({"vision": (2, 1), LLM: (2, 1)}, num_microbatches=4)
INLINE = make_inline_plan([{"vision": 2, "audio": 1}, {"audio": 1, LLM: 4}], dp=1, num_microbatches=4)
TRIALS = {
    "vision pp2 + llm pp2, recomputed": (SPLIT, IMAGES, ("vision", LLM), ()),
    "inline pp2, mixed stage, recomputed": (INLINE, MEDIA, ("vision", "audio", LLM), ()),
    "inline pp2, mixed stage, audio recomputed": (INLINE, MEDIA, ("audio",), ()),
    "vision pp2 + llm pp2, vision frozen": (SPLIT, IMAGES, (), ("vision",)),
    "vision pp2 + llm pp2, llm frozen and recomputed": (SPLIT, IMAGES, (LLM,), (LLM,)),
    "inline pp2, mixed stage, encoders frozen": (INLINE, MEDIA, (LLM,), ("vision", "audio")),
    "inline pp2, mixed stage, llm and audio frozen": (INLINE, MEDIA, ("vision",), ("audio", LLM)),
    "vision pp2 + llm pp2, projector alone trains": (SPLIT, IMAGES, (), ("vision.tower", LLM)),
    "vision pp2 + llm pp2, tower frozen and recomputed": (SPLIT, IMAGES, ("vision",), ("vision.tower",)),
    "inline pp2, mixed stage, projectors alone train": (INLINE, MEDIA, (LLM,), ("vision.tower", "audio.tower", LLM)),
    "inline pp2, mixed stage, one tower frozen": (INLINE, MEDIA, (), ("audio.tower",)),
}
"""Plan, subject, modules that recompute, modules that are frozen."""

cached_reference = cache(reference)


def with_recompute(plan, modules):
    changed = (dataclasses.replace(m, recompute=m.module in modules) for m in plan.modules)
    return dataclasses.replace(plan, modules=tuple(changed))


@pytest.mark.parametrize("name", TRIALS)
def test_gradients_equal_hugging_face(name, tmp_path):
    plan, subject, recompute, frozen = TRIALS[name]
    plan = with_recompute(plan, recompute)
    step_plans = tuple(make_step_plan(plan, batch, step) for step, batch in enumerate(subject.batches))
    ranks = run_trial(Trial(subject, plan, step_plans, frozen), tmp_path)
    assert_equal_steps(ranks, cached_reference(subject, frozen=frozen))


def prepared(plan, rank, frozen=()):
    """(which modules train where, per module of the rank its stage)."""
    seat = seat_of(plan, rank)
    stages, _ = make_stages(synthetic.tiny_model(), synthetic.family(), seat, None)
    trains = prepare_stages(stages, plan, seat, synthetic.family(), frozen=frozen)
    return trains, {part.module: stage for part, stage in zip(seat.parts, stages, strict=True)}


def layers_of(module, stage):
    return stage.decoder.layers if module == LLM else stage.layers


@pytest.mark.parametrize("plan", [SPLIT, INLINE], ids=["split", "inline"])
def test_only_the_modules_that_the_plan_names_recompute(plan):
    for rank in range(plan.num_processes):
        _, stages = prepared(with_recompute(plan, ("vision", LLM)), rank)
        for module, stage in stages.items():
            flags = [layer.gradient_checkpointing for layer in layers_of(module, stage)]
            assert flags
            assert set(flags) == {module in ("vision", LLM)}


@pytest.mark.parametrize("plan", [SPLIT, INLINE], ids=["split", "inline"])
@pytest.mark.parametrize("frozen", ["vision", "vision.tower"])
def test_all_ranks_agree_on_what_trains_and_it_is_what_trains(plan, frozen):
    known = [prepared(plan, rank, (frozen,)) for rank in range(plan.num_processes)]
    trains = known[0][0]
    assert all(found == trains for found, _ in known)
    of_vision = [does for (module, _), does in trains.items() if module == "vision" and does]
    assert len(of_vision) == (frozen == "vision.tower"), "the last stage alone has the projector"
    assert {module for (module, _), does in trains.items() if does} | {"vision"} == {m.module for m in plan.modules}
    for rank, (_, stages) in enumerate(known):
        for module, stage in stages.items():
            number = seat_of(plan, rank).stage
            assert trains[module, number] == any(p.requires_grad for p in stage.names.values())


def test_a_module_that_the_data_does_not_use_may_be_frozen():
    trains, _ = prepared(SPLIT, 0, ("audio",))
    assert all(trains.values())


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match="nothing to train") as caught:
        prepared(SPLIT, 0, ("vision", LLM))
    assert caught.value.where == "model.frozen"
