"""Which modules recompute, stage by stage; their gradients, and frozen modules, are in `test_parity.py`."""

from __future__ import annotations

import dataclasses

import pytest

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


def layers_of(module, stage):
    return stage.decoder.layers if module == LLM else stage.layers


@pytest.mark.parametrize("plan", [SPLIT, INLINE], ids=["split", "inline"])
def test_only_the_modules_that_the_plan_names_recompute(plan):
    for rank in range(plan.num_processes):
        seat = seat_of(plan, rank)
        stages, _ = make_stages(synthetic.tiny_model(), synthetic.family(), seat, None)
        prepare_stages(stages, with_recompute(plan, ("vision", LLM)), seat, synthetic.family(), frozen=())
        for part, stage in zip(seat.parts, stages, strict=True):
            flags = {layer.gradient_checkpointing for layer in layers_of(part.module, stage)}
            assert flags == {part.module in ("vision", LLM)}
