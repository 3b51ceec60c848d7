"""A stage of any decoder of transformers, as the engine runs stages: layers of other stages let hidden states through.

Indices and `layer_types` stay as they are, and the decoder's own forward runs. What enters the first layer of a stage
is replaced by what was received, because some decoders scale embeddings in front of it.

Rope positions of a sample come from the class's own `get_rope_index` where it has one. Where tokens of an image see
each other, one more row of the positions numbers the runs of placeholders, so that every stage knows them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop.errors import ConfigError, TrainError
from dflop.models import loss_size
from dflop.models.attention import Earlier
from dflop.models.build import LlmStage
from dflop.models.family import Places
from dflop.models.generic.classes import PER_LAYER, PassThrough, entry_of
from dflop.models.generic.packed import Holder, Samples, prepare
from dflop.models.generic.reach import UnknownArgument
from dflop.models.generic.stage_rules import check_cut, read_class
from dflop.models.loss import head_loss
from dflop.models.positions import MediaPosition

KINDS = ("image", "video", "audio")
"""Media, in the order of the numbers by which processors mark their placeholders, from 1."""
_SECONDS = ("second_per_grid_ts", "second_per_grids")
"""What classes call the seconds per temporal patch of clips."""
_TEXT_IDS = range(10, 26)
"""Of a shrunk model, some that stand for no medium."""


class GenericLlmStage(LlmStage):
    """Consecutive layers of a decoder of any class; the first stage embeds, the last computes the loss.

    Args:
        model: Full model; its decoder is cut in place, so build one per stage.
        family: Says where decoder and head sit.
        layers: Global indices of the layers to keep, `[first, end)`.

    Raises:
        ConfigError: the class has something that stages do not know, or cannot be cut there.
    """

    def __init__(self, model: nn.Module, family: Places, layers: tuple[int, int]) -> None:
        decoder: Any = model.get_submodule(family.decoder.path)
        reaches, final = read_class(model, family.decoder, family.towers.values())
        check_cut(decoder, layers)
        super().__init__(model, family, layers)
        self._first, self._end = layers
        self._has_blocks = any(reach is not None and reach.images for reach in reaches)
        self._final = final
        self._received: torch.Tensor | None = None
        self._per_layer = decoder.config.num_hidden_layers, entry_of(decoder.config, PER_LAYER) or 0
        self._holder = Holder()
        self.captured = self._holder.captured
        self._num_axes = _num_axes(decoder.config)
        own = {index: self.decoder.layers[index] for index in range(*layers)}
        prepare(own, reaches, self.decoder.config, self._holder)
        if self._first:
            own[self._first].register_forward_pre_hook(self._replace, with_kwargs=True)

    @staticmethod
    def _keep(decoder: Any, layers: tuple[int, int]) -> list[nn.Module]:
        num_layers, outside = len(decoder.layers), []
        for part in list(decoder.children()):
            if part is decoder.layers or part is decoder.embed_tokens or not any(True for _ in part.parameters()):
                continue
            outside.append(part)
            if layers[1] < num_layers:
                for known_as in [n for n, own in decoder._modules.items() if own is part]:
                    setattr(decoder, known_as, PassThrough(part))
        for index in range(num_layers):
            if not layers[0] <= index < layers[1]:
                decoder.layers[index] = PassThrough(decoder.layers[index])
        embedding = decoder.embed_tokens
        if layers[0]:
            for name in [n for n, part in decoder._modules.items() if part is embedding]:
                setattr(decoder, name, None)
        kept = [*([] if layers[0] else [embedding]), *decoder.layers[layers[0] : layers[1]]]
        return [*kept, *outside] if layers[1] == num_layers else kept

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.decoder.layers[self._first : self._end])

    def use_attention(self, kernel: str) -> None:
        self._holder.kernel = kernel

    def embed(
        self, input_ids: torch.Tensor, rows: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]
    ) -> torch.Tensor:  # fmt: skip
        """As `LlmStage.embed`; per-layer embeddings come last, for media those of padding."""
        hidden = super().embed(input_ids, rows, positions)
        if not self._per_layer[1]:
            return hidden
        for where in positions:
            input_ids = input_ids.index_fill(0, where, self.decoder.config.pad_token_id)
        return torch.cat([hidden, self.decoder.get_per_layer_inputs(input_ids[None]).flatten(2)[0]], dim=1)

    def positions(self, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
        shell = self._shell[0]
        kinds = _kinds(shell.config, input_ids, items)
        found = torch.arange(len(input_ids))[None]
        if hasattr(shell, "get_rope_index"):
            found = _rope_index(shell, input_ids, kinds, items) if items else found.expand(self._num_axes, -1)
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
        out = self.decoder(inputs_embeds=embeds, position_ids=rope, use_cache=False, **self._beside(hidden))
        result: torch.Tensor = out.last_hidden_state.squeeze(0)
        return self.leave(result, position_ids.shape[1]) if self.is_last else result

    def _beside(self, hidden: torch.Tensor) -> dict[str, Any]:
        """Arguments of the decoder besides the embeddings."""
        if not (width := math.prod(self._per_layer)):
            return self._deep(hidden)
        hidden, per_layer = hidden.split([hidden.shape[1] - width, width], dim=1)
        return {"per_layer_inputs": per_layer.unflatten(1, self._per_layer)[None], **self._deep(hidden)}

    def loss(
        self, hidden: torch.Tensor, where: torch.Tensor, targets: torch.Tensor, num_tokens: int = 1,
        of_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self._final.capped is None:
            scaled = hidden if self._final.scale == 1.0 else hidden * self._final.scale
            return super().loss(scaled, where, targets, num_tokens, of_tokens)
        assert self.head is not None, "only the last LLM stage has a head"
        if self.head_loss is not head_loss:
            raise ConfigError("logits with a cap need all of the vocabulary", where="plan", hint="use tp = 1 for `llm`")
        found = [
            checkpoint(self._cross_entropies, rows, wanted, use_reentrant=False, preserve_rng_state=False)
            for rows, wanted in zip(
                hidden.index_select(0, where).split(loss_size.CHUNK_TOKENS), targets.split(loss_size.CHUNK_TOKENS),
                strict=True,
            )
        ]  # fmt: skip
        if of_tokens is not None:
            torch.cat([each.detach() for each in found], out=of_tokens)
        return torch.stack([each.sum() for each in found]).sum() / num_tokens

    def _cross_entropies(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self._final.capped is not None
        assert self.head is not None
        logits = self._final.capped(self.head(rows))
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(precise, targets, reduction="none")

    def _replace(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}


def why_whole(model: nn.Module, family: Places) -> str:
    """Why ranks cannot share samples of a model; empty: they can. Asked of a stage with all layers, as training is.

    Args:
        model: Small, with memory; its decoder is cut in place.
        family: Says where decoder and head sit.

    Raises:
        ConfigError: no stage can be made of it.
    """
    decoder: Any = model.get_submodule(family.decoder.path)
    stage, ids = GenericLlmStage(model, family, (0, len(decoder.layers))), torch.tensor(_TEXT_IDS)
    positions = stage.positions(ids, [])
    if stage._has_blocks:
        positions[-1] = 1  # as tokens of one image
    alone = Earlier(0, 0, lambda tensor: tensor)
    try:
        with torch.no_grad():
            stage(stage.embed(ids, [], []), positions, torch.tensor([0, len(ids)], dtype=torch.int32), alone)
    except UnknownArgument as error:
        return str(error)
    return ""


def _kinds(config: Any, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
    """Of each token, int64 `[tokens]`: 0 for text, else the number of the medium whose placeholder it is.

    Raises:
        TrainError: items have other numbers of rows than the sample has placeholders.
    """
    names = (f"{kind}_token_{end}" for kind in KINDS for end in ("id", "index"))
    pads = [token for name in names if isinstance(token := entry_of(config, name), int)]
    (places,) = torch.nonzero(torch.isin(input_ids, torch.tensor(pads)), as_tuple=True)
    numbers = [KINDS.index(item.kind) + 1 for item in items for _ in range(item.num_rows)]
    if len(numbers) != len(places):
        raise TrainError(f"a sample has {len(places)} placeholders for {len(numbers)} rows of media")
    kinds = torch.zeros_like(input_ids)
    kinds[places] = torch.tensor(numbers, dtype=kinds.dtype)
    return kinds


def _num_axes(config: Any) -> int:
    """Of rope positions of text, as many as of media."""
    section = (entry_of(config, "rope_parameters") or {}).get("mrope_section")
    return max(3, len(section or ()))


def _rope_index(
    shell: Any, input_ids: torch.Tensor, kinds: torch.Tensor, items: Sequence[MediaPosition]
) -> torch.Tensor:
    """Rope positions `[axes, tokens]` by the class's own rule."""
    grids = {kind: [item.grid for item in items if item.kind == kind] for kind in KINDS}
    given = {
        "input_ids": input_ids[None], "attention_mask": torch.ones_like(input_ids)[None],
        "mm_token_type_ids": kinds[None],
        "image_grid_thw": torch.tensor(grids["image"]) if grids["image"] else None,
        "video_grid_thw": torch.tensor(grids["video"]) if grids["video"] else None,
        **dict.fromkeys(_SECONDS, torch.tensor([item.seconds_per_grid for item in items if item.kind == "video"])),
        "audio_seqlens": torch.tensor([grid[1] for grid in grids["audio"]]) if grids["audio"] else None,
    }  # fmt: skip
    takes = inspect.signature(shell.get_rope_index).parameters
    positions, _ = shell.get_rope_index(**{name: value for name, value in given.items() if name in takes})
    result: torch.Tensor = positions[:, 0]
    return result
