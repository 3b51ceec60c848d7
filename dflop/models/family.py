"""What dflop must know about a model family that no config file says: its media rules (`media.py`) and its modules.

One small file per family in `families/` implements `Family`. Nothing here imports torch, so the data profiler and the
planner can use it anywhere; `build.py` turns the same description into real modules.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dflop.errors import ConfigError, did_you_mean
from dflop.models import counts
from dflop.models.media import MediaRules, check_like
from dflop.models.pixels import Colours
from dflop.models.unsupported import EXPERTS
from dflop.records import LLM, MediaItem, ModuleSpec

Grid = tuple[int, int, int]
_HEADS = {"head_dim": 128, "num_key_value_heads": 8}
"""Entries that follow from others where they are left out, and what they are like."""
_DEPTHS = ("depth", "encoder_layers", "num_hidden_layers")
GENERIC = "generic"
"""Name of the family of all other models, and how it calls towers: by the classes' own code."""
GENERIC_PARTS = "generic parts"
"""How it calls towers that take one item at a time."""
MAX_LAYERS = 10_000
"""Most layers of a module; what lists them, ours and transformers', would fill memory with more."""


@dataclass(frozen=True, slots=True)
class Tower:
    """Where an encoder sits in the Hugging Face model and how it takes a packed group of items."""

    path: str
    """Attribute path of the module; also the prefix of its parameters' names."""
    call: str
    """How it is run: a name in `ENCODERS` of `encoders.py`."""
    layers: str
    """Path of the list of layers, relative to the tower; empty: the tower is one layer."""
    extras: tuple[str, ...] = ()
    """Paths of what else makes rows: the projector, a newline embedding."""
    projector: tuple[str, ...] = ()
    """Submodules of the tower that are its projector, where that is not among the extras."""
    colours: Colours | None = None
    """Colours of a tower that takes pixels."""
    data_axis: int = 0
    """Items' arrays are concatenated along this axis."""

    @property
    def colour_settings(self) -> dict[str, Any]:
        """What an image processor's settings call them."""
        return {"image_mean": self.colours.mean, "image_std": self.colours.std} if self.colours else {}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Where the language model sits: decoder with `embed_tokens`, `layers` and `norm`, and the head."""

    num_deep_features: int = 0
    """Features of a media row that are added behind as many first layers; a row is that many times wider."""
    path: str = "model.language_model"
    head: str = "lm_head"


class Places(Protocol):
    """Where the modules of a model sit."""

    @property
    def towers(self) -> Mapping[str, Tower]:
        """By module."""

    @property
    def decoder(self) -> Decoder:
        """The language model."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor that a model of a family is used with: names in `transformers`."""

    whole: str
    parts: Mapping[str, str]
    """Class per media kind."""
    tokens: Mapping[str, str]
    """Special tokens by the names that the processor asks its tokenizer for."""


class Family(MediaRules):
    """A family whose modules can be built, cut, probed and trained.

    Attributes:
        configs: Complete section of the Hugging Face config per module, defaults filled in.

    Raises:
        ConfigError: a media limit the family does not know, or a section that is none of its.
    """

    towers: Mapping[str, Tower]
    decoder = Decoder()
    processor: Processor
    whole_samples: str = ""
    """Why ranks cannot share a sample (context parallelism); empty: they can."""
    untrained: str = ""
    """Why models are planned for and not trained; empty: they are."""
    section_types: Mapping[str, str] = {}
    """`model_type` of modules' sections where the configuration is silent."""

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.configs: Mapping[str, Mapping[str, Any]] = {
            module: complete_section(self.hf_config.get(key := _section_of(module)), key, kind)
            for module, kind in self.section_types.items()
        }

    @abc.abstractmethod
    def specs(self) -> tuple[ModuleSpec, ...]:
        """Modules in the order of `modules`, with parameter counts computed from the config.

        Raises:
            ConfigError: a language model whose layers are not known.
        """

    def with_config(self, hf_config: Mapping[str, Any]) -> Family:
        """The same family with the same limits, bound to another config."""
        return type(self)(hf_config, self.media)

    @abc.abstractmethod
    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        """Shape of the encoder input of an item of `module`; lets the profiler probe without media."""

    @abc.abstractmethod
    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        """Entries of the Hugging Face config that name the special tokens, given the tokenizer's ids."""

    @abc.abstractmethod
    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        """Encoder input of a decoded item, of `array_shape`, as the family's processor makes it.

        Args:
            item: The placed item.
            versions: Its frames, uint8 `[T, H, W, 3]`, in each of the sizes of `frame_sizes_px`; of audio a waveform,
                float32 `[n]`.
        """

    def filler(self, item: MediaItem) -> np.ndarray | None:
        """What stands for an item that cannot be read; None: zeros of `array_shape` do."""
        return None

    def frame_sizes_px(self, item: MediaItem, level: int = 0) -> tuple[tuple[int, int], ...]:
        """(height, width) of every version of a visual item's frames that `array_of` takes.

        One where an item is encoded at one size; a picture that is shown in tiles and as a whole has two.

        Raises:
            ValueError: the family takes no images.
        """
        raise ValueError(f"{self.name} does not support images")

    def framed(self, item: MediaItem, media: np.ndarray) -> np.ndarray:
        """Decoded frames with the margin that a processor adds before it resizes them; most add none."""
        return media

    def processor_entries(self) -> Mapping[str, Any]:
        """Entries of the processor's settings that are of no media kind."""
        return {}

    @property
    def modules(self) -> tuple[str, ...]:
        """Encoders first, `llm` last."""
        return (*self.towers, LLM)

    @property
    def freezable(self) -> tuple[str, ...]:
        """What may be frozen: modules, and `<encoder>.tower`, which leaves the encoder's projector to train."""
        return (*self.modules, *(tower_of(module) for module in self.towers))

    def item_size(self, item: MediaItem) -> tuple[int, ...]:
        """What the tower must know of an item besides its array; as many numbers for every item of a module."""
        return item.grid

    def num_features(self, item: MediaItem) -> int:
        """What the tower and its projector make of an item before its rows are packed: as many per tile or frame."""
        return item.num_rows

    def sum_sq_tokens(self, item: MediaItem) -> int:
        """Sum of squared attention lengths of a placed item under this config, averaged over its layers.

        Differs from the item's own in a shallow family whose layers mix windows and full attention differently.
        """
        return item.sum_sq_tokens

    def probe_depths(self, module: str, depths: Sequence[int]) -> tuple[int, ...]:
        """Layers of probes that are so many turns deep of the pattern in which a module's kinds of layers alternate."""
        return tuple(depths)

    def cut_to(self, module: str, num_layers: int) -> Family:
        """The family of `shallow`."""
        return self.with_config(self.shallow(module, num_layers))

    def shallow(self, module: str, num_layers: int) -> dict[str, Any]:
        """Hugging Face config with `module` cut to `num_layers` and every other module to one layer, for probes."""
        cut: dict[str, Any] = dict(self.hf_config)
        for name in self.modules:
            section = self.configs[name]
            depth = num_layers if name == module else 1
            known = counts.DEFAULTS.get(section["model_type"], {})
            entry = next((key for key in _DEPTHS if key in known), "num_hidden_layers")
            cut[_section_of(name)] = {**section, entry: depth, **self.shallow_entries(name, depth)}
        if not isinstance(taken := cut.get("vision_feature_layer", -1), int):
            cut["vision_feature_layer"] = [-1] * len(taken)
        elif taken != -1:
            # Behind the last layer, or the probe would run layers that nothing is taken from.
            cut["vision_feature_layer"] = -1
        return cut

    def shallow_entries(self, module: str, num_layers: int) -> dict[str, Any]:
        """Entries of a module's config that must change with its depth."""
        kinds = self.configs[module].get("layer_types")
        return {"layer_types": list(kinds)[:num_layers]} if kinds else {}

    @property
    def _text(self) -> Mapping[str, Any]:
        """The language model's section, of a kind whose layers are known."""
        text = self.configs[LLM]
        if (kind := str(text["model_type"])) not in counts.DECODERS:
            raise ConfigError(
                f"the family has no language model of type `{kind}`", where="model.hf_config.text_config.model_type",
                hint=f"{did_you_mean(kind, counts.DECODERS)}; any other: `model.family: generic`",
            )  # fmt: skip
        return text

    @property
    def _is_tied(self) -> bool:
        """Whether the head is the embedding: said at the top, or, in older configs, by the language model's section."""
        return bool(self.hf_config.get("tie_word_embeddings") or self.configs[LLM].get("tie_word_embeddings"))


def complete_section(stated: object, key: str, default_type: str, *, sides: tuple[str, ...] = ()) -> dict[str, Any]:
    """A section of a Hugging Face config with the defaults of its kind, every value of the kind its default has.

    Args:
        stated: The section as it was written; None: nothing of it.
        key: Its name.
        default_type: `model_type` where it says none.
        sides: Entries that may be written as (height, width).

    Raises:
        ConfigError: it is no section, a value is of another kind, or it has more than `MAX_LAYERS`.
    """
    if not isinstance(stated, Mapping | None):
        raise ConfigError(f"`{key}` is no section but a {type(stated).__name__}", where=f"model.hf_config.{key}")
    own = dict(stated or {})
    kind = str(own.get("model_type", default_type))
    known = counts.DEFAULTS.get(kind, {})
    if key != "text_config" and kind != default_type:
        raise ConfigError(
            f"a `{kind}` is another tower than this family's",
            where=f"model.hf_config.{key}.model_type",
            hint=f"`{default_type}`; under another name it would still have other layers",
        )
    if experts := next((name for name in EXPERTS if own.get(name)), ""):
        hint = "`model.family: generic`, with the whole config and `model.processor`"
        raise ConfigError(f"family without experts: `{experts}`", where=f"model.hf_config.{key}.{experts}", hint=hint)
    for name, default in {**_HEADS, **known}.items():
        value, where = own.get(name), f"model.hf_config.{key}.{name}"
        if name in sides and isinstance(value, list | tuple) and len(value) == 2:
            for side in value:
                check_like(side, default, where)
        elif name in own and (value is not None or (default is not None and name not in _HEADS)):
            check_like(value, _HEADS.get(name, default), where)
    check_depths(own, f"model.hf_config.{key}.")
    return {**known, **own, "model_type": kind}


def check_depths(section: Mapping[str, Any], before: str) -> None:
    """Refuse a section of a Hugging Face config with more layers than any model has.

    Args:
        section: As it was stated.
        before: What stands before the name of an entry, for the error.

    Raises:
        ConfigError: it has more than `MAX_LAYERS`.
    """
    for name in _DEPTHS:
        depth = section.get(name)
        if isinstance(depth, int | float) and depth > MAX_LAYERS:
            raise ConfigError(f"{depth:.15g} layers", where=f"{before}{name}", hint=f"at most {MAX_LAYERS}")


def tower_of(module: str) -> str:
    """How an encoder without its projector is named where it is frozen."""
    return f"{module}.tower"


def _section_of(module: str) -> str:
    """Section of the Hugging Face config that describes a module."""
    return "text_config" if module == LLM else f"{module}_config"
