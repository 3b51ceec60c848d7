"""Qwen2.5-Omni thinker: a native-resolution vision tower and a chunked audio tower feeding a Qwen2.5 decoder.

Images, videos and audio follow the Hugging Face processors exactly (tests hold them equal), for videos with
`do_sample_frames` at two frames a second, the rate that processor assumes (rules: `native_family.py`). Audio becomes
10 ms mel frames, cut into chunks of `2 * n_window`; the published processor drops what is beyond 300 s, `audio_max_s`
refuses such audio. Attention runs per frame (or per window) in the vision tower and per chunk in the audio tower,
hence the sums of squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop.models import counts
from dflop.models.arrays import MEL_HOP_SAMPLES, SAMPLE_RATE_HZ, log_mel, mel_settings
from dflop.models.family import Grid, Processor, Tower
from dflop.models.media import MediaHeader, MediaTokens, Placement
from dflop.models.native_family import IMAGE_SETTINGS, VIDEO_SAMPLING, NativeFamily
from dflop.models.pixels import CLIP
from dflop.records import LLM, MediaItem, ModuleSpec


class Qwen25OmniThinker(NativeFamily):
    """`Qwen2_5OmniThinkerForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_5_omni_thinker"
    media_tokens = {
        "image": MediaTokens("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
        "video": MediaTokens("<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
        "audio": MediaTokens("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    }
    media_defaults = {**NativeFamily.media_defaults, "audio_max_s": 300.0}
    # Transformers' processor of this family gives videos its own size, whatever the settings state.
    settings = {"image": IMAGE_SETTINGS, "video": VIDEO_SAMPLING, "audio": {"chunk_length": "audio_max_s"}}
    processor = Processor(
        "Qwen2_5OmniProcessor",
        {**NativeFamily.processor.parts, "audio": "WhisperFeatureExtractor"},
        {
            "image_token": "<|IMAGE|>",
            "video_token": "<|VIDEO|>",
            "audio_token": "<|AUDIO|>",
            "vision_bos_token": "<|vision_bos|>",
            "vision_eos_token": "<|vision_eos|>",
            "audio_bos_token": "<|audio_bos|>",
            "audio_eos_token": "<|audio_eos|>",
        },
    )
    section_types = {
        "vision": "qwen2_5_omni_vision_encoder",
        LLM: "qwen2_5_omni_text",
        "audio": "qwen2_5_omni_audio_encoder",
    }

    towers = {
        "vision": Tower("model.visual", "native", "blocks", projector=("merger",), colours=CLIP),
        "audio": Tower("model.audio_tower", "mel", "layers", projector=("proj",), data_axis=1),
    }

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        return mel_settings(self.configs["audio"]) if kind == "audio" else super().fixed_settings(kind)

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        if module == "audio":
            return self.configs["audio"]["num_mel_bins"], grid[0]
        return super().array_shape(module, grid)

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        if item.kind == "audio":
            num_mel_bins = self.configs["audio"]["num_mel_bins"]
            return log_mel(versions[0], num_frames=item.grid[0], num_mel_bins=num_mel_bins)
        return super().array_of(item, versions)

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {
            "image_token_index": token_id["<|IMAGE|>"],
            "video_token_index": token_id["<|VIDEO|>"],
            "audio_token_index": token_id["<|AUDIO|>"],
            "vision_start_token_id": token_id["<|vision_bos|>"],
            "audio_start_token_id": token_id["<|audio_bos|>"],
            "audio_end_token_id": token_id["<|audio_eos|>"],
        }

    def specs(self) -> tuple[ModuleSpec, ...]:
        tied = bool(self.hf_config.get("tie_word_embeddings", False))
        return (
            counts.qwen2_5_vision(self.vision),
            counts.omni_audio(self.configs["audio"]),
            counts.decoder(self._text, tied=tied),
        )

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        if header.kind == "audio":
            return self._place_audio(header.duration_s)
        return super()._place(header, num_images, level)

    def _place_audio(self, duration_s: float) -> Placement:
        if duration_s > self.media["audio_max_s"]:
            raise ValueError(f"audio of {duration_s:.1f} s exceeds audio_max_s = {self.media['audio_max_s']:g}")
        num_mel = math.ceil(round(duration_s * SAMPLE_RATE_HZ) / MEL_HOP_SAMPLES)
        num_tokens = (num_mel - 1) // 2 + 1
        num_rows = (num_tokens - 2) // 2 + 1
        if num_rows < 1:
            raise ValueError(f"audio of {duration_s:.3f} s is shorter than one token")
        chunk = 2 * self.configs["audio"]["n_window"]
        lengths = [min(chunk, num_mel - start) for start in range(0, num_mel, chunk)]
        return Placement(
            module="audio",
            grid=(num_mel, 0, 0),
            num_tokens=num_tokens,
            sum_sq_tokens=sum(((n - 1) // 2 + 1) ** 2 for n in lengths),
            num_rows=num_rows,
            layout=self.media_tokens["audio"].wrap(num_rows),
        )
