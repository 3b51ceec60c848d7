"""Costs of an encoder of which no more than the projector trains."""

import dataclasses
import functools

import pytest
import torch

from dflop.cost import curve
from dflop.cost.model import CostModel
from dflop.cost.tables import tower_table
from dflop.models.build import EncoderStage
from dflop.profile.saved import saved_bytes
from dflop.records import LLM, RunMode
from tests.builders import make_table
from tests.models.test_encoders import items_of
from tests.models.tiny_families import CASES
from tests.models.whole_model import build_model

TRAINED = make_table("vision", source="measured", optimizer_s_per_param=1e-9)
FROZEN = make_table(
    "vision", source="measured", table_id="vision-frozen", trains="none", backward_s=curve.ZERO,
    forward_s=curve.combine([(0.9, TRAINED.forward_s)]), activation_bytes=curve.ZERO, num_measurements=5,
    p95_error_frac=0.2,
)  # fmt: skip
RECOMPUTED = dataclasses.replace(TRAINED, table_id="vision-recomputed", recompute=True)
DECODER = make_table(LLM, source="measured")
LOAD = (2, 400, 90_000)


def seconds(cost, layers, edge, **key):
    return [float(part) for part in cost.module_seconds("vision", LOAD, num_layers=layers, edge=edge, **key)]


def test_layers_cost_what_frozen_ones_do_and_the_edge_what_a_trained_one_does():
    tower, trained, frozen = (CostModel([t]) for t in (tower_table(TRAINED, FROZEN), TRAINED, FROZEN))
    assert seconds(tower, 3, False) == [seconds(frozen, 3, False)[0], 0.0]
    assert seconds(tower, 0, True) == seconds(trained, 0, True)
    assert tower.activation_bytes("vision", LOAD, num_layers=3, edge=False) == 0
    edge = {"num_layers": 0, "edge": True}
    assert tower.activation_bytes("vision", LOAD, **edge) == trained.activation_bytes("vision", LOAD, **edge) > 0


def test_without_a_frozen_table_layers_run_forward_as_trained_ones():
    tower, trained = CostModel([tower_table(TRAINED)]), CostModel([TRAINED])
    assert seconds(tower, 3, True)[0] == seconds(trained, 3, True)[0]
    assert seconds(tower, 3, False)[1] == 0.0


def test_a_stage_of_training_gets_the_tables_of_what_it_freezes():
    given = [TRAINED, FROZEN, RECOMPUTED, DECODER]
    cost = CostModel(given, frozen=("vision.tower", LLM))
    assert cost.table(LLM) is DECODER, "nobody measured a frozen one: the trained one is an upper bound"
    assert cost.table("vision") == tower_table(TRAINED, FROZEN)
    assert cost.table("vision", RunMode(recompute=True)).backward_s == cost.table("vision").backward_s
    known = tower_table(TRAINED)
    for frozen, expected in (
        ((), TRAINED), (None, TRAINED), (("vision",), FROZEN), (("vision", "vision.tower"), FROZEN),
        (("vision.tower",), known),
    ):  # fmt: skip
        assert CostModel([*given, known], frozen=frozen).table("vision") is expected
    assert CostModel([known]).table("vision") is known


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_keeps_of_a_frozen_tower_is_no_more_than_the_edge_of_a_trained_one(name):
    """Two depths tell what the edge keeps, as a profile does."""
    case = CASES[name]
    (module,) = case.family.towers
    kept = {}
    for depth in (2, 3):
        config = case.family.shallow(module, depth) | case.family.token_ids(case.token_id)
        shallow = dataclasses.replace(case, hf_config=case.family.shallow(module, depth)).family
        data, sizes = items_of(name, shallow, module)
        for way in ("trained", "tower"):
            model = build_model(shallow, config, seed=0, dtype=torch.float32)
            stage = EncoderStage(model, shallow.towers[module])
            if way == "tower":
                stage.freeze_tower()
            forward = functools.partial(stage, data, sizes)
            kept[way, depth], _ = saved_bytes(forward, stage.names.values())
    layer = kept["trained", 3] - kept["trained", 2]
    assert layer > 0
    assert kept["tower", 2] == kept["tower", 3] > 0
    assert kept["tower", 2] <= kept["trained", 2] - 2 * layer
