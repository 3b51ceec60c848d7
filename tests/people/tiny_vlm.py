"""Somebody's vision-language model: Qwen2.5-VL with random weights, and the processor that goes with it."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

SPECIAL = ["<pad>", "<eos>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
MEDIA_IDS = {"image_token_id": 2, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
VISION = {
    "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64,
    "fullatt_block_indexes": [1], "patch_size": 14, "window_size": 56,
}  # fmt: skip
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make_model(vocab_size: int = 300) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(text_config={**TEXT, "vocab_size": vocab_size}, vision_config=VISION, **MEDIA_IDS)
    return Qwen2_5_VLForConditionalGeneration(config)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIAL, *alphabet])}, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, padding_side="left", pad_token="<pad>", eos_token="<eos>",
        additional_special_tokens=SPECIAL[2:],
    )  # fmt: skip


class Processor(Qwen2_5_VLProcessor):
    """For texts and images."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, chat_template=chat_template, **kwargs)


def make_processor() -> Processor:
    return Processor(Qwen2VLImageProcessorPil(min_pixels=28**2, max_pixels=448**2), make_tokenizer(), CHAT)
