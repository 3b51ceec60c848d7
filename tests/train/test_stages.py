"""What a rank trains is set up by one function, and runs the program that probes of its modules measure."""

from __future__ import annotations

import pytest
import torch

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.parallel.topology import seat_of
from dflop.profile.groups import make_group
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.records import LLM
from dflop.train.stages import pieces_of
from tests.profile.measuring import measure
from tests.train import synthetic
from tests.train.parity import Omni
from tests.train.rank import Rank
from tests.train.synthetic import make_inline_plan, make_step_plan

DEPTHS = {"vision": 2, "audio": 2, LLM: 4}
ONE_RANK = make_inline_plan([DEPTHS], dp=1, num_microbatches=2)


@pytest.fixture
def calls_in(monkeypatch):
    """Makes a list that gets the calls of attention of every forward pass of a stage's layers, layer by layer."""
    calls, segments = [], attention._segments
    monkeypatch.setattr(attention, "_segments", lambda *given: (calls.append(given[3]), segments(*given))[1])

    def watch(stage):
        found = []
        for layer in stage.layers:
            layer.register_forward_pre_hook(lambda *_: calls.clear())
            layer.register_forward_hook(lambda *_: found.append(len(calls)))
        return found

    return watch


def test_a_layer_calls_attention_once_per_microbatch_in_a_job_and_in_a_probe(calls_in, one_rank):
    subject = Omni(num_steps=1)
    (batch,) = subject.batches
    it = Rank(0, ONE_RANK, subject.family, subject.build())
    found = {module: calls_in(stage) for module, stage in it.stage_of.items()}
    step_plan = make_step_plan(it.plan, batch, 0, text_only_slot=False)
    it.step(subject.source(batch), batch, step_plan)
    times = {module: sum(any(slot) for slot in step_plan.of(module).owner) for module in DEPTHS}
    assert sum(times.values()) > len(DEPTHS), "some modules have work in both microbatches"
    assert found == {module: [1] * depth * times[module] for module, depth in DEPTHS.items()}
    settings = ProbeSettings("key", "cpu", "torch", "float32", num_repeats=1)
    for module, depth in DEPTHS.items():
        probe = ModuleProbe(
            subject.family, subject.family.token_ids(synthetic.TOKEN_IDS), module, depth, settings, torch.device("cpu")
        )
        seen = calls_in(probe._stage)
        users = [s for s in batch if s.load(module).num_tokens][:3]
        assert measure(probe, make_group("random", users, module), num_repeats=1).status == "ok"
        assert set(seen) == {1}


def test_a_plan_without_anything_to_train_is_refused():
    with pytest.raises(ConfigError, match="every module is frozen"):
        pieces_of(ONE_RANK, seat_of(ONE_RANK, 0), DEPTHS)
