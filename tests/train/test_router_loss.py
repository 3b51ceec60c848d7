"""The routers' loss over a global batch: gradients and value equal those of one process that sees all of its tokens."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

from dflop.models.generic.classes import find_decoder
from dflop.models.generic.routers import routers_of
from dflop.train.checkpoint import Checkpointer
from dflop.train.loop import Hooks
from dflop.train.plan_source import PlanMessage
from dflop.train.router_loss import router_loss_of
from tests.models.generic.small import Small
from tests.train.parity import ROUTER_LOSS, TOLERANCE, Step, Trial, assert_equal_steps, descend, exact_on, run_trial
from tests.train.rank import Rank, loop_settings
from tests.train.synthetic import make_step_plan
from tests.train.test_parity_generic import CARRY_STATE, ROUNDING, plan_of

COEFFICIENT = 0.5
Shares = list[torch.Tensor]


class Routed:
    """What the routers of a plain model gave since they were asked, by layer."""

    def __init__(self, plain: torch.nn.Module, is_sigmoid: bool) -> None:
        self._is_sigmoid = is_sigmoid
        gates = [layer.mlp.gate for layer in find_decoder(plain)[1].layers if hasattr(layer.mlp, "gate")]
        self._given: list[list[Any]] = [[] for _ in gates]
        for gate, given in zip(gates, self._given, strict=True):
            gate.register_forward_hook(lambda _module, _args, out, given=given: given.append(out))

    def take(self) -> tuple[list[torch.Tensor], Shares]:
        """Mean probabilities of all tokens, and shares of experts, by layer."""
        means, shares = [], []
        for given in self._given:
            logits = torch.cat([out[0] for out in given])
            scores = logits.sigmoid() if self._is_sigmoid else logits.softmax(-1)
            means.append((scores / scores.sum(-1, keepdim=True)).mean(0))
            shares.append(torch.cat([out[2] for out in given]).flatten().bincount(minlength=4) / (2 * len(logits)))
            given.clear()
        return means, shares


def loss_of(means: list[torch.Tensor], shares: Shares) -> torch.Tensor:
    return torch.stack([4 * f @ p for f, p in zip(shares, means, strict=True)]).mean()


@cache
def reference(subject: Small, coefficient: float = COEFFICIENT, bad: tuple[int, ...] = ()) -> list[Step]:
    """Steps of plain transformers on whole batches, the loss of the routers by shares of the step before."""
    exact_on("cpu")
    plain = subject.plain()
    routed, shares, steps = Routed(plain, subject.kind == "glm4v_moe"), None, []
    for batch in subject.batches:
        kept = [n for n in range(len(batch)) if n not in bad]
        loss = sum(subject.loss_sum(plain, batch, n) for n in kept) / sum(batch[n].num_supervised_tokens for n in kept)
        means, own = routed.take()
        before, shares = shares or [torch.full_like(f, 0.25) for f in own], own
        (loss + coefficient * loss_of(means, before)).backward()
        gradients = {n: p.grad.clone() for n, p in plain.named_parameters() if p.grad is not None}
        norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
        steps.append((float(loss.detach()), norm, gradients | {ROUTER_LOSS: loss_of(means, own).detach()}))
        descend(plain.parameters(), subject)
        plain.zero_grad()
    return steps


def trial(subject: Small, layout: str, **options: Any) -> Trial:
    plan = plan_of(subject, layout)
    plans = tuple(make_step_plan(plan, b, step, text_only_slot=False) for step, b in enumerate(subject.batches))
    return Trial(subject, plan, plans, **{"router_loss": COEFFICIENT} | options)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_vl_moe", "vision + llm pp2"), ("qwen3_vl_moe", "pp2 dp2 ep2, sharded, recomputed"),
        ("qwen3_vl_moe", "tp2 cp2"), ("qwen3_5_moe", "pp2, recomputed"), ("qwen3_5_moe", "dp2 ep2, sharded"),
        ("glm4v_moe", "tp2"), ("glm4v_moe", "dp2"),
    ],
)  # fmt: skip
def test_gradients_and_value_equal_one_process_with_the_whole_batch(kind, layout, tmp_path):
    subject = Small(kind)
    tolerance = ROUNDING if kind in CARRY_STATE else TOLERANCE
    assert_equal_steps(run_trial(trial(subject, layout), tmp_path), reference(subject), tolerance)


def test_tokens_of_skipped_samples_do_not_count(tmp_path):
    subject, bad = Small("qwen3_vl_moe"), (0, 3)
    steps = run_trial(trial(subject, "dp2, sharded", bad_positions=bad), tmp_path)
    assert_equal_steps(steps, reference(subject, bad=bad))


def test_the_first_step_has_the_gradients_of_no_loss_and_the_second_has_not():
    subject = Small("qwen3_vl_moe")
    (_, first, _), (_, _, of) = reference(subject)
    (_, plain, _), (_, _, without) = reference(subject, 0.0)
    assert first == pytest.approx(plain, rel=1e-6)
    gates = [name for name in of if name.endswith("gate.weight")]
    assert all((of[n] - without[n]).norm() > 1e-3 * without[n].norm() for n in gates)


class SamePlan:
    """The same batch in every step; step `ends_at` never comes."""

    def __init__(self, subject: Small, plan: Any, ends_at: int | None) -> None:
        self._subject, self._plan, self._ends_at = subject, plan, ends_at

    def get(self, step: int) -> PlanMessage:
        if step == self._ends_at:
            raise ConnectionError("the job was killed")
        return PlanMessage.of(make_step_plan(self._plan, self._subject.batches[0], step, text_only_slot=False), {})


def losses(folder: Path, ends_at: int | None = None) -> dict[int, tuple[float, float]]:
    """(gradient norm, loss of routers) by step of a job in the folder, killed in front of a step."""
    subject, found = Small("qwen3_vl_moe"), {}
    plan = plan_of(subject, "one")
    it = Rank(0, plan, subject.family, subject.build(), router_loss=COEFFICIENT)
    trainer = it.trainer(
        loop_settings("run", 4, 0.01, checkpoint_every=2), subject.source([]), SamePlan(subject, plan, ends_at),
        Hooks(lambda seen: found.update({seen.step: (seen.grad_norm, it.router_loss.value)}), lambda *bad: None),
        checkpointer=Checkpointer(folder, it.stages, it.optimizer, it.groups, {}, keep=2),
    )  # fmt: skip
    with contextlib.suppress(ConnectionError):
        trainer.run()
    assert trainer.checkpointer is not None
    trainer.checkpointer.close()
    return found


def test_a_resumed_job_has_the_gradients_of_an_uninterrupted_one(one_rank, tmp_path):
    straight, first, rest = losses(tmp_path / "a"), losses(tmp_path / "b", 2), losses(tmp_path / "b")
    assert (list(first), list(rest)) == ([0, 1], [2, 3])
    assert first | rest == straight


def test_the_loss_that_the_models_config_asks_for_is_as_large_as_that_of_transformers():
    subject = Small("qwen3_vl_moe")
    model: Any = subject.build()
    text = model.config.text_config
    text.output_router_logits, text.router_aux_loss_coef = True, 0.25
    (router, *_) = routers_of(find_decoder(model)[1].layers[:1], 64).values()
    logits = torch.randn(50, 4)
    means, chosen = router.scores(logits).mean(0), logits.topk(2).indices
    mean = loss_of([means], [chosen.flatten().bincount(minlength=4) / 100])
    theirs = load_balancing_loss_func((logits,), 4, 2)
    of = router_loss_of(model, subject.family, None)
    assert float(theirs) == pytest.approx(2 * float(mean), rel=1e-5)
    assert of.note == "router loss: coefficient 0.5, 4 layers with experts"


def test_a_model_whose_routers_do_not_train_has_no_loss_of_routers_and_a_note():
    subject = Small("qwen3_vl_moe")
    of = router_loss_of(subject.build(), subject.family, 0.1, ("llm",))
    assert not of
    assert of.note == "router loss: off, as the routers of `llm` do not train"
    assert not router_loss_of(subject.build(), subject.family, None).note
