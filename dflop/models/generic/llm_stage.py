"""A stage of any decoder of transformers, as the engine runs stages: layers of other stages let hidden states through.

Indices and `layer_types` stay as they are, and the decoder's own forward runs. What enters the first layer of a stage
is replaced by what was received, because some decoders scale embeddings in front of it.

Rope positions of a sample come from the class's own `get_rope_index` where it has one. Where tokens of an image see
each other, one more row of the positions numbers the runs of placeholders, so that every stage knows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop.errors import ConfigError, TrainError
from dflop.models import loss_size
from dflop.models.attention import Earlier
from dflop.models.build import LlmStage
from dflop.models.family import Decoder, Family, Tower
from dflop.models.generic.classes import SHARED, PassThrough, entry_of, in_place
from dflop.models.generic.entry import MARKS, logits_of
from dflop.models.generic.packed import Holder, Samples, prepare
from dflop.models.generic.reach import Reach, read_reaches
from dflop.models.generic.stage import UnknownArgument, last_cut
from dflop.models.loss import head_loss
from dflop.models.positions import MediaPosition

_KINDS = ("image", "video", "audio")
"""Media, in the order of the numbers by which processors mark their placeholders, from 1."""
_ROPE = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
"""Arguments of `get_rope_index` that are known."""


class GenericLlmStage(LlmStage):
    """Consecutive layers of a decoder of any class; the first stage embeds, the last computes the loss.

    Args:
        model: Full model; its decoder is cut in place, so build one per stage.
        family: Says where decoder and head sit.
        layers: Global indices of the layers to keep, `[first, end)`.

    Raises:
        ConfigError: the class has something that stages do not know, or cannot be cut there.
    """

    def __init__(self, model: nn.Module, family: Family, layers: tuple[int, int]) -> None:
        reaches, final = _read(model, family.decoder, family.towers.values())
        _check_cut(model.get_submodule(family.decoder.path), layers)
        super().__init__(model, family, layers)
        self._first, self._end = layers
        self._has_blocks = any(reach is not None and reach.images for reach in reaches)
        self._final = final
        self._received: torch.Tensor | None = None
        self._holder = Holder()
        self.captured = self._holder.captured
        own = {index: self.decoder.layers[index] for index in range(*layers)}
        prepare(own, reaches, self.decoder.config, self._holder)
        if self._first:
            own[self._first].register_forward_pre_hook(self._replace, with_kwargs=True)

    @staticmethod
    def _keep(decoder: Any, layers: tuple[int, int]) -> list[nn.Module]:
        num_layers, outside = len(decoder.layers), []
        for name, part in list(decoder.named_children()):
            if part is decoder.layers or part is decoder.embed_tokens or not any(True for _ in part.parameters()):
                continue
            outside.append(part)
            if layers[1] < num_layers:
                setattr(decoder, name, PassThrough(part))
        for index in range(num_layers):
            if not layers[0] <= index < layers[1]:
                decoder.layers[index] = PassThrough(decoder.layers[index])
        embedding = decoder.embed_tokens
        if layers[0]:
            decoder.embed_tokens = None
        kept = [*([] if layers[0] else [embedding]), *decoder.layers[layers[0] : layers[1]]]
        return [*kept, *outside] if layers[1] == num_layers else kept

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.decoder.layers[self._first : self._end])

    def use_attention(self, kernel: str) -> None:
        self._holder.kernel = kernel

    def positions(self, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
        shell = self._shell[0]
        kinds = _kinds(shell.config, input_ids, items)
        counted = torch.arange(len(input_ids))[None]
        if hasattr(shell, "get_rope_index"):
            found = _rope_index(shell, input_ids, kinds, items) if items else counted.expand(3, -1)
        else:
            found = counted
        if not self._has_blocks:
            return found
        inside = (kinds > 0).long()
        starts = inside - F.pad(inside[:-1], (1, 0))
        return torch.cat([found, (starts.clamp(min=0).cumsum(0) * inside)[None]])

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor,
        earlier: Earlier | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As `LlmStage.forward`; positions are those of `positions`.

        Raises:
            UnknownArgument: a layer cannot share samples with other ranks, which exchange its keys.
        """
        if self.is_first:
            hidden = self.enter(hidden)
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        samples = Samples(lengths, hidden.device, earlier=earlier)
        if self._has_blocks:
            position_ids, samples.blocks = position_ids[:-1], position_ids[-1]
            samples.has_block = bool(samples.blocks.any())
        self._holder.samples = samples
        self._received = embeds = hidden[None, :, : self.hidden_size]
        # Rope of one axis takes `[1, tokens]`, of several `[axes, 1, tokens]`.
        rope = position_ids[:, None] if len(position_ids) > 1 else position_ids
        out = self.decoder(inputs_embeds=embeds, position_ids=rope, use_cache=False, **self._deep(hidden))
        result: torch.Tensor = out.last_hidden_state.squeeze(0)
        return self.leave(result, position_ids.shape[1]) if self.is_last else result

    def loss(
        self, hidden: torch.Tensor, where: torch.Tensor, targets: torch.Tensor, num_tokens: int = 1
    ) -> torch.Tensor:
        if self._final.capped is None:
            scaled = hidden if self._final.scale == 1.0 else hidden * self._final.scale
            return super().loss(scaled, where, targets, num_tokens)
        assert self.head is not None, "only the last LLM stage has a head"
        if self.head_loss is not head_loss:
            raise ConfigError("logits with a cap need all of the vocabulary", where="plan", hint="use tp = 1 for `llm`")
        sums = [
            checkpoint(self._cross_entropies, rows, wanted, use_reentrant=False, preserve_rng_state=False)
            for rows, wanted in zip(
                hidden.index_select(0, where).split(loss_size.CHUNK_TOKENS), targets.split(loss_size.CHUNK_TOKENS),
                strict=True,
            )
        ]  # fmt: skip
        return torch.stack(sums).sum() / num_tokens

    def _cross_entropies(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._final.capped is not None
        assert self.head is not None
        logits = self._final.capped(self.head(rows))
        return F.cross_entropy(logits.float(), targets, reduction="sum")

    def _replace(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}


def untrained(model: Any, decoder: Decoder, towers: Iterable[Tower]) -> str:
    """Why no stage can be made of a model, which need not have memory; empty: one can."""
    try:
        _read(model, decoder, towers)
    except ConfigError as error:
        return error.what
    except UnknownArgument as error:
        return str(error)
    return ""


def _read(model: Any, of: Decoder, towers: Iterable[Tower]) -> tuple[tuple[Reach | None, ...], _Final]:
    """What a stage asks of a class: which keys its layers see, and what it does with logits.

    Raises:
        ConfigError: a stage would leave something out.
        UnknownArgument: a layer sees keys by an unknown rule.
    """
    above, _, name = of.path.rpartition(".")
    shell = model.get_submodule(above)
    _check(model, of, towers, shell, getattr(shell, name))
    mark = next((m for m in MARKS if m in inspect.signature(shell.forward).parameters), "")
    return read_reaches(shell, name, mark), _final_of(model, of.head)


class _Final(NamedTuple):
    """What a class does with logits behind its head."""

    scale: float
    capped: Callable[[torch.Tensor], torch.Tensor] | None
    """Where it is more than a factor."""


def _final_of(model: Any, head: str) -> _Final:
    """Read from the class's own forward, with a head in place that returns what it is given."""
    above, _, name = head.rpartition(".")
    owner = model.get_submodule(above)

    def final(logits: torch.Tensor) -> torch.Tensor:
        with in_place(owner, name, nn.Identity()):
            return logits_of(model, logits[None])[0]

    asked = torch.linspace(-90.0, 90.0, 16).view(4, 4)
    answer = final(asked).float()
    scale = float(answer[-1, -1] / asked[-1, -1])
    if torch.allclose(answer, asked * scale, rtol=1e-6, atol=0.0):
        return _Final(1.0 if torch.equal(answer, asked) else scale, None)
    return _Final(1.0, final)


def _kinds(config: Any, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
    """Of each token, int64 `[tokens]`: 0 for text, else the number of the medium whose placeholder it is.

    Raises:
        TrainError: items have other numbers of rows than the sample has placeholders.
    """
    names = (f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))
    pads = [token for name in names if isinstance(token := entry_of(config, name), int)]
    (places,) = torch.nonzero(torch.isin(input_ids, torch.tensor(pads)), as_tuple=True)
    numbers = [_KINDS.index(item.kind) + 1 for item in items for _ in range(item.num_rows)]
    if len(numbers) != len(places):
        raise TrainError(f"a sample has {len(places)} placeholders for {len(numbers)} rows of media")
    kinds = torch.zeros_like(input_ids)
    kinds[places] = torch.tensor(numbers, dtype=kinds.dtype)
    return kinds


def _rope_index(
    shell: Any, input_ids: torch.Tensor, kinds: torch.Tensor, items: Sequence[MediaPosition]
) -> torch.Tensor:
    """Rope positions `[axes, tokens]` by the class's own rule."""
    grids = {kind: [item.grid for item in items if item.kind == kind] for kind in _KINDS}
    given = {
        "input_ids": input_ids[None], "mm_token_type_ids": kinds[None],
        "image_grid_thw": torch.tensor(grids["image"]) if grids["image"] else None,
        "video_grid_thw": torch.tensor(grids["video"]) if grids["video"] else None,
        "second_per_grid_ts": torch.tensor([item.seconds_per_grid for item in items if item.kind == "video"]),
    }  # fmt: skip
    takes = inspect.signature(shell.get_rope_index).parameters
    positions, _ = shell.get_rope_index(**{name: value for name, value in given.items() if name in takes})
    result: torch.Tensor = positions[:, 0]
    return result


def _check_cut(decoder: Any, layers: tuple[int, int]) -> None:
    if layers[0] > (latest := last_cut(decoder)):
        raise ConfigError(
            f"`{SHARED}`: behind layer {latest}, layers use keys of layers of another stage", where="model.hf_config",
            hint="use fewer stages",
        )  # fmt: skip


def _check(model: Any, of: Decoder, towers: Iterable[Tower], shell: Any, decoder: Any) -> None:
    """Refuse a class of which a stage would leave something out."""
    kind = type(decoder).__name__

    def refuse(what: str) -> ConfigError:
        hint = "`dflop model check` reports what the model is made of"
        return ConfigError(what, where="model.hf_config", hint=hint)

    if not isinstance(getattr(decoder, "embed_tokens", None), nn.Module):
        raise refuse(f"{kind} has no `embed_tokens`, which stages need")
    known = (*(p for tower in towers for p in (tower.path, *tower.extras)), of.path, of.head)
    others = [n for n, _ in model.named_parameters() if not any(n == k or n.startswith(f"{k}.") for k in known)]
    if others:
        raise refuse(f"`{others[0]}` is part of no module")
    if entry_of(decoder.config, "hidden_size_per_layer_input"):
        raise refuse(f"layers of {kind} take per-layer embeddings")
    if entry_of(decoder.config, "output_router_logits") and entry_of(decoder.config, "router_aux_loss_coef") != 0:
        raise refuse("the router's auxiliary loss is not computed: set `output_router_logits` to false")
    if of.num_deep_features and not hasattr(decoder, "_deepstack_process"):
        raise refuse(f"{kind} takes deep features in a way that is not known")
    if hasattr(shell, "get_rope_index"):
        needed = inspect.signature(shell.get_rope_index).parameters.values()
        missing = [p.name for p in needed if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if strange := [name for name in missing if name not in _ROPE]:
            raise refuse(f"rope positions of {type(shell).__name__} take {', '.join(strange)}")
