"""Whether generic stages train a model as transformers does: two steps of a shrunk random copy, module by module.

Samples of different lengths are packed and run through two stages, cut in the middle, and gradients are compared with
those of plain transformers, which sees each sample alone, in float32. Then both take a step of gradient descent, and
the next samples are compared in the same way. Weights are random, so nothing is 0 or 1 by chance.

A module's error is the norm of the difference of its gradients over the norm of transformers' gradients. Gradients
that are rounding alone, as those of keys' biases, are small parts of their module's. Some models amplify rounding to
1e-4 (Gemma 4, with scores that are not scaled): where float32 is over the limit both sides run again in float64, every
cast to float32 lifted. A difference of computation stays what it is there, rounding falls below 1e-11.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from dflop.models.generic import stage as stages
from dflop.models.generic.classes import build, find_decoder
from dflop.models.generic.entry import enter, handed_on, logits_of
from dflop.models.generic.folder import reason
from dflop.models.generic.pictures import NotMade, media_of, with_item
from dflop.models.generic.shrink import VOCAB, shrunk
from dflop.models.generic.stage import Stage, UnknownArgument
from dflop.models.generic.values import Structure

LIMIT = 1e-5
"""Relative error of a module's gradients up to which it counts as exact."""
FLOAT64_LIMIT = 1e-9
LENGTHS = ((21, 34), (40, 13))
"""Tokens of each step's samples."""
MAX_PARAMS = 80_000_000
_FIRST_ID, _SPREAD, _RATE = 10, 0.05, 0.01
_FLOOR = 1e-6
"""Of the largest gradient's norm: a module with less has no gradient but rounding."""


@dataclass(frozen=True, slots=True)
class MediumCheck:
    """What a check of samples of one kind found."""

    medium: str
    """`text`, or the medium that every sample has an item of."""
    errors: tuple[tuple[str, float], ...]
    """(module, relative error of its gradients), the larger one of both steps, worst first; empty: not checked."""
    problem: str = ""
    """Why it was not checked, or what was refused."""
    float64_error: float | None = None
    """The largest error in float64; None where float32 was within the limit."""

    @property
    def error(self) -> float | None:
        """The largest error in float32."""
        return self.errors[0][1] if self.errors else None

    @property
    def is_exact(self) -> bool:
        """Whether stages compute what transformers does: within `LIMIT`, or apart by rounding alone."""
        is_rounding = self.float64_error is not None and self.float64_error <= FLOAT64_LIMIT
        return self.error is not None and (self.error <= LIMIT or is_rounding)


@dataclass(frozen=True, slots=True)
class Exactness:
    """Of a model: a check of text, and of every medium that it takes."""

    checks: tuple[MediumCheck, ...]
    num_params: int
    """Of the shrunk copy."""

    @property
    def is_exact(self) -> bool:
        """Whether text is exact and nothing that was checked differs."""
        return self.checks[0].is_exact and all(check.is_exact for check in self.checks if check.errors)


def check_exactness(config: Any, structure: Structure) -> Exactness:
    """Compare generic stages with transformers on a shrunk copy.

    Args:
        config: The trained part of a model's; weights are not needed.
        structure: Of `config`.
    """
    stages.register()
    try:
        model, num_params = small_model(config, structure)
    except Exception as error:  # whatever transformers raises for sizes that a class does not expect
        return Exactness((MediumCheck("text", (), f"cannot shrink it: {reason(error)}"),), 0)
    checks = [_checked(model, "text")]
    checks += [_checked(model, medium) for medium in media_of(model)]
    return Exactness(tuple(checks), num_params)


def _checked(model: nn.Module, medium: str) -> MediumCheck:
    try:
        errors, float64_error = compare(model, medium), None
        if errors[0][1] > LIMIT:
            with _Float64():
                float64_error = compare(copy.deepcopy(model).double(), medium)[0][1]
        return MediumCheck(medium, errors, float64_error=float64_error)
    except (NotMade, UnknownArgument) as error:
        return MediumCheck(medium, (), str(error))
    except Exception as error:  # whatever transformers' code makes of a stage
        return MediumCheck(medium, (), reason(error))


def compare(model: nn.Module, medium: str = "text", middle: int | None = None) -> tuple[tuple[str, float], ...]:
    """(module, relative error of its gradients), worst first, of two steps of training.

    Args:
        model: Small, with eager attention; stays as it is.
        medium: Of an item in every sample; `text`: none.
        middle: First layer of the second stage; None: half of the layers each, if none uses another's keys.
    """
    plain = copy.deepcopy(model)
    decoder = find_decoder(model)[1]
    num_layers = len(decoder.layers)
    middle = min(num_layers // 2, stages.last_cut(decoder)) if middle is None else middle
    pair = Stage(copy.deepcopy(model), 0, middle), Stage(copy.deepcopy(model), middle, num_layers)
    errors: dict[str, float] = {}
    for step, lengths in enumerate(LENGTHS):
        made = [_sample(plain, length, medium, seed=10 * step + index) for index, length in enumerate(lengths)]
        samples, media = [ids for ids, _ in made], [of for _, of in made]
        want = _plain_gradients(plain, samples, media)
        got = _stage_gradients(*pair, samples, media)
        for module, error in _errors(want, got).items():
            errors[module] = max(errors.get(module, 0.0), error)
        for owner, gradients in ((plain, want), (pair[0].model, got), (pair[1].model, got)):
            _descend(owner, gradients)
    return tuple(sorted(errors.items(), key=lambda item: -item[1]))


def small_model(config: Any, structure: Structure) -> tuple[nn.Module, int]:
    """(shrunk copy, its parameters), counted before anything is allocated.

    Raises:
        NotMade: the copy is still too large.
    """
    small = shrunk(config, structure)
    num_params = sum(p.numel() for p in build(small, attention="eager").parameters())
    if num_params > MAX_PARAMS:
        raise NotMade(f"its shrunk copy still has {num_params / 1e6:.0f}M parameters: a section keeps its sizes")
    return _random_model(small), num_params


def _random_model(config: Any) -> nn.Module:
    """A model without dropout whose parameters are all random."""
    torch.manual_seed(0)
    model = build(config, device="cpu", dtype=torch.float32, attention="eager").eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * _SPREAD)
    return model


def _sample(model: nn.Module, length: int, medium: str, seed: int) -> tuple[torch.Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST_ID, VOCAB - 10, (length,), generator=generator)
    return (ids, {}) if medium == "text" else with_item(model, ids, medium, generator)


class _Float64(TorchFunctionMode):
    """Whatever casts to float32 inside casts to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if value is torch.float32 else value for value in args]
        named = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **named)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Summed over a sample's tokens: the batch's denominator is the same for both sides."""
    return F.cross_entropy(logits[0, :-1].float(), ids[1:], reduction="sum")


def _plain_gradients(
    model: Any, samples: Sequence[torch.Tensor], media: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    model.zero_grad()
    for ids, arguments in zip(samples, media, strict=True):
        mask = torch.ones_like(ids)[None]
        _loss(model(input_ids=ids[None], attention_mask=mask, use_cache=False, **arguments).logits, ids).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _stage_gradients(
    first: Stage, second: Stage, samples: Sequence[torch.Tensor], media: Sequence[Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """Of both stages, summed where both have a parameter; between them tensors travel as messages would."""
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hand(tensor: torch.Tensor) -> torch.Tensor:
        sent.append((tensor, tensor.detach().requires_grad_()))
        return sent[-1][1]

    for part in (first, second):
        part.model.zero_grad()
    packing, inputs = enter(first.model, samples, media)
    hidden = first.forward(inputs["inputs_embeds"], packing, inputs)
    out = second.forward(hand(hidden), packing, handed_on(inputs, hand))
    logits = logits_of(second.model, out).split(packing.lengths, dim=1)
    torch.stack([_loss(part, ids) for part, ids in zip(logits, samples, strict=True)]).sum().backward()
    back = [(root, leaf.grad) for root, leaf in sent if leaf.grad is not None and root.requires_grad]
    torch.autograd.backward([root for root, _ in back], [gradient for _, gradient in back])
    found: dict[str, torch.Tensor] = {}
    for part in (first, second):
        for name, p in part.model.named_parameters():
            if p.grad is not None:
                found[name] = found[name] + p.grad if name in found else p.grad.clone()
    return found


def _errors(want: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> dict[str, float]:
    difference: dict[str, float] = {}
    size: dict[str, float] = {}
    for name in {**want, **got}:
        a, b = want.get(name), got.get(name)
        both = a if b is None else b if a is None else a - b
        assert both is not None
        module = module_of(name)
        difference[module] = difference.get(module, 0.0) + float(both.square().sum())
        size[module] = size.get(module, 0.0) + (0.0 if a is None else float(a.square().sum()))
    floor = _FLOOR * max(size.values()) ** 0.5
    return {module: difference[module] ** 0.5 / max(size[module] ** 0.5, floor) for module in size}


def module_of(name: str) -> str:
    """The part of a layer that a parameter belongs to, `...layers.3.self_attn`; outside of layers the module."""
    parts = name.split(".")[:-1]
    last = max((index for index, part in enumerate(parts) if part.isdigit()), default=len(parts))
    return ".".join(parts[: last + 2]) or name


def _descend(model: nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
    """One step of gradient descent, whose length does not depend on the number of tokens."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in gradients:
                p.sub_(gradients[name] * (_RATE / norm))
