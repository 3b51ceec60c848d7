"""A stage of the decoder of any model, as the engine runs stages: layers of other stages let hidden states through.

Indices and `layer_types` stay as they are, and the decoder's own forward runs. What enters the first layer of a stage
is replaced by what was received, because some decoders scale embeddings in front of it.

Rope positions of a sample come from the class's own `get_rope_index` where it has one. Where tokens of an image see
each other, one more row of the positions numbers the runs of placeholders, so that every stage knows them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dflop.errors import ConfigError, TrainError
from dflop.models import loss_size
from dflop.models.attention import ByHeads, Earlier
from dflop.models.build import Stage, located
from dflop.models.family import Places
from dflop.models.generic.classes import PER_LAYER, PassThrough, entry_of
from dflop.models.generic.packed import Holder, Samples, prepare
from dflop.models.generic.reach import UnknownArgument
from dflop.models.generic.stage_rules import adds_rows, check_cut, read_class
from dflop.models.loss import HeadLoss, head_loss
from dflop.records import MediaItem

KINDS = ("image", "video", "audio")
"""Media, in the order of the numbers by which processors mark their placeholders, from 1."""
_SOUND = KINDS.index("audio") + 1
_SECONDS = ("second_per_grid_ts", "second_per_grids")
"""What classes call the seconds per temporal patch of clips."""
_TEXT_IDS = range(10, 26)
"""Token ids of a shrunk model that stand for no medium."""


class MediaPosition(NamedTuple):
    """What rope positions depend on, per media item of a sample."""

    kind: str
    grid: tuple[int, int, int]
    seconds_per_grid: float
    """Seconds per temporal patch of a video; 0 otherwise."""
    num_rows: int
    """Number of placeholders."""

    @classmethod
    def of(cls, item: MediaItem) -> MediaPosition:
        """What rope positions depend on of an item."""
        seconds = item.duration_s / item.grid[0] if item.kind == "video" else 0.0
        return cls(item.kind, item.grid, seconds, item.num_rows)


class LlmStage(Stage):
    """Consecutive layers of a decoder of any class; the first embeds and merges media rows, the last has the loss.

    Args:
        model: Full model; its decoder is cut in place, so build one per stage.
        family: Says where decoder and head sit.
        layers: Global indices of the layers to keep, `[first, end)`.

    Raises:
        ConfigError: the class has something that stages do not know, or cannot be cut there, or the first stage lacks
            layers after which deep features are added.
    """

    def __init__(self, model: nn.Module, family: Places, layers: tuple[int, int]) -> None:
        towers = [replace(tower, path=located(model, tower.path)) for tower in family.towers.values()]
        of = replace(family.decoder, path=located(model, family.decoder.path))
        decoder: Any = model.get_submodule(of.path)
        reaches, self_final = read_class(model, of, towers)
        if entry_of(decoder.config, "output_router_logits"):
            decoder.config.output_router_logits = False  # else every forward pass would keep them
        check_cut(decoder, layers, of.num_deep_features)
        self_is_first, self_is_last = layers[0] == 0, layers[1] == len(decoder.layers)
        head: Any = model.get_submodule(of.head)
        global_name = {id(p): n for n, p in model.named_parameters()}
        tied = global_name[id(head.weight)] if head.weight is decoder.embed_tokens.weight else ""
        kept = [*_keep(decoder, layers), *([head] if self_is_last else [])]
        super().__init__({global_name[id(p)]: p for part in kept for p in part.parameters()})
        gone = [path for tower in towers for path in (tower.path, *tower.extras)]
        for other in (*gone, *([] if self_is_last else [of.head])):
            above, _, name = other.rpartition(".")
            setattr(model.get_submodule(above), name, None)
        if of.num_deep_features:
            # Hugging Face's own indexes with a mask on the device, so the host waits; here every token has a row.
            decoder._deepstack_process = lambda hidden, _mask, features: hidden + features
        # In a tuple, so that the shell's parameters are not registered a second time.
        self._shell = (model.get_submodule(of.path.rpartition(".")[0]),)
        self._adds = adds_rows(self._shell[0])
        self._first, self._end = layers
        self._final = self_final
        self.tied = tied
        self.is_first, self.is_last = self_is_first, self_is_last
        self.decoder = decoder
        self.hidden_size: int = decoder.config.hidden_size
        self.row_width = self.hidden_size * (1 + of.num_deep_features)
        """Width of the rows that encoders hand over."""
        self.head = head if self_is_last else None
        self.head_loss: HeadLoss = head_loss
        """Tensor parallelism puts its own here."""
        self.num_rows: Callable[[int], int] = lambda num_tokens: num_tokens
        """Rows of hidden states a rank hands to the next stage, where tensor-parallel ranks share the tokens."""
        self.enter: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
        self.leave: Callable[[torch.Tensor, int], torch.Tensor] = lambda hidden, _: hidden
        """From all tokens to this rank's share, before the first stage's layers; and back, after the last's."""
        self._has_blocks = any(reach is not None and reach.images for reach in reaches)
        self._has_one_block = any(reach is not None and reach.is_joined for reach in reaches)
        self._per_layer = decoder.config.num_hidden_layers, entry_of(decoder.config, PER_LAYER) or 0
        self._holder = Holder()
        self.captured = self._holder.captured
        own = {index: decoder.layers[index] for index in range(*layers)}
        prepare(own, reaches, decoder.config, self._holder)
        if self._first:
            own[self._first].register_forward_pre_hook(self._replace, with_kwargs=True)

    @property
    def layers(self) -> list[nn.Module]:
        return list(self.decoder.layers[self._first : self._end])

    def embed(
        self, input_ids: torch.Tensor, rows: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Token embeddings `[tokens, row_width]` with each group of media rows written at its positions.

        Where rows carry deep features, those of text are zeros. Per-layer embeddings come last, for media those of
        padding.
        """
        hidden: torch.Tensor = self.decoder.embed_tokens(input_ids)
        width = max((group.shape[1] for group in rows), default=hidden.shape[1])
        hidden = F.pad(hidden, (0, width - hidden.shape[1]))
        for group, where in zip(rows, positions, strict=True):
            put = hidden.index_add if self._adds else hidden.index_copy
            hidden = put(0, where, group.to(hidden.dtype))
        if not self._per_layer[1]:
            return hidden
        for where in positions:
            input_ids = input_ids.index_fill(0, where, self.decoder.config.pad_token_id)
        return torch.cat([hidden, self.decoder.get_per_layer_inputs(input_ids[None]).flatten(2)[0]], dim=1)

    def positions(self, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
        """Rope positions `[axes, tokens]` (int64) of one sample whose media stand in the order of `items`."""
        shell = self._shell[0]
        found, kinds = torch.arange(len(input_ids))[None], torch.zeros_like(input_ids)
        is_multimodal = hasattr(shell, "get_rope_index")
        if items and (is_multimodal or self._has_blocks):
            kinds = _kinds(shell.config, input_ids, items)
        if is_multimodal:
            axes = _num_axes(self.decoder.config)
            found = _rope_index(shell, input_ids, kinds, items) if items else found.expand(axes, -1)
        if not self._has_blocks:
            return found
        inside = ((kinds > 0) & (kinds != _SOUND)).long()  # tokens of a sound see what text does
        if self._has_one_block:
            return torch.cat([found, inside[None]])
        starts = inside - F.pad(inside[:-1], (1, 0))
        return torch.cat([found, (starts.clamp(min=0).cumsum(0) * inside)[None]])

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor,
        earlier: Earlier | None = None, counted: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run the stage's layers.

        Args:
            hidden: `[num_rows(tokens), hidden]`; on the first stage what `embed` returned.
            position_ids: int64 `[axes, tokens]`, those of `positions`.
            cu_seqlens: int32 `[samples + 1]`; on the host, so that nothing waits for the device.
            earlier: How context-parallel ranks that share samples exchange keys and values, which all of them do then.
            counted: bool `[tokens]`, those that the routers' loss counts.

        Returns:
            `[num_rows(tokens), hidden]`; on the last stage `[tokens, hidden]`, normalised.

        Raises:
            UnknownArgument: a layer cannot share samples with other ranks, which exchange its keys.
        """
        if self.is_first:
            hidden = self.enter(hidden)
        lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        embeds = hidden[None, :, : self.hidden_size]
        self._holder.samples = samples = Samples(lengths, hidden.device, earlier=earlier, received=embeds)
        if counted is not None:
            samples.counted = self.enter(counted[:, None].to(hidden.device, torch.float32, non_blocking=True))[:, 0]
        if self._has_blocks:
            position_ids, samples.blocks = position_ids[:-1], position_ids[-1]
            samples.has_block = bool(samples.blocks.any())
        # Rope of one axis takes `[1, tokens]`, of several `[axes, 1, tokens]`.
        rope = position_ids[:, None] if len(position_ids) > 1 else position_ids
        out = self.decoder(inputs_embeds=embeds, position_ids=rope, use_cache=False, **self._beside(hidden))
        self._holder.samples = None
        # Indexing would copy the gradient on its way back.
        result: torch.Tensor = out.last_hidden_state.squeeze(0)
        return self.leave(result, position_ids.shape[1]) if self.is_last else result

    def _beside(self, hidden: torch.Tensor) -> dict[str, Any]:
        """Arguments of the decoder for what comes with the embeddings: deep features and per-layer embeddings."""
        found: dict[str, Any] = {}
        if width := math.prod(self._per_layer):
            hidden, per_layer = hidden.split([hidden.shape[1] - width, width], dim=1)
            found["per_layer_inputs"] = per_layer.unflatten(1, self._per_layer)[None]
        _, *features = hidden.split(self.hidden_size, dim=1)
        return found | ({"deepstack_visual_embeds": features} if features else {})

    def loss(
        self, hidden: torch.Tensor, where: torch.Tensor, targets: torch.Tensor, num_tokens: int = 1,
        of_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Cross entropies of `targets` predicted at positions `where`, their sum over `num_tokens` (last stage only).

        `of_tokens` takes each of them, as in `head_loss`.

        Raises:
            ConfigError: the class caps logits, and tensor-parallel ranks share the vocabulary.
            RuntimeError: this is another stage.
        """
        if self.head is None:
            raise RuntimeError("only the last LLM stage has a head")
        rows = hidden.index_select(0, where)
        if self._final.capped is None:
            scaled = rows if self._final.scale == 1.0 else rows * self._final.scale
            return self.head_loss(scaled, self.head.weight, self.head.bias, targets, num_tokens, of_tokens)
        if self.head_loss is not head_loss:
            raise ConfigError("logits with a cap need all of the vocabulary", where="plan", hint="use tp = 1 for `llm`")
        found = [
            checkpoint(self._cross_entropies, some, wanted, use_reentrant=False, preserve_rng_state=False)
            for some, wanted in zip(
                rows.split(loss_size.CHUNK_TOKENS), targets.split(loss_size.CHUNK_TOKENS), strict=True
            )
        ]
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
        assert self._holder.samples is not None
        received = self._holder.samples.received
        if args:
            return (received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received}


def _keep(decoder: Any, layers: tuple[int, int]) -> list[nn.Module]:
    """What a stage keeps of a decoder, in the order of the forward pass, by which gradients are summed."""
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


def why_whole(model: nn.Module, family: Places) -> str:
    """Why ranks cannot share samples of a model; empty: they can. Asked of a stage with all layers, as training is.

    Args:
        model: Small, with memory; its decoder is cut in place.
        family: Says where decoder and head sit.

    Raises:
        ConfigError: no stage can be made of it.
    """
    decoder: Any = model.get_submodule(family.decoder.path)
    stage, ids = LlmStage(model, family, (0, len(decoder.layers))), torch.tensor(_TEXT_IDS)
    positions = stage.positions(ids, [])
    if stage._has_blocks:
        positions[-1] = 1  # as tokens of one image
    by_heads = ByHeads(len(ids), 0, [len(ids)], 1, lambda tensors: tensors, lambda tensors: tensors)
    alone = Earlier(0, 0, lambda tensor: tensor, lambda tensor, _: tensor[:0], by_heads)
    try:
        with torch.no_grad():
            stage(stage.embed(ids, [], []), positions, torch.tensor([0, len(ids)], dtype=torch.int32), alone)
    except UnknownArgument as error:
        return str(error)
    return ""


def _kinds(config: Any, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
    """Kind of each token, int64 `[tokens]`: 0 for text, else the number of the medium whose placeholder it is.

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
    """Axes of rope positions of text, as many as of media."""
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
        "audio_seqlens": torch.tensor([grid[1] or grid[0] for grid in grids["audio"]]) if grids["audio"] else None,
    }  # fmt: skip
    takes = inspect.signature(shell.get_rope_index).parameters
    positions, _ = shell.get_rope_index(**{name: value for name, value in given.items() if name in takes})
    result: torch.Tensor = positions[:, 0]
    return result
