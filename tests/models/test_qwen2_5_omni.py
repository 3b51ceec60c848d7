"""Omni's rules for audio against the Hugging Face processor and tower; for pictures: `test_native_families.py`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from dflop.models import load_family
from dflop.models.media import MediaHeader
from tests.train.synthetic import HF_CONFIG

NAME = "qwen2_5_omni_thinker"
TINY, FULL = load_family(NAME, HF_CONFIG, {}), load_family(NAME, {}, {})


def place_audio(family, duration_s):
    return family.place(MediaHeader("audio", 0, 0, 0, duration_s))


@settings(max_examples=40)
@given(st.integers(400, 16_000 * 40), st.sampled_from([TINY, FULL]))
@example(16_000 * 2, FULL).via("exactly one chunk")
@example(16_000 * 2 + 160, FULL).via("a chunk of one frame")
def test_audio_lengths_are_what_the_tower_attends_over(num_samples, family):
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    placed = place_audio(family, num_samples / 16_000)
    num_frames = torch.tensor([placed.grid[0]])
    tokens, rows = modeling.Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths(None, num_frames)
    assert (placed.num_tokens, placed.num_rows) == (int(tokens), int(rows))
    features = torch.zeros(1, placed.grid[0])
    _, chunks = modeling.chunk_and_pad_features(features, num_frames, family.configs["audio"]["n_window"])
    attended = modeling.get_audio_cu_seqlens(chunks)
    assert placed.sum_sq_tokens == int(attended.diff().long().pow(2).sum())
    assert placed.num_tokens == int(attended[-1])


def test_audio_outside_the_limits_is_refused():
    with pytest.raises(ValueError, match=r"400\.0 s exceeds audio_max_s = 300"):
        place_audio(FULL, 400.0)
    for too_short_s in (0.0, 0.01, 0.02):
        with pytest.raises(ValueError, match="shorter than one token"):
            place_audio(FULL, too_short_s)


@pytest.mark.parametrize("duration_s", [0.1, 0.4, 2.00625, 7.3331875, 29.99, 30, 30.01, 299.99, 300, 1800])
def test_audio_rows_equal_the_processor(duration_s, monkeypatch):
    """A processor that pads to half an hour where the audio is longer than what the model's own takes."""
    longest_s = max(300, duration_s)
    num_mel, num_rows = processor_audio(duration_s, longest_s, monkeypatch)
    placed = place_audio(load_family(NAME, {}, {"audio_max_s": float(longest_s)}), duration_s)
    assert (placed.grid, placed.num_rows) == ((num_mel, 0, 0), num_rows)
    assert placed.layout == ("<|audio_bos|>", num_rows, "<|audio_eos|>")


def processor_audio(duration_s, chunk_length, monkeypatch):
    """Mel frames and placeholder tokens; lengths come from padding alone, so the spectrogram is left out."""
    from transformers import Qwen2_5OmniProcessor, WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128, chunk_length=chunk_length)
    monkeypatch.setattr(extractor, "_torch_extract_fbank_features", lambda wave, device: np.zeros((len(wave), 128, 1)))
    processor = object.__new__(Qwen2_5OmniProcessor)
    processor.feature_extractor, processor.audio_token = extractor, "<|AUDIO|>"
    wave = np.zeros(round(duration_s * 16_000), np.float32)
    data, (text,) = processor._process_audio([wave], sampling_rate=16_000, return_attention_mask=True)
    assert set(text.split("<|AUDIO|>")) == {""}
    return int(data["feature_attention_mask"].sum()), text.count("<|AUDIO|>")


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(ConfigError) as caught:
        load_family("qwen2_5_omni", {}, {})
    assert f"did you mean `{NAME}`" in caught.value.hint


def test_rules_key_follows_what_decides_a_placement():
    keys = {f.rules_key for f in (FULL, TINY, load_family(NAME, {}, {"video_fps": 1.0}))}
    assert len(keys) == 3
    assert load_family(NAME, {}, {"video_fps": FULL.media["video_fps"]}).rules_key == FULL.rules_key
