"""The load balancing loss of layers with experts over the global batch, whatever the layout (arXiv 2101.03961, eq. 4).

A layer's loss is `experts * sum_i f_i P_i`: f_i is the share of (token, chosen expert) pairs that went to expert i, P_i
the mean of the router's probabilities over the tokens of the global batch. It is 1 where experts are used evenly; the
model's is the mean over its layers. f has no gradient, and P is a sum over tokens: once f is known every microbatch
adds its part of the gradient alone. The f of a step is known when its last forward pass has run, after 1F1B has run
backward passes, so gradients take that of the step before, which is the same for every layout and packing; the first
step takes even shares, of which the gradient is zero. Checkpoints keep it.

Tokens of skipped samples and of fillers do not count. One all-reduce per step sums what ranks have counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dflop.errors import ConfigError, TrainError
from dflop.models.autograd import applied, in_backward
from dflop.models.build import located
from dflop.models.family import Family
from dflop.models.generic.packed import samples_of
from dflop.models.generic.routers import Router, routers_of
from dflop.models.generic.stage_rules import router_loss_asked
from dflop.models.weights import build_empty
from dflop.records import LLM, StepPlan
from dflop.train.inputs import SampleSource

SHARES = "expert_tokens"
"""Key in what a checkpoint keeps."""


class RouterLoss:
    """The loss of all layers, of which a rank watches its own; one without routers does nothing.

    Args:
        routers: By layer, the same on every rank.
        coefficients: By layer, of its loss in the gradient.
    """

    def __init__(
        self, routers: Mapping[int, Router] | None = None, coefficients: Mapping[int, float] | None = None
    ) -> None:
        self._routers, self._coefficients = dict(routers or {}), dict(coefficients or {})
        self.note = ""
        """What a job's log says of the loss; empty: it is off."""
        self._pairs = {index: [1] * router.num_experts for index, router in self._routers.items()}
        """Tokens that went to each expert in the step before, by layer."""
        self._seen: dict[int, torch.Tensor] = {}
        """`[2, experts]` by layer of this rank: tokens, and sums of probabilities, of this step."""
        self._share: dict[int, torch.Tensor] = {}
        self.num_tokens = self.num_samples = 0
        """Tokens and samples that count in the step."""
        self.value = math.nan
        """Loss of the last step, without a coefficient, with the shares of that step itself."""

    def __bool__(self) -> bool:
        return bool(self._routers)

    def watch(self, layers: Mapping[int, nn.Module]) -> None:
        """Let the routers of a rank's layers add their loss to gradients.

        Args:
            layers: As they run, by index in the decoder.
        """
        for index in layers.keys() & self._routers.keys():
            router = self._routers[index]
            self._seen[index] = torch.zeros(2, router.num_experts, dtype=torch.float64)
            layers[index].get_submodule(router.path).register_forward_hook(self._hook(index))

    def begin(self, step_plan: StepPlan, healthy: torch.Tensor, source: SampleSource) -> None:
        """Begin a step.

        Args:
            step_plan: Of the global batch.
            healthy: Which of its samples count, bool `[global batch]`.
            source: Knows how many tokens they have.
        """
        if not self:
            return
        kept = [n for n, good in zip(step_plan.sample_index, healthy.tolist(), strict=True) if good]
        self.num_tokens = sum(source.shape(index).num_llm_tokens for index in kept)
        self.num_samples = len(kept)
        for index, seen in self._seen.items():
            seen.zero_()
            pairs = torch.tensor(self._pairs[index], dtype=torch.float64)
            self._share[index] = (pairs / pairs.sum()).to(seen.device)

    def end(self, group: dist.ProcessGroup) -> None:
        """Sum up a step, for its value and for the next one's gradients; collective.

        Args:
            group: All ranks, on the host.
        """
        if not self:
            return
        sizes = {index: router.num_experts for index, router in self._routers.items()}
        whole = torch.zeros(2, sum(sizes.values()), dtype=torch.float64)
        by_layer = dict(zip(sizes, whole.split([*sizes.values()], dim=1), strict=True))
        for index, seen in self._seen.items():
            by_layer[index].copy_(seen)
        dist.all_reduce(whole, group=group)
        self.value = math.nan
        if self.num_tokens:
            self._pairs = {index: pairs.long().tolist() for index, (pairs, _) in by_layer.items()}
            losses = [len(f) * f @ p / (f.sum() * self.num_tokens) for f, p in by_layer.values()]
            self.value = float(torch.stack(losses).mean())

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON."""
        return {SHARES: {str(index): pairs for index, pairs in self._pairs.items()}} if self else {}

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Go on from what `state` returned; without it with even shares, as a first step does."""
        known = kept.get(SHARES, {})
        self._pairs = {index: known.get(str(index), pairs) for index, pairs in self._pairs.items()}

    def _hook(self, index: int) -> Any:
        router = self._routers[index]

        def add(module: nn.Module, _given: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            samples = samples_of(module)
            if not torch.is_grad_enabled() or samples is None or samples.counted is None:
                return None
            logits, weights, chosen, *others = out
            counted = samples.counted.to(torch.promote_types(logits.dtype, torch.float32))
            if len(counted) != len(logits):
                raise TrainError(
                    f"the router of layer {index} was given {len(logits)} tokens, this rank has {len(counted)}",
                    where="train.router_loss", hint="0: this class routes in a way that is not known",
                )  # fmt: skip
            scores = router.scores(logits)
            if not in_backward():  # a layer that runs again has been counted
                self._count(index, chosen, counted, scores.detach())
            factor = self._coefficients[index] * router.num_experts / (len(self._routers) * max(self.num_tokens, 1))
            share = self._share[index].to(scores)
            return logits, applied(_WithLoss, weights, counted @ (scores @ share) * factor), chosen, *others

        return add

    def _count(self, index: int, chosen: torch.Tensor, counted: torch.Tensor, scores: torch.Tensor) -> None:
        seen = self._seen[index] = self._seen[index].to(chosen.device)
        seen[0].scatter_add_(0, chosen.flatten(), counted.to(seen.dtype).repeat_interleave(chosen.shape[-1]))
        seen[1] += counted @ scores


class _WithLoss(torch.autograd.Function):
    """The identity of a tensor, whose backward pass is that of a loss, too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.one = torch.ones_like(loss)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grad, ctx.one


def router_loss_of(model: nn.Module, family: Family, wanted: float | None, frozen: Collection[str] = ()) -> RouterLoss:
    """The loss of a model, the same on every rank; none where no router trains.

    Args:
        model: Whole, before it is cut; it may be empty.
        family: Of the model.
        wanted: Coefficient of the mean over layers. None: what the model's config asks for, times the experts of a
            token, as transformers' loss is that many times as large.
        frozen: Modules that do not train.

    Raises:
        ConfigError: a coefficient is wanted, and the model has no experts, or the probabilities of a router cannot be
            read.
    """
    decoder: Any = model.get_submodule(located(model, family.decoder.path))
    if not (coefficient := router_loss_asked(decoder.config) if wanted is None else wanted):
        return RouterLoss()
    routers = routers_of(decoder.layers, int(decoder.config.hidden_size))
    if not routers:
        what = f"train.router_loss is {coefficient:g}, and no layer of {type(decoder).__name__} has experts"
        raise ConfigError(what, where="train.router_loss", hint="0")
    gates = {index: decoder.layers[index].get_submodule(router.path) for index, router in routers.items()}
    if LLM in frozen or not all(p.requires_grad for gate in gates.values() for p in gate.parameters()):
        found = RouterLoss()
        found.note = f"router loss: off, as the routers of `{LLM}` do not train"
        return found
    each = {i: coefficient * (r.num_active if wanted is None else 1) for i, r in routers.items()}
    found = RouterLoss(routers, each)
    found.note = f"router loss: coefficient {max(each.values()):g}, {len(each)} layers with experts"
    return found


def check_router_loss(family: Family, wanted: float) -> None:
    """Refuse a coefficient for a model that is not built yet; takes seconds, as it is built without memory.

    Args:
        family: Of the model.
        wanted: As for `router_loss_of`.

    Raises:
        ConfigError: as `router_loss_of`.
    """
    router_loss_of(build_empty(family, family.hf_config, torch.float32), family, wanted)
