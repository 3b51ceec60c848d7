"""Qwen2-Audio's media rules against the Hugging Face processor and model they promise to equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from dflop.models import load_family
from dflop.models.media import MediaHeader

NAME = "qwen2_audio"
RULES = load_family(NAME, {}, {})
RATE_HZ = 16_000


def place(rules, duration_s, kind="audio"):
    return rules.place(MediaHeader(kind, 0, 0, 0, duration_s))


@pytest.fixture(scope="module")
def processor():
    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<unk>",
        extra_special_tokens={"audio_token": "<|AUDIO|>", "bos": "<|audio_bos|>", "eos": "<|audio_eos|>"},
    )  # fmt: skip
    return transformers.Qwen2AudioProcessor(transformers.WhisperFeatureExtractor(feature_size=8), tokenizer)


def expanded(processor, num_samples):
    """What the processor makes of one audio: mel frames, and the text around and in place of it."""
    text = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    made = processor(text=[text], audio=[np.zeros(num_samples, np.float32)], sampling_rate=RATE_HZ, return_tensors="pt")
    return made, "".join(processor.tokenizer.convert_ids_to_tokens(made["input_ids"][0]))


@settings(max_examples=30)
@given(num_samples=st.integers(481, 33 * RATE_HZ))
@example(num_samples=1600)
@example(num_samples=117_331).via("no whole number of frames")
@example(num_samples=30 * RATE_HZ - 160)
@example(num_samples=30 * RATE_HZ)
@example(num_samples=30 * RATE_HZ + 160)
@example(num_samples=600 * RATE_HZ)
@example(num_samples=1800 * RATE_HZ).via("half an hour")
def test_audio_equals_the_processor(num_samples, processor):
    made, text = expanded(processor, num_samples)
    placed = place(RULES, num_samples / RATE_HZ)
    assert placed.grid == (int(made["feature_attention_mask"].sum()), 0, 0)
    assert "".join(part if isinstance(part, str) else "<|AUDIO|>" * part for part in placed.layout) == text
    assert placed.num_rows == text.count("<|AUDIO|>")
    assert placed.num_tokens == made["input_features"].shape[-1] // 2


@pytest.mark.parametrize("duration_s", [0.1, 3.2, 30, 40])
def test_the_real_encoder_runs_over_the_whole_window(duration_s, processor):
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder", "num_mel_bins": 8, "encoder_layers": 1, "d_model": 16,
            "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        },
        text_config={
            "model_type": "qwen2", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        },
        audio_token_index=processor.audio_token_id,
    )  # fmt: skip
    model = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    seen = []
    layer = model.get_submodule("model.audio_tower").layers[0]
    layer.register_forward_pre_hook(lambda _layer, args: seen.append(args))
    made, _ = expanded(processor, round(duration_s * RATE_HZ))
    placed = place(RULES, duration_s)
    with torch.no_grad():
        model(**{k: v for k, v in made.items() if k != "token_type_ids"})  # raises if rows and placeholders differ
    ((hidden, mask),) = seen
    num_positions = hidden.shape[1]
    assert num_positions == placed.num_tokens
    assert mask is None or mask.shape[-2:] == (num_positions, num_positions)
    # Hugging Face masks the padding away from the audio; here it is a separate sequence.
    num_kept = num_positions if mask is None else int(mask[0, 0, 0].sum())
    assert placed.sum_sq_tokens == num_kept**2 + (num_positions - num_kept) ** 2


def test_audio_without_rows_is_refused(processor):
    for num_samples in (1, 160, 320):
        assert "<|AUDIO|>" not in expanded(processor, num_samples)[1]
        with pytest.raises(ValueError, match=r"0\.0\d\d s is shorter than one token"):
            place(RULES, num_samples / RATE_HZ)
    with pytest.raises(ValueError, match="shorter than one token"):
        place(RULES, 0.0)


def test_the_window_follows_the_config_and_what_is_longer_can_be_refused():
    placed = place(load_family(NAME, {"audio_config": {"max_source_positions": 750}}, {}), 20.0)
    assert (placed.grid, placed.num_tokens, placed.num_rows) == ((1500, 0, 0), 750, 375)
    assert placed.sum_sq_tokens == 750**2
    strict = load_family(NAME, {}, {"audio_truncate": False})
    assert place(strict, 30.0) == place(RULES, 30.0)
    with pytest.raises(ValueError, match=r"audio of 30\.1 s exceeds the encoder's 30 s and audio_truncate is off"):
        place(strict, 30.1)
