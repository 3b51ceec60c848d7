"""Which modules recompute and which train, stage by stage; their gradients are in `test_parity.py`."""

from __future__ import annotations

import dataclasses

import pytest

from dflop.errors import ConfigError
from dflop.parallel.topology import seat_of
from dflop.records import LLM
from dflop.train.stages import make_stages, prepare_stages
from tests.train import synthetic
from tests.train.synthetic import make_inline_plan, make_plan

SPLIT = make_plan({"vision": (2, 1), LLM: (2, 1)}, num_microbatches=4)
INLINE = make_inline_plan([{"vision": 2, "audio": 1}, {"audio": 1, LLM: 4}], dp=1, num_microbatches=4)


def with_recompute(plan, modules):
    changed = (dataclasses.replace(m, recompute=m.module in modules) for m in plan.modules)
    return dataclasses.replace(plan, modules=tuple(changed))


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


def test_freezing_everything_is_an_error_and_a_module_that_the_data_does_not_use_is_nothing():
    trains, _ = prepared(SPLIT, 0, ("audio",))
    assert all(trains.values())
    with pytest.raises(ConfigError, match="nothing to train") as caught:
        prepared(SPLIT, 0, ("vision", LLM))
    assert caught.value.where == "model.frozen"
