"""The family of every model of transformers without a file in `families/`.

Modules are the towers by medium and the text model. What plans need is in `facts.py`, read once; the processor itself
is loaded where an item of a new size is placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models import GENERIC
from dflop.models.family import Decoder, Family, Grid, Processor, Tower
from dflop.models.generic.facts import facts_of
from dflop.models.generic.placing import Placer
from dflop.models.generic.specs import module_specs
from dflop.models.media import MediaHeader, MediaTokens, Placement
from dflop.records import LLM, MediaItem, ModuleSpec

if TYPE_CHECKING:
    from dflop.models.generic.media_processor import MediaProcessor


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
    takes_context_parallel = False
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
        self.towers = {
            encoder.medium: Tower(encoder.path, GENERIC, encoder.layers, encoder.projector)
            for encoder in self.structure.main_encoders
        }
        self.decoder = Decoder(path=self.structure.decoder, head=self.structure.head)
        inner = self.hf_config.get("thinker_config") or self.hf_config
        self.configs = {LLM: dict(inner.get("text_config") or inner)}

        self._placer = Placer(self.facts, self.hf_config, folder, cache)

    @property
    def rules_key(self) -> str:
        return self.facts.key

    @property
    def media_processor(self) -> MediaProcessor:
        """The model's processor, loaded from its folder when it is first asked for."""
        return self._placer.processor

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
        return tuple(module_specs(self.structure))

    def with_config(self, hf_config: Mapping[str, Any]) -> GenericFamily:
        return GenericFamily(hf_config, self.media, self.folder, self.cache)

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        medium = next(of for of in self.facts.media if of.kind == header.kind)
        if num_images > 1 and medium.several and header.kind == "image":
            raise ValueError(medium.several)
        return self._placer.place(header)

    def sum_sq_llm_tokens(self, num_tokens: int) -> int:
        return self.structure.sum_sq_tokens(num_tokens)

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        return self.media_processor.frame_indices(num_frames, num_frames / duration_s)

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        raise _not_trained(self.structure.model_type)

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        raise _not_trained(self.structure.model_type)

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        raise _not_trained(self.structure.model_type)


def _not_trained(model_type: str) -> ConfigError:
    return ConfigError(
        f"models of type `{model_type}` are planned and not trained yet", where="model.family",
        hint="`dflop plan`; to train, a model of a family: README.md",
    )  # fmt: skip
