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

_OF_GLM = (
    "{{ '<|begin_of_video|><video_token><|end_of_video|>' if messages[0].content[0].type == 'video'"
    " else '<image_token>' }}"
)
TEMPLATES = {
    **dict.fromkeys(("Glm4vProcessor", "Glm46VProcessor"), _OF_GLM),
    "QianfanOCRProcessor": "<image>",
    "HunYuanVLProcessor": "<image_start_token><image_token><image_end_token>",
}
"""Prompts of processors that want more in a text than the placeholder, as chat templates."""
OF_OTHERS = {
    "qwen2_5_omni_thinker": "qwen2_5_omni", "qwen3_omni_moe_thinker": "qwen3_omni_moe", "cosmos3_omni": "qwen3_vl",
    "mistral4": "mistral3", "glm_ocr": "glm46v",
}  # fmt: skip
"""Types that are released with the processor of another one."""
_AREA = 4096
"""Sizes beyond it are areas."""
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


def processor_of(kind: str) -> Any:
    """The processor of a model type, with default settings.

    Raises:
        LookupError: its class is not known.
        Exception: what its class raises.
    """
    of = OF_OTHERS.get(kind, kind)
    name, kinds = next(((name, kinds) for name, kinds in classes().items() if of in kinds), ("", []))
    if not name:
        raise LookupError("transformers has no processor for it")
    return make_processor(name, [kind, *kinds])


def make_processor(name: str, kinds: list[str]) -> Any:
    """A processor of a class with default settings.

    Raises:
        Exception: what its class raises.
    """
    cls = getattr(transformers, name)
    wanted = inspect.signature(cls.__init__).parameters
    given = {part: made for part, made in _parts(kinds) if part in wanted}
    given |= {part: obliging_tokenizer() for part in wanted if part.endswith("_tokenizer")}
    made = cls(**given)
    own = {name: getattr(made, name, None) for name in ("image_token", "video_token", "audio_token")}
    given["tokenizer"].aliases = {
        name: given["tokenizer"].known(token) for name, token in own.items() if token and token != "<boi_token>"
    }  # what stands for a picture in Gemma 3's prompts is no token of a row
    made = cls(**given)  # anew, as some look their tokens up when they are made
    if name == "PaliGemmaProcessor":  # its default is None
        made.image_seq_length = made.image_processor.image_seq_length = 256
    made.chat_template = TEMPLATES.get(name)
    return made


def fit(processor: Any, config: Any) -> Any:
    """A processor whose sizes are those of a model's config, as a release has them; classes' defaults differ.

    Args:
        processor: Of `make_processor`; changes.
        config: The trained part of a model's; its ids of placeholders become the tokenizer's.
    """
    vision, audio = (getattr(config, f"{name}_config", None) for name in ("vision", "audio"))
    vision = getattr(vision, "sam_config", vision)
    side = getattr(vision, "image_size", None)
    side = side[0] if isinstance(side, list | tuple) else side
    wanted = {
        "patch_size": getattr(vision, "patch_size", None), "merge_size": getattr(vision, "spatial_merge_size", None),
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None), "img_size": side, "image_size": side,
        "max_image_size": side, "spatial_merge_size": getattr(config, "spatial_merge_size", None),
    }  # fmt: skip
    for part in (processor, *(getattr(processor, f"{name}_processor", None) for name in ("image", "video"))):
        tile = "patch_size" if hasattr(part, "vision_patch_size") else ""  # what Step3.7 calls a tile of a picture
        for name, value in wanted.items():
            if isinstance(value, int) and isinstance(getattr(part, name, None), int) and name != tile:
                setattr(part, name, value)
        for name in ("size", "crop_size"):
            if (size := getattr(part, name, None)) is not None and isinstance(side, int):
                setattr(part, name, _sized(size, side))
    ratio, patch = getattr(config, "downsample_ratio", None), wanted["patch_size"]
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    if ratio and patch and hasattr(processor, "image_seq_length"):
        processor.image_seq_length = int(side // patch * ratio) ** 2
    given = {
        "num_image_tokens": (side // patch) ** 2 if side and patch else None,
        "patch_size": patch * config.downsample_factor if hasattr(processor, "img_size") else None,
        "vision_feature_select_strategy": getattr(config, "vision_feature_select_strategy", None),
    }
    for name, value in given.items():
        if value is not None and hasattr(processor, name):
            setattr(processor, name, value)
    hearer, mels = getattr(processor, "feature_extractor", None), getattr(audio, "num_mel_bins", None)
    if hearer is not None and mels and getattr(hearer, "feature_size", mels) != mels:
        processor.feature_extractor = type(hearer)(feature_size=mels)
    for kind in ("image", "video", "audio"):
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if isinstance(getattr(config, name, None), int) and getattr(processor, f"{kind}_token", None):
                setattr(config, name, getattr(processor.tokenizer, f"{kind}_token_id"))
    return processor


def _sized(size: Any, side: int) -> Any:
    """A size with sides of another length; areas are left."""
    stated = size if isinstance(size, dict) else {name: value for name, value in vars(size).items() if value}
    for names in (("height", "width"), ("shortest_edge",)):
        if set(stated) == set(names) and all(value < _AREA for value in stated.values()):
            made = dict.fromkeys(names, side)
            return made if isinstance(size, dict) else type(size)(**made)
    return size


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
