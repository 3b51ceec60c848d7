"""Whether stages train a model as transformers does: two steps of a shrunk random copy, module by module.

Samples of different lengths are packed and run through the stages that training runs: encoders, and two of the decoder,
cut in the middle. Gradients are compared with those of plain transformers, which sees each sample alone, in float32.
Then both take a step of gradient descent, and the next samples are compared in the same way. Weights are random, so
nothing is 0 or 1 by chance.

A module's error is the norm of the difference of its gradients over the norm of transformers' gradients. Gradients
that are rounding alone, as those of keys' biases, are small parts of their module's. Some models amplify rounding to
1e-4 (Gemma 4, with scores that are not scaled): where float32 is over the limit both sides run again in float64, every
cast to float32 lifted. A difference of computation stays what it is there, rounding falls below 1e-11.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.build import EncoderStage, Stage
from dflop.models.fusing import Float64
from dflop.models.generic import arrays, items
from dflop.models.generic.classes import MARKS, build, construct, encoder_function, find_decoder, takes
from dflop.models.generic.exactness import LIMIT, Exactness, MediumCheck
from dflop.models.generic.folder import reason
from dflop.models.generic.llm_stage import KINDS, LlmStage, MediaPosition
from dflop.models.generic.media_processor import MediaProcessor
from dflop.models.generic.processed_items import processed_item, small_processor
from dflop.models.generic.random_items import Item, NotMade, as_type, item_of, media_of
from dflop.models.generic.reach import UnknownArgument
from dflop.models.generic.shrink import VOCAB, shrunk
from dflop.models.generic.specs import places_of
from dflop.models.generic.stage_rules import last_cut
from dflop.models.generic.structure import read_structure
from dflop.models.generic.values import Structure

LENGTHS = ((21, 34), (40, 13))
"""Tokens of each step's samples."""
MAX_PARAMS = 80_000_000
_FIRST_ID, _SPREAD, _RATE = 10, 0.05, 0.01
_BEFORE = 5
"""Tokens in front of the item."""
_FLOOR = 1e-6
"""Share of the largest gradient's norm below which a module has no gradient but rounding."""


def check_exactness(config: Any, structure: Structure, processor: MediaProcessor | None = None) -> Exactness:
    """Compare stages with transformers on a shrunk copy.

    Args:
        config: The trained part of a model's; weights are not needed.
        structure: Of `config`.
        processor: Of the model; None, or where the copy does not take what it makes: random tensors.
    """
    try:
        model, num_params = small_model(config, structure)
        processor = small_processor(processor, config, model.config) if processor else None
    except Exception as error:  # whatever transformers raises for sizes that a class does not expect
        return Exactness((MediumCheck("text", (), f"cannot shrink it: {reason(error)}"),), 0)
    media = dict.fromkeys(("text", *media_of(model), *(processor.kinds if processor else ())))
    return Exactness(tuple(_checked(model, medium, processor) for medium in media), num_params)


def _checked(model: nn.Module, medium: str, processor: MediaProcessor | None = None) -> MediumCheck:
    refused = ""
    if medium != "text" and encoder_function(model, medium) is encoder_function(model.base_model, medium) is None:
        return MediumCheck(medium, (), f"{type(model).__name__} has no `get_{medium}_features` to compare rows of")
    if processor and medium != "text":
        try:
            processed_item(model, medium, processor, torch.Generator())
        except Exception as error:  # whatever comes of a processor whose sizes do not shrink as the model's
            processor, refused = None, f"; of its processor's: {reason(error)}"
    check = _tried(model, medium, 1, processor)
    if medium == "video" and not check.errors:  # frames whose timestamps stand between them
        apart = _tried(model, medium, 2, processor)
        check = apart if apart.errors else check
    return check if check.errors else replace(check, problem=check.problem + refused)


def _tried(model: nn.Module, medium: str, num_runs: int, processor: MediaProcessor | None) -> MediumCheck:
    try:
        errors, float64_error = compare(model, medium, None, num_runs, processor), None
        if errors[0][1] > LIMIT:
            float64_error = compare(copy.deepcopy(model).double(), medium, None, num_runs, processor)[0][1]
        return MediumCheck(medium, errors, float64_error=float64_error)
    except ConfigError as error:
        return MediumCheck(medium, (), error.what)
    except (NotMade, UnknownArgument) as error:
        return MediumCheck(medium, (), str(error))
    except Exception as error:  # whatever transformers' code makes of a stage
        return MediumCheck(medium, (), reason(error))


def compare(
    model: nn.Module, medium: str = "text", middle: int | None = None, num_runs: int = 1,
    processor: MediaProcessor | None = None,
) -> tuple[tuple[str, float], ...]:  # fmt: skip
    """(module, relative error of its gradients), worst first, of two steps of training.

    Args:
        model: Small, with eager attention; stays as it is.
        medium: Of an item in every sample; `text`: none.
        middle: First layer of the second stage; None: half of the layers each, if the decoder can be cut there.
        num_runs: In which an item's placeholders stand.
        processor: That makes items, of the small model; None: they are random tensors.
    """
    plain = copy.deepcopy(model)
    made = [
        [_sample(plain, n, medium, num_runs, processor, seed=10 * step + index) for index, n in enumerate(lengths)]
        for step, lengths in enumerate(LENGTHS)
    ]
    is_double = next(plain.parameters()).dtype == torch.float64
    trained = _Trained(plain, made[0][0].item, middle)
    errors: dict[str, float] = {}
    for samples in made:
        with Float64() if is_double else contextlib.nullcontext():
            want, got = _plain_gradients(plain, samples), trained.gradients(samples)
        for module, error in _errors(want, got).items():
            errors[module] = max(errors.get(module, 0.0), error)
        _descend(dict(plain.named_parameters()), want)
        for stage in trained.stages:
            _descend(stage.names, got)
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


@dataclass(frozen=True, slots=True)
class _Sample:
    """Tokens, and an item whose placeholders are among them."""

    ids: torch.Tensor
    item: Item | None

    @property
    def places(self) -> torch.Tensor:
        """Indices of the placeholders."""
        assert self.item is not None, "a text has none"
        return torch.nonzero(self.ids == self.item.token).flatten()


def _sample(
    model: nn.Module, length: int, medium: str, num_runs: int, processor: MediaProcessor | None, seed: int
) -> _Sample:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(_FIRST_ID, VOCAB - 10, (length,), generator=generator)
    if medium == "text":
        return _Sample(ids, None)
    item = processed_item(model, medium, processor, generator) if processor else item_of(model, medium, generator)
    runs = torch.full((item.num_rows,), item.token).chunk(num_runs)
    parts = [part for n, run in enumerate(runs) for part in (ids[:_BEFORE] if n == 0 else ids[:1], run)]
    return _Sample(torch.cat([*parts, ids[_BEFORE:]]), item)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Summed over a sample's tokens: the batch's denominator is the same for both sides."""
    return F.cross_entropy(logits[0, :-1].float(), ids[1:], reduction="sum")


def _plain_gradients(model: Any, samples: Sequence[_Sample]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    for of in samples:
        ids, given = of.ids[None], {}
        if of.item is not None:
            mark = (ids == of.item.token).long() * (of.item.mark or KINDS.index(of.item.kind) + 1)
            made = as_type(of.item.made, dtype)
            given = {**made, **{name: mark for name in MARKS if takes(model, name)}}
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
        _loss(logits, of.ids).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


class _Trained:
    """A model cut into stages as training cuts it.

    Args:
        plain: Whose weights they take.
        item: Of the kind that samples have; None: they have none.
        middle: First layer of the second stage of the decoder; None: as for `compare`.

    Raises:
        ConfigError: no stages can be made of it.
        UnknownArgument: its layers see keys by an unknown rule.
    """

    def __init__(self, plain: Any, item: Item | None, middle: int | None) -> None:
        attention.register()
        structure = read_structure(plain.config)
        encoder = structure.encoder_of(item.kind) if item else None
        if item is not None and encoder is None:
            raise NotMade(f"no encoder is known for {item.kind}")
        self._form, apart = arrays.PARTS, set[str]()
        if item is not None and encoder is not None:
            shell = plain.get_submodule(encoder.path.rpartition(".")[0])
            self._form = items.form_of_item(shell, item.kind, item.made)
            apart = {encoder.medium} if self._form == arrays.PARTS else set()
        places = places_of(structure, apart)
        num_layers, deep = structure.num_layers, places.decoder.num_deep_features
        latest = last_cut(find_decoder(plain)[1])
        middle = min(max(num_layers // 2, deep), latest) if middle is None else middle
        model = _as_trained(plain)
        self._encoder = EncoderStage(model, places.towers[encoder.medium]) if encoder else None
        cuts = [(0, middle), (middle, num_layers)] if 0 < middle < num_layers else [(0, num_layers)]
        self._first = LlmStage(model, places, cuts[0])
        self._last = LlmStage(_as_trained(plain), places, cuts[1]) if cuts[1:] else self._first
        if (dtype := next(plain.parameters()).dtype) == torch.float64:
            for stage in self.stages:
                stage.double().dtype = dtype  # `to` would make rotary frequencies real that are complex

    @property
    def stages(self) -> list[Stage]:
        """All of them."""
        llm: list[Stage] = [self._first] if self._last is self._first else [self._first, self._last]
        return llm if self._encoder is None else [self._encoder, *llm]

    def gradients(self, samples: Sequence[_Sample]) -> dict[str, torch.Tensor]:
        """Gradients of all stages, summed where several share a parameter; tensors travel as messages would."""
        for stage in self.stages:
            stage.zero_grad()
        lengths = [len(of.ids) for of in samples]
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        rows, where, grids = self._rows(samples, ends.tolist())
        sent = [(rows, rows.detach().requires_grad_())] if rows is not None else []
        own = ([sent[0][1]], [where]) if sent else ([], [])
        hidden = self._first.embed(torch.cat([of.ids for of in samples]), *own)
        hidden = self._first(hidden, _positions(self._first, samples, grids), ends)
        if self._last is not self._first:
            sent.append((hidden, hidden.detach().requires_grad_()))
            hidden = self._last(sent[-1][1], _positions(self._last, samples, grids), ends)
        predicting = torch.cat([torch.arange(n - 1) + start for n, start in zip(lengths, ends.tolist(), strict=False)])
        self._last.loss(hidden, predicting, torch.cat([of.ids[1:] for of in samples])).backward()
        for root, leaf in reversed(sent):
            root.backward(leaf.grad)
        found: dict[str, torch.Tensor] = {}
        for stage in self.stages:
            for name, p in stage.names.items():
                if p.grad is not None:
                    found[name] = found[name] + p.grad if name in found else p.grad.clone()
        return found

    def _rows(
        self, samples: Sequence[_Sample], starts: Sequence[int]
    ) -> tuple[torch.Tensor | None, torch.Tensor, list[arrays.Grid]]:
        """(rows of the encoder, where they belong, the items' grids)."""
        if self._encoder is None:
            return None, torch.empty(0), []
        made = [(of.item.kind, of.item.made) for of in samples if of.item is not None]
        grids = [arrays.grid_of(self._form, *of) for of in made]
        data = torch.cat([torch.from_numpy(arrays.array_of(self._form, *of)) for of in made])
        where = torch.cat([of.places + start for of, start in zip(samples, starts, strict=False)])
        return self._encoder(data, torch.tensor(grids)), where, grids


def _as_trained(plain: Any) -> nn.Module:
    """The model with the same weights as training builds it."""
    is_double = next(plain.parameters()).dtype == torch.float64
    model = construct(plain.config, torch.float32, "eager" if is_double else None).eval()  # grouped_mm has no double
    model.load_state_dict(plain.state_dict())
    return model


def _positions(stage: LlmStage, samples: Sequence[_Sample], grids: Sequence[arrays.Grid]) -> torch.Tensor:
    found = []
    for index, of in enumerate(samples):
        at = [MediaPosition(of.item.kind, grids[index], of.item.seconds_per_grid, of.item.num_rows)] if of.item else []
        found.append(stage.positions(of.ids, at))
    return torch.cat(found, dim=1)


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


def _descend(params: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]) -> None:
    """One step of gradient descent, whose length does not depend on the number of tokens."""
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    with torch.no_grad():
        for name, p in params.items():
            if name in gradients:
                p.sub_(gradients[name] * (_RATE / norm))
