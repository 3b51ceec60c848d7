"""Cut the real Hugging Face model of a family into the stages a plan asks for.

A stage keeps Hugging Face's own submodules and calls their own forward, so masks, rope and initialisation stay
theirs. Every parameter keeps its global name (`model.language_model.layers.17...`) whatever stage holds it: gradient
reduction, checkpoints and parity tests all speak global names. Weights are random but fixed by the seed, hence equal
on every rank that builds the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.encoders import ARITHMETIC, CUT_THEMSELVES, ENCODERS, PACKERS, Arguments, native_parts
from dflop.models.family import GENERIC, GENERIC_PARTS, Family, Tower
from dflop.models.generic import arrays, items
from dflop.models.generic.classes import layers_of
from dflop.models.ways import Reruns
from dflop.records import LLM

IGNORE_LABEL = -100
Capture = Callable[[Callable[..., Any]], Callable[..., Any]]


class Stage(nn.Module):
    """Part of a model that one rank runs; `names` maps global parameter names to this stage's parameters."""

    def __init__(self, names: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.names = dict(names)
        self.dtype = next(iter(self.names.values())).dtype
        """In which it computes."""
        self.shards: dict[str, torch.Tensor] = {}
        """Where replicas share out the parameters: the tensors of which `names` then holds this rank's rows."""
        self.partial: frozenset[str] = frozenset()
        """Parameters whole on every tensor-parallel rank, the sum of whose gradients is the gradient."""
        self.of_experts: frozenset[str] = frozenset()
        """Parameters of experts that replicas share: each holds a part, which not all others hold, too."""
        self.reruns = Reruns(0)
        """Which layers run again in the backward passes of forward passes that come next."""
        self.captured: Capture = lambda forward: forward
        """A layer's forward that, whenever it runs again, sees what the stage runs now."""

    @property
    def layers(self) -> list[nn.Module]:
        """The module's own layers on this stage."""
        return []

    @property
    def run_alike(self) -> list[nn.Module]:
        """Modules that every replica runs equally often in a microbatch."""
        return self.layers

    @property
    def param_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.names.values())


@dataclass(frozen=True, slots=True)
class Gathered:
    """Items whose features other ranks have a part of."""

    exchange: Callable[[torch.Tensor], torch.Tensor]
    """From the features made here to those of the items, in their order."""
    sizes: torch.Tensor
    """int64 `[items, n]` on the host, as those of `EncoderStage.forward`."""


class EncoderStage(Stage):
    """An encoder with its projector: packed items in, rows for the LLM out.

    Args:
        model: Full model.
        tower: Where the encoder sits.
    """

    def __init__(self, model: nn.Module, tower: Tower) -> None:
        path = located(model, tower.path)
        kept = (path, *tower.extras)
        super().__init__(
            {n: p for n, p in model.named_parameters() if any(n == k or n.startswith(f"{k}.") for k in kept)}
        )
        self._tower_path = path
        parent, _, name = path.rpartition(".")
        # A copy that shares what makes rows and lets go of the rest; what has no parameters may be a resampler.
        shell: Any = copy.copy(model.get_submodule(parent))
        paths = {path.rpartition(".")[2] for path in kept}
        paths |= {n for n, m in shell._modules.items() if m is not None and next(m.parameters(), None) is None}
        shell._modules = {n: m if n in paths else None for n, m in shell._modules.items()}
        shell._parameters = dict(shell._parameters)  # the model lets go of them when its decoder is cut
        shell.config = copy.deepcopy(shell.config)  # setting its attention must not set that of other towers
        self.tower = tower
        self.shell = shell
        self.name = name
        self._encode, self._packed = ENCODERS[tower.call], PACKERS.get(tower.call)
        if tower.call != GENERIC_PARTS and (tower.call != GENERIC or items.form_of(shell) == arrays.GRID):
            config: Any = self.module.config
            config._attn_implementation = attention.CUTTING if tower.call in CUT_THEMSELVES else attention.PACKED

    @property
    def module(self) -> nn.Module:
        """The tower itself, without what else makes rows."""
        tower: nn.Module = self.shell.get_submodule(self.name)
        return tower

    @property
    def layers(self) -> list[nn.Module]:
        return list(layers_of(self.module, self.tower.layers))

    @property
    def run_alike(self) -> list[nn.Module]:
        return [] if self.tower.call == GENERIC_PARTS else self.layers  # once per item there

    @property
    def taken_states(self) -> frozenset[int]:
        """Numbers of hidden states that are taken by more than the next layer; number i is what enters layer i."""
        depth = len(self.layers)
        wanted = getattr(self.shell.config, "vision_feature_layer", -1)
        states = [wanted] if isinstance(wanted, int) else wanted
        deep = getattr(self.module, "deepstack_visual_indexes", ())
        return frozenset({0, depth, *(n % (depth + 1) for n in states), *(i + 1 for i in deep)})

    @property
    def projector(self) -> dict[str, nn.Parameter]:
        """Parameters, by global name, of what turns hidden states of the tower into rows: those not in `x.tower`."""
        inside = tuple(f"{self._tower_path}.{name}." for name in self.tower.projector)
        return {n: p for n, p in self.names.items() if n.startswith(inside) or not n.startswith(f"{self._tower_path}.")}

    def freeze_tower(self) -> None:
        """Let nothing but the projector train: layers keep nothing for a backward pass and run none."""
        self.requires_grad_(False)
        for parameter in self.projector.values():
            parameter.requires_grad_(True)

    def arithmetic(self, sizes: torch.Tensor, parts: Sequence[tuple[int, int, int]] = ()) -> Arguments:
        """What the tower works out from the sizes of packed items, on the host as these are.

        With parts of these, of a module with `ModuleSpec.merge_tokens`, it is that of `native_parts`.
        """
        if parts:
            return native_parts(self.module, sizes, parts)
        make = ARITHMETIC.get(self.tower.call)
        return make(self.module, sizes) if make else {}

    def forward(
        self, data: torch.Tensor, sizes: torch.Tensor, arithmetic: Arguments | None = None,
        gathered: Gathered | None = None, frame_keys: attention.FrameKeys | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Encode packed items.

        Args:
            data: Items' arrays concatenated along `tower.data_axis`; pixels may be uint8.
            sizes: int64 `[items, n]` on the host, what `Family.item_size` says of each.
            arithmetic: What `arithmetic` made of the sizes; None: it is made now.
            gathered: Where tiles of items are dealt out over ranks, and the sizes are of those here, how the features
                of whole items come to this one.
            frame_keys: Where ranks have parts of frames, how they exchange keys and values, which all of them do then.

        Returns:
            `[rows, width]` in item order; `width` is the LLM's hidden size, times more where the family's decoder
            takes deep features.
        """
        colours = self.tower.colours if data.dtype == torch.uint8 else None
        data = data.to(self.dtype) if colours is None else colours.normalised(data, self.dtype)
        device = next(iter(self.names.values())).device
        made = self.arithmetic(sizes) if arithmetic is None else arithmetic
        made = {n: x.to(device, non_blocking=True) if isinstance(x, torch.Tensor) else x for n, x in made.items()}
        if frame_keys is not None:
            made["frame_keys"] = frame_keys
        features = self._encode(self.shell, self.module, data, sizes, made)
        if gathered is not None:
            features, sizes = gathered.exchange(features), gathered.sizes
        return self._packed(self.shell, features, sizes) if self._packed and len(sizes) else features


_OLDER_PATHS = {"model.visual": "visual", "model.audio_tower": "audio_tower", "model.language_model": "model"}
"""Where the modules of Qwen2.5-Omni's thinker are in older releases; 5.17 has them there, 5.23 no longer."""


def located(model: nn.Module, path: str) -> str:
    """A module's path in the transformers release at hand."""
    old = _OLDER_PATHS.get(path, path)
    try:
        model.get_submodule(path)
    except AttributeError:
        return old
    return path


def cut_stages(model: nn.Module, family: Family, parts: Sequence[tuple[str, tuple[int, int]]]) -> tuple[Stage, ...]:
    """Several parts of one model for one rank, as (module, layers `[first, end)`); frees the rest of the model."""
    # The decoder last: it is cut in place and lets go of the towers.
    order = sorted(range(len(parts)), key=lambda i: parts[i][0] == LLM)
    made = {i: cut_stage(model, family, *parts[i]) for i in order}
    return tuple(made[i] for i in range(len(parts)))


def cut_stage(model: nn.Module, family: Family, module: str, layers: tuple[int, int]) -> Stage:
    """The stage of `module` that holds global layers `[first, end)`; frees the rest of the model.

    Raises:
        ConfigError: the module has no such layers, or cannot be cut between them.
    """
    depth = next(spec.num_layers for spec in family.specs() if spec.module == module)
    if not 0 <= layers[0] < layers[1] <= depth:
        raise ConfigError(f"layers [{layers[0]}, {layers[1]}) of `{module}`, which has {depth}")
    if module == LLM:
        from dflop.models.generic.llm_stage import LlmStage  # which derives from what stands here

        return LlmStage(model, family, layers)
    if layers != (0, depth):
        raise ConfigError(f"layers [{layers[0]}, {layers[1]}) of `{module}`: an encoder's {depth} stay on one stage")
    return EncoderStage(model, family.towers[module])
