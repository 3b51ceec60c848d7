"""Adapters train as those of `peft` do, whatever the layout; their base stays as it is, and no checkpoint holds it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dflop.errors import TrainError
from dflop.models.lora import add_adapters
from dflop.records import LLM
from dflop.train.base import Base
from dflop.train.checkpoint import Checkpointer
from dflop.train.checkpoint_state import read_model
from tests.train.adapted import ATTENTION, EVERY, PEFT, peft_reference, with_adapters
from tests.train.layouts import ENDS, MIXED, ONE, Layout
from tests.train.parity import assert_equal_steps, run_trial
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import ALL

CASES = {
    "inline dp2, ZeRO-1": (Layout(ONE, dp=2), ((LLM, ATTENTION),)),
    "inline dp2, sharded": (Layout(ONE, dp=2, sharded=ALL), ((LLM, EVERY), ("vision", EVERY))),
    "inline tp2 dp2": (Layout(({"vision": 2, LLM: 4},), tp=2, dp=2), ((LLM, EVERY), ("vision", EVERY))),
    "vision + llm pp2, tied, recomputed": (
        Layout({"vision": (1, 1), LLM: (2, 1)}, tied=True, recompute=(LLM,), frozen=("vision",)),
        ((LLM, EVERY),),
    ),
}
OTHER_CASES = {
    "inline pp2 dp2, projectors train": (
        Layout(MIXED, dp=2, frozen=("vision.tower", "audio.tower")), ((LLM, ("*.self_attn.*", "down_proj")),)
    ),
    "inline pp2 dp2, sharded, tied ends": (Layout(ENDS, dp=2, sharded=ALL, tied=True), ((LLM, EVERY),)),
    "inline dp4, sharded in twos": (Layout(ONE, dp=4, sharded=2), ((LLM, EVERY),)),
    "vision dp2 + llm dp2, sharded": (Layout({"vision": (1, 2), LLM: (1, 2)}, sharded=ALL), ((LLM, ATTENTION),)),
    "inline dp2 cp2, sharded": (
        Layout(({"vision": 2, LLM: 4},), dp=2, cp=2, sharded=ALL), ((LLM, EVERY), ("vision", EVERY))
    ),
    "inline dp2, sharded, recomputed": (
        Layout(ONE, dp=2, sharded=ALL, recompute=("vision", LLM)), ((LLM, EVERY), ("vision", ("*.blocks.1.attn.*",)))
    ),
    "inline dp2, sharded, a tower frozen": (
        Layout(ONE, dp=2, sharded=ALL, frozen=("vision.tower",)), ((LLM, ATTENTION),)
    ),
    "inline tp2 dp2, sharded, limited": (
        Layout(({"vision": 2, LLM: 4},), tp=2, dp=2, sharded=ALL, limited=True), ((LLM, EVERY),)
    ),
    "inline cp3, audio": (Layout(ONE, cp=3), ((LLM, EVERY), ("audio", EVERY))),
    "inline dp2, recomputed, on the host": (
        Layout(ONE, dp=2, recompute=("vision", LLM), half=True, offloaded=True), ((LLM, EVERY), ("vision", EVERY))
    ),
    "vision tp2 + llm dp2": (Layout({"vision": (1, 1, 2), LLM: (1, 2)}), ((LLM, ATTENTION), ("vision", EVERY))),
}  # fmt: skip

needs_peft = pytest.mark.skipif(not PEFT.is_dir(), reason="peft is not there: make references")


@needs_peft
@pytest.mark.parametrize(
    "name", [*CASES, *(pytest.param(name, marks=pytest.mark.lane("layouts")) for name in OTHER_CASES)]
)
def test_gradients_equal_peft(name, tmp_path):
    layout, targets = (CASES | OTHER_CASES)[name]
    trial = with_adapters(layout, *targets)
    assert_equal_steps(run_trial(trial, tmp_path), peft_reference(trial.subject, layout.frozen))


def hold(rank, folder, trial):
    """After a step in 16 bit: what a rank holds, which part of what that is, what its optimizer has states of."""
    subject, model = trial.subject, trial.subject.build().bfloat16()
    it = Rank(rank, trial.plan, subject.family, model)
    (batch, *_), (step_plan, *_) = subject.batches, trial.step_plans
    it.update(it.step(subject.source(batch), batch, step_plan), 0.1, 1.0)
    return {n: p.detach() for n, p in it.names.items()}, it.parts, set(it.optimizer.state())


def test_a_base_is_shared_out_in_the_models_type_and_what_trains_in_float32(tmp_path):
    trial = with_adapters(Layout(({"vision": 2, LLM: 4},), dp=2, sharded=ALL), (LLM, EVERY), ("vision", EVERY))
    subject = trial.subject
    adapters = add_adapters(subject.bare(), subject.family, subject.lora)
    before = dict(subject.build().bfloat16().named_parameters())
    for held, parts, states in run_ranks(hold, 2, tmp_path, trial):
        names = held.keys() & adapters.base
        assert states == held.keys() - names == held.keys() & adapters.shapes.keys()
        for name, p in held.items():
            ((first, end),) = parts[name].ranges
            assert len(p) == end - first <= -(-len(before[name]) // 2)
            assert p.dtype == (torch.bfloat16 if name in names else torch.float32)
            assert torch.equal(p, before[name][first:end]) == (name in names)


def drop(rank, folder, trial):
    """(loss of forward passes alone, loss of a step, gradients of every A)."""
    torch.set_num_threads(1)
    subject, (batch, *_), (step_plan, *_) = trial.subject, trial.subject.batches, trial.step_plans
    it, source = Rank(rank, trial.plan, subject.family, subject.build()), subject.source(batch)
    whole = it.reducer.totals(it.step(source, batch, step_plan, is_training=False).loss)[1]
    torch.manual_seed(5)
    _, loss = it.reduce(it.step(source, batch, step_plan))
    return whole, loss, {n: p.grad for n, p in it.names.items() if "lora_A" in n}


def test_layers_that_run_again_and_tensor_parallel_ranks_drop_the_same_and_evaluation_drops_nothing(tmp_path):
    modules = ({"vision": 2, LLM: 4},)
    targets = ((LLM, ("v_proj", "gate_proj", "up_proj")), ("vision", ("q", "gate_proj")))
    tensor = Layout(modules, tp=2)
    trial, plain = (with_adapters(tensor, *targets, dropout=share) for share in (0.5, 0.0))
    found = []
    for number, layout in enumerate((Layout(modules), Layout(modules, recompute=("vision", LLM)), tensor)):
        folder = tmp_path / str(number)
        folder.mkdir()
        how = {"plan": layout.plan, "step_plans": layout.trial.step_plans}
        found += run_ranks(drop, layout.plan.num_processes, folder, replace(trial, **how))
    ((without, _, _),) = run_ranks(drop, 1, tmp_path, replace(plain, plan=Layout(modules).plan))
    (_, loss, gradients), *others = found
    assert loss != pytest.approx(without, rel=1e-4)
    assert [whole for whole, *_ in found] == [pytest.approx(without, rel=1e-5)] * len(found)
    for _, other_loss, of in others:
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert of.keys() == gradients.keys()
        for name, gradient in of.items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=1e-5, msg=name)


SAVED = with_adapters(Layout(({"vision": 2, LLM: 4},), tp=2, dp=2, sharded=ALL, frozen=("vision",)), (LLM, EVERY))
OTHER_PLAN = Layout({"vision": (1, 1), LLM: (2, 1)}).plan


def make_rank(rank, folder, trial, *, is_fresh):
    """(rank, names of its base, checkpointer); `is_fresh`: adapters begin with other values."""
    subject = trial.subject
    model, names = subject.build(), add_adapters(subject.bare(), subject.family, subject.lora).base
    if is_fresh:
        for name, p in model.named_parameters():
            p.data *= 1 if name in names else 0.5
    it = Rank(rank, trial.plan, subject.family, model, frozen=trial.frozen, rate=0.1, weight_decay=0.1)
    base = Base(names, folder / "base")
    checkpoints = folder / "checkpoints"
    return it, names, Checkpointer(checkpoints, it.stages, it.optimizer, it.groups, it.parts, keep=2, base=base)


def train_and_save(rank, folder, trial):
    """Whether its base is what it was after two steps, and how far its adapters have moved."""
    torch.set_num_threads(1)
    it, names, checkpointer = make_rank(rank, folder, trial, is_fresh=False)
    before = {name: p.detach().clone() for name, p in it.names.items()}
    for batch, step_plan in zip(trial.subject.batches, trial.step_plans, strict=True):
        it.update(it.step(trial.subject.source(batch), batch, step_plan), 0.1, 1.0)
    checkpointer.save(2, {"plan_id": "p"})
    checkpointer.wait()
    moved = {name: float((p.detach() - before[name]).abs().max()) for name, p in it.names.items()}
    return {n: m for n, m in moved.items() if n in names}, {n: m for n, m in moved.items() if "lora" in n}


def resume(rank, folder, trial):
    """Adapters as they are loaded, or why they are not."""
    torch.set_num_threads(1)
    it, _, checkpointer = make_rank(rank, folder, trial, is_fresh=True)
    try:
        checkpointer.load_latest()
    except TrainError as error:
        return error
    return {name: p.detach() for name, p in it.names.items() if "lora" in name}


def test_checkpoints_hold_adapters_alone_and_go_on_with_their_own_base_only(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(bytes(range(256)))
    for of_base, of_adapters in run_ranks(train_and_save, 4, tmp_path, SAVED):
        assert of_base
        assert set(of_base.values()) == {0.0}
        assert of_adapters
        assert min(of_adapters.values()) > 0
    (checkpoint,) = (tmp_path / "checkpoints").glob("step-*")
    saved = read_model(checkpoint)
    vision = {name for name in saved if "lora" not in name}
    assert all(".visual." in f".{name}" for name in vision), (
        "what is frozen in a stage of training may train in another"
    )
    loaded = {}
    for of_rank in run_ranks(resume, 3, tmp_path, replace(SAVED, plan=OTHER_PLAN)):
        loaded |= of_rank
    assert loaded.keys() == saved.keys() - vision
    assert all(torch.equal(saved[name], p) for name, p in loaded.items())
    base.rename(tmp_path / "moved")
    base.mkdir()
    content = bytearray((tmp_path / "moved" / "model.safetensors").read_bytes())
    content[200] ^= 1
    (base / "model.safetensors").write_bytes(content)
    for error in run_ranks(resume, 3, tmp_path, replace(SAVED, plan=OTHER_PLAN)):
        assert "trained with another base" in error.what
        assert str(base) in error.what
