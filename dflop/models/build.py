"""Build the real Hugging Face model of a family and cut it into the stages a plan asks for.

A stage keeps Hugging Face's own submodules and calls their own forward, so masks, rope and initialisation stay
theirs. Every parameter keeps its global name (`model.language_model.layers.17...`) whatever stage holds it: gradient
reduction, checkpoints and parity tests all speak global names. Weights are random but fixed by the seed, hence equal
on every rank that builds the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.family import Family, Tower
from dflop.records import LLM

IGNORE_LABEL = -100


def build_model(family: Family, hf_config: Mapping[str, Any], *, seed: int, dtype: torch.dtype) -> nn.Module:
    """The family's `...ForConditionalGeneration` with random weights fixed by `seed`.

    Args:
        family: Names the transformers classes.
        hf_config: Keyword arguments of the config class, token ids included.
        seed: Same seed, same weights, on every machine with the same torch build.
        dtype: Parameter type.
    """
    import transformers

    attention.register()
    config = getattr(transformers, family.config_class)(**hf_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.model_class)._from_config(
            config, attn_implementation=attention.PACKED, dtype=dtype
        )
    model.train()
    result: nn.Module = model
    return result


class MediaPosition(NamedTuple):
    """What rope positions depend on, per media item of a sample."""

    kind: str
    grid: tuple[int, int, int]
    seconds_per_grid: float
    """Seconds per temporal patch of a video; 0 otherwise."""


class Stage(nn.Module):
    """Part of a model that one rank runs; `names` maps global parameter names to this stage's parameters."""

    def __init__(self, names: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = dict(names)

    @property
    def param_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.names.values())


class EncoderStage(Stage):
    """A whole encoder with its projector: packed items in, rows for the LLM out."""

    def __init__(self, model: nn.Module, tower: Tower) -> None:
        module = model.get_submodule(tower.path)
        super().__init__({f"{tower.path}.{n}": p for n, p in module.named_parameters()})
        self.tower = tower
        self.module = module

    def forward(self, data: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        """Encode packed items.

        Args:
            data: Items' arrays concatenated along `tower.data_axis`.
            grids: int64 `[items, 3]`.

        Returns:
            `[rows, hidden]` in item order.
        """
        sizes = grids[:, : self.tower.size_columns].squeeze(-1) if self.tower.size_columns == 1 else grids
        out = self.module(**{self.tower.data_arg: data, self.tower.size_arg: sizes})
        rows: torch.Tensor = getattr(out, self.tower.output)
        return rows


class LlmStage(Stage):
    """Consecutive decoder layers; the first stage embeds and merges media rows, the last computes the loss.

    Args:
        model: Full model; its decoder is cut in place, so build one per stage.
        family: Says where decoder and head sit.
        layers: Global indices of the layers to keep, `[first, end)`.
    """

    def __init__(self, model: nn.Module, family: Family, layers: tuple[int, int]) -> None:
        spec = family.decoder
        decoder: Any = model.get_submodule(spec.path)
        num_layers = len(decoder.layers)
        self_is_first, self_is_last = layers[0] == 0, layers[1] == num_layers
        head: Any = model.get_submodule(spec.head)
        tied = f"{spec.path}.embed_tokens.weight" if head.weight is decoder.embed_tokens.weight else ""
        global_name = {id(p): n for n, p in model.named_parameters()}
        decoder.layers = nn.ModuleList(decoder.layers[layers[0] : layers[1]])
        decoder.config.layer_types = decoder.config.layer_types[layers[0] : layers[1]]
        kept: list[Any] = [*decoder.layers]
        if self_is_first:
            kept.append(decoder.embed_tokens)
        else:
            decoder.embed_tokens = None
        if self_is_last:
            kept += [decoder.norm, head]
        else:
            decoder.norm = nn.Identity()
        super().__init__({global_name[id(p)]: p for part in kept for p in part.parameters()})
        for tower in family.towers.values():
            parent, _, name = tower.path.rpartition(".")
            setattr(model.get_submodule(parent), name, None)
        if not self_is_last:
            setattr(model, spec.head, None)
        # In a tuple, so that the shell's parameters are not registered a second time.
        self._shell = (model, family)
        self.tied = tied
        self.is_first, self.is_last = self_is_first, self_is_last
        self.decoder = decoder
        self.head = head if self_is_last else None
        self.head_loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self._whole_head_loss
        """Sum of cross entropies of hidden states and targets; tensor parallelism puts its own here."""

    def embed(
        self, input_ids: torch.Tensor, rows: Sequence[torch.Tensor], positions: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Token embeddings `[tokens, hidden]` with each group of media rows written at its positions."""
        hidden: torch.Tensor = self.decoder.embed_tokens(input_ids)
        for group, where in zip(rows, positions, strict=True):
            hidden = hidden.index_copy(0, where, group.to(hidden.dtype))
        return hidden

    def positions(self, input_ids: torch.Tensor, items: Sequence[MediaPosition]) -> torch.Tensor:
        """Rope positions `[3, tokens]` (int64) of one sample whose media stand in the order of `items`."""
        if not any(item.kind in ("image", "video") for item in items):
            return torch.arange(len(input_ids)).expand(3, -1)

        def grids(kind: str) -> torch.Tensor | None:
            rows = [item.grid for item in items if item.kind == kind]
            return torch.tensor(rows) if rows else None

        audio = [item.grid[0] for item in items if item.kind == "audio"]
        model, family = self._shell
        owner: Any = model.get_submodule(family.decoder.rope)
        positions, _ = owner.get_rope_index(
            input_ids[None],
            image_grid_thw=grids("image"),
            video_grid_thw=grids("video"),
            audio_seqlens=torch.tensor(audio) if audio else None,
            second_per_grids=torch.tensor([item.seconds_per_grid for item in items if item.kind == "video"]),
        )
        result: torch.Tensor = positions[:, 0]
        return result

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Run the stage's layers.

        Args:
            hidden: `[tokens, hidden]`.
            position_ids: int64 `[3, tokens]` rope positions.
            cu_seqlens: int32 `[samples + 1]`.

        Returns:
            `[tokens, hidden]`, normalised on the last stage.
        """
        out = self.decoder(
            inputs_embeds=hidden[None],
            position_ids=position_ids[:, None],
            use_cache=False,
            cu_seq_lens_q=cu_seqlens,
        )
        result: torch.Tensor = out.last_hidden_state[0]
        return result

    def loss_sum(self, hidden: torch.Tensor, where: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of cross entropies of `targets` predicted at token positions `where` (last stage only)."""
        if self.head is None:
            raise RuntimeError("only the last LLM stage has a head")
        return self.head_loss(hidden.index_select(0, where), targets)

    def _whole_head_loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert self.head is not None
        return nn.functional.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


def cut_stage(model: nn.Module, family: Family, module: str, layers: tuple[int, int]) -> Stage:
    """The stage of `module` that holds global layers `[first, end)`; frees the rest of the model.

    Raises:
        ConfigError: an encoder is asked to be cut between layers, which the engine does not do.
    """
    if module == LLM:
        return LlmStage(model, family, layers)
    depth = next(s.num_layers for s in family.specs() if s.module == module)
    if layers != (0, depth):
        raise ConfigError(
            f"encoder `{module}` cannot be cut into layers {layers[0]}..{layers[1]}", where="plan", hint="use pp = 1"
        )
    return EncoderStage(model, family.towers[module])
