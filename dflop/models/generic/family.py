"""The family of every model of transformers without a file in `families/`.

Modules are the towers by medium and the text model. What plans need is in `facts.py`, read once; the processor itself
is loaded where an item of a new size is placed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models.family import GENERIC, Family, Grid, Processor
from dflop.models.generic import arrays
from dflop.models.generic.facts import Medium, facts_of
from dflop.models.generic.placing import Placer
from dflop.models.generic.specs import decoder_of, module_specs, towers_of
from dflop.models.generic.values import Structure
from dflop.models.media import MediaHeader, MediaTokens, Placement
from dflop.records import LLM, MediaItem, ModuleSpec

if TYPE_CHECKING:
    from dflop.models.generic.media_processor import MediaProcessor

_MAX_TURN = 16
_MAX_LEVEL, _LEAST_SIDE_PX = 8, 56
"""Times that the area of a picture is halved at most, and the shorter side that it keeps."""
_DEPTHS = ("depth", "num_hidden_layers", "encoder_layers", "num_layers")


class GenericFamily(Family):
    """Any multimodal model type of transformers, bound to a whole config and to the folder of its processor.

    Args:
        hf_config: Content of the model's `config.json`, `model_type` included.
        media: Nothing: limits are those of the processor's files.
        folder: With processor and tokenizer.
        cache: Where facts of models are kept; None: in this process only.

    Raises:
        ConfigError: dflop does not take such a model; the message names the key and what to do.
    """

    processor = Processor("", {}, {})
    media_defaults: Mapping[str, Any] = {}

    def __init__(
        self, hf_config: Mapping[str, Any], media: Mapping[str, Any], folder: Path | None = None,
        cache: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(hf_config, media)
        if folder is None:
            raise ConfigError(
                "the family `generic` reads tokens from the model's processor", where="model.processor",
                hint="the folder with processor_config.json or preprocessor_config.json, and tokenizer.json",
            )  # fmt: skip
        self.folder, self.cache = folder, cache
        self.facts = facts_of(hf_config, folder, cache)
        self.structure = self.facts.structure
        self.name = self.structure.model_type
        self.media_tokens = {
            medium.kind: MediaTokens("", medium.pad, "", medium.placeholder)
            for medium in self.facts.media
            if not medium.problem
        }
        self.refused = {medium.kind: medium.problem for medium in self.facts.media if medium.problem}
        apart = {"audio" if of.kind == "audio" else "vision" for of in self.facts.media if of.form == arrays.PARTS}
        self.towers, self.decoder = towers_of(self.structure, apart), decoder_of(self.structure)
        self.untrained, self.whole_samples = self.facts.untrained, self.facts.whole_samples
        inner = self.hf_config.get("thinker_config") or self.hf_config
        text = inner.get("text_config") or inner
        self.configs = {LLM: {**text, "hidden_size": self.structure.hidden_size}}
        self._depths: dict[str, int] = {}
        self._placer = Placer(self.facts, self.hf_config, folder, cache)

    def __reduce__(self) -> tuple[Any, ...]:
        return GenericFamily, (self.hf_config, self.media, self.folder, self.cache)

    @property
    def rules_key(self) -> str:
        return self.facts.key

    @property
    def media_processor(self) -> MediaProcessor:
        """The model's processor, loaded from its folder when it is first asked for."""
        return self._placer.processor

    @property
    def max_level(self) -> int:
        return _MAX_LEVEL

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        """None: whatever the processor's files state holds."""
        return {}

    def check_vocabulary(self, num_tokens: int) -> None:
        """Refuse a tokenizer with more tokens than the model has embeddings for.

        Raises:
            ConfigError: it has.
        """
        if num_tokens > self.structure.vocab_size:
            raise ConfigError(
                f"the tokenizer has {num_tokens} tokens, the model embeddings for {self.structure.vocab_size}",
                where="dataset.tokenizer", hint="use the tokenizer.json in the folder of model.processor",
            )  # fmt: skip

    def specs(self) -> tuple[ModuleSpec, ...]:
        vision = self.towers.get("vision")
        merge_tokens = self.facts.merge_tokens if vision is not None and vision.call == GENERIC else 0
        specs = tuple(
            replace(spec, merge_tokens=merge_tokens) if spec.module == "vision" else spec
            for spec in module_specs(self.structure)
        )
        return shallow_specs(specs, self._depths) if self._depths else specs

    def probe_depths(self, module: str, depths: Sequence[int]) -> tuple[int, ...]:
        spec = next(spec for spec in self.specs() if spec.module == module)
        first, turn = turn_of([kind.name for kind, count in spec.layers for _ in range(count)])
        if spec.num_layers - first >= turn * max(depths):
            return tuple(turn * depth for depth in depths)
        return tuple(sorted({max(1, spec.num_layers - n) for n in range(len(depths))}))

    def cut_to(self, module: str, num_layers: int) -> GenericFamily:
        """With the facts of the whole model, which placements need."""
        cut = copy.copy(self)
        cut._depths = {spec.module: num_layers if spec.module == module else 1 for spec in self.specs()}
        cut.hf_config = shallow_config(self.hf_config, self.structure, cut._depths)
        return cut

    def with_config(self, hf_config: Mapping[str, Any]) -> GenericFamily:
        return GenericFamily(hf_config, self.media, self.folder, self.cache)

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        medium = next(of for of in self.facts.media if of.kind == header.kind)
        if num_images > 1 and medium.several and header.kind == "image":
            raise ValueError(medium.several)
        return self._placer.place(shrunk(header, level))

    def sum_sq_llm_tokens(self, num_tokens: int) -> int:
        return self.structure.sum_sq_tokens(num_tokens)

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        return self.media_processor.frame_indices(num_frames, num_frames / duration_s)

    def frame_sizes_px(self, item: MediaItem, level: int = 0) -> tuple[tuple[int, int], ...]:
        given = shrunk(MediaHeader(item.kind, item.width_px, item.height_px, item.num_frames, item.duration_s), level)
        return ((given.height_px, given.width_px),)  # the processor resizes these

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        media = [of for of in self.facts.media if not of.problem and (of.kind == "audio") == (module == "audio")]
        medium = next((of for of in media if of.form), None)
        if medium is None:
            why = "; ".join(of.untrained for of in media)
            raise ConfigError(
                f"items for `{module}` of a `{self.structure.model_type}` are planned for and not trained on: {why}",
                where="model.family", hint="leave them out of the data, or use a model of a family: README.md",
            )  # fmt: skip
        return arrays.array_shape(medium.form, medium.patch, grid)

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {}  # the config has them

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        header, medium = self._of(item)
        media = versions[0]
        if item.kind != "audio":
            header = replace(header, height_px=media.shape[1], width_px=media.shape[2])
        else:  # headers are a little off
            num = self.media_processor.num_samples(header)
            media = np.pad(media[:num], (0, max(0, num - len(media))))
        return arrays.array_of(medium.form, item.kind, self.media_processor.inputs_of(header, media))

    def filler(self, item: MediaItem) -> np.ndarray | None:
        header, medium = self._of(item)
        if medium.form != arrays.PARTS:
            return None
        for level in range(self.max_level + 1):
            _, made = self.media_processor.made(shrunk(header, level), medium.pad, has_values=True)
            if arrays.grid_of(medium.form, item.kind, made) == tuple(item.grid):
                break
        return arrays.array_of(medium.form, item.kind, made)

    def _of(self, item: MediaItem) -> tuple[MediaHeader, Medium]:
        header = MediaHeader(item.kind, item.width_px, item.height_px, item.num_frames, item.duration_s)
        return header, next(of for of in self.facts.media if of.kind == item.kind)


def shrunk(header: MediaHeader, level: int) -> MediaHeader:
    """An item as its processor is given it: pictures and frames of half the area per level, sounds as they are."""
    if level == 0 or header.kind == "audio":
        return header
    scale = max(0.5 ** (level / 2), min(1.0, _LEAST_SIDE_PX / min(header.width_px, header.height_px)))
    return replace(header, width_px=round(header.width_px * scale), height_px=round(header.height_px * scale))


def turn_of(kinds: Sequence[str]) -> tuple[int, int]:
    """(first layer, length) of the pattern in which kinds of layers alternate, after a leading run of another kind.

    A probe has whole turns of it: the difference of two depths is then the mean over kinds.

    Args:
        kinds: Of the layers in the order of depth.
    """
    for first in range(min(len(kinds), _MAX_TURN)):
        tail = kinds[first:]
        for length in range(1, min(_MAX_TURN, len(tail)) + 1):
            if 2 * length <= len(tail) and all(a == b for a, b in zip(tail, tail[length:], strict=False)):
                return first, length
    return 0, min(len(kinds), _MAX_TURN)


def shallow_config(hf_config: Mapping[str, Any], structure: Structure, depths: Mapping[str, int]) -> dict[str, Any]:
    """Content of a config with modules cut.

    Args:
        hf_config: Of the model.
        structure: Of the model.
        depths: Layers of each module.
    """
    from dflop.models.generic.classes import config_of  # with torch, which plans do without
    from dflop.models.generic.shrink import of_layers

    config = config_of(hf_config)
    cut: dict[str, Any] = config.to_dict()
    text, old = config.get_text_config(), structure.num_layers
    first, _ = turn_of([kind for _, kind in sorted(_by_index(structure).items())])
    first = min(first, old - depths[LLM])
    chosen = range(first, first + depths[LLM])
    section = cut if text is config else cut[_key_of(config, text)]
    section |= {name: of_layers(name, value, old, chosen) for name, value in text.to_dict().items()}
    for encoder in structure.main_encoders:
        key = f"{encoder.medium}_config"
        if isinstance(tower := cut.get(key), dict):
            cut[key] = _tower(tower, encoder.num_layers, depths[encoder.medium])
    taken = cut.get("vision_feature_layer", -1)
    if taken != -1:  # after the last layer, or the probe would run layers that nothing is taken from
        cut["vision_feature_layer"] = [-1] * len(taken) if isinstance(taken, list | tuple) else -1
    return cut


def shallow_specs(specs: Sequence[ModuleSpec], depths: Mapping[str, int]) -> tuple[ModuleSpec, ...]:
    """Specs of modules that are cut."""
    return tuple(replace(spec, layers=_first_runs(spec, depths[spec.module])) for spec in specs)


def _first_runs(spec: ModuleSpec, depth: int) -> tuple[Any, ...]:
    kinds = [kind for kind, count in spec.layers for _ in range(count)]
    first, _ = turn_of([kind.name for kind in kinds])
    first = min(first, len(kinds) - depth)
    return tuple((kind, 1) for kind in kinds[first : first + depth])


def _by_index(structure: Structure) -> dict[int, str]:
    return {index: kind.name for kind in structure.kinds for index in kind.layers}


def _key_of(config: Any, section: Any) -> str:
    keys: list[str] = [key for key in config.sub_configs if getattr(config, key, None) is section]
    return keys[0]


def _tower(section: Mapping[str, Any], old: int, depth: int) -> dict[str, Any]:
    """A tower's section with fewer layers; deep features all come from its last one."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        if name in _DEPTHS and value == old:
            found[name] = depth
        elif isinstance(value, list) and len(value) == old > 1:
            found[name] = value[:depth]
        elif name.endswith("indexes") and isinstance(value, list):
            found[name] = [depth - 1] * len(value)
        else:
            found[name] = value
    return found
