"""Processors of every model type with their classes' default settings and a tokenizer that has whatever is asked of it.

Needs torchvision, see `with_torchvision.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES as HEARERS
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES as VIEWERS
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as TYPES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as PROCESSORS
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES as WATCHERS

TEMPLATES = {
    "QianfanOCRProcessor": "<image>",
    "HunYuanVLProcessor": "<image_start_token><image_token><image_end_token>",
}
"""Prompts of processors that want more in a text than the placeholder, as chat templates."""
WRITTEN_OUT = ("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""Tokens that processors write without asking the tokenizer for them."""


class ObligingTokenizer(transformers.PreTrainedTokenizerFast):
    """Makes a special token of every name it is asked for, `<image_token>` for `x.image_token`; else of characters."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith(("_token", "_token_id")) and not name.startswith("_"):
            named = name.removesuffix("_id")
            token = self.__dict__.get("aliases", {}).get(named, f"<{named}>")
            return self.convert_tokens_to_ids(token) if name.endswith("_id") else self.known(token)
        return super().__getattr__(name)

    def known(self, token: str) -> str:
        if token not in self.get_vocab():
            self.add_tokens([transformers.AddedToken(token, special=True, normalized=False)], special_tokens=True)
        return token

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        for token in [tokens] if isinstance(tokens, str) else tokens or []:
            self.known(token)
        return super().convert_tokens_to_ids(tokens)


def obliging_tokenizer() -> ObligingTokenizer:
    known = ["<unk>", "<pad>", "<s>", "</s>", "\n", *map(chr, range(32, 127))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    ends = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    found = ObligingTokenizer(tokenizer_object=words, model_max_length=10**9, **ends)
    for token in WRITTEN_OUT:
        found.known(token)
    return found


def classes() -> Mapping[str, list[str]]:
    """Processor classes of models that take media, and the model types that use them."""
    found: dict[str, list[str]] = {}
    for kind in TYPES:
        if name := PROCESSORS.get(kind):
            found.setdefault(name, []).append(kind)
    return found


def make_processor(name: str, kinds: list[str]) -> Any:
    """A processor of a class with default settings.

    Raises:
        Exception: what its class raises.
    """
    cls = getattr(transformers, name)
    wanted = inspect.signature(cls.__init__).parameters
    given = {part: made for part, made in _parts(kinds) if part in wanted}
    made = cls(**given)
    own = {name: getattr(made, name, None) for name in ("image_token", "video_token", "audio_token")}
    given["tokenizer"].aliases = {name: given["tokenizer"].known(token) for name, token in own.items() if token}
    made = cls(**given)  # anew, as some look their tokens up when they are made
    if name == "PaliGemmaProcessor":  # its default is None
        made.image_seq_length = made.image_processor.image_seq_length = 256
    made.chat_template = TEMPLATES.get(name)
    return made


def _parts(kinds: list[str]) -> Iterator[tuple[str, Any]]:
    vision = getattr(transformers.AutoConfig.for_model(kinds[0]), "vision_config", None)
    hearer = _named(HEARERS, kinds)
    yield "image_processor", _named(VIEWERS, kinds)
    yield "video_processor", _named(WATCHERS, kinds)
    yield from (("feature_extractor", hearer), ("audio_processor", hearer))
    yield "tokenizer", obliging_tokenizer()
    yield "patch_size", getattr(vision, "patch_size", 14)
    yield "vision_feature_select_strategy", "default"
    yield "num_additional_image_tokens", int(getattr(vision, "model_type", "") == "clip_vision_model")
    yield "num_image_tokens", 729


def _named(table: Mapping[str, Any], kinds: list[str]) -> Any:
    """An object of default settings by a mapping of transformers: of torchvision where there is a choice."""
    for kind in kinds:
        entry = table.get(kind)
        if name := (entry.get("torchvision") or entry.get("pil")) if isinstance(entry, dict) else entry:
            return getattr(transformers, name)()
    return None
