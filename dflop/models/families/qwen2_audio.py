"""Qwen2-Audio: a Whisper encoder feeding a Qwen2 decoder.

Audio follows the Hugging Face processor exactly (tests hold them equal): 10 ms mel frames, cut off after the encoder's
30 s window and padded to it. The encoder runs over the whole window however short the audio is, with the padding
masked but computed; only the audio's own rows go to the LLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dflop.models.arrays import MEL_HOP_SAMPLES, SAMPLE_RATE_HZ
from dflop.models.media import MediaRules, MediaTokens, Placement

MEL_PER_POSITION = 2
"""Mel frames the encoder's convolutions turn into one position."""

_AUDIO = {"max_source_positions": 1500}


class Qwen2Audio(MediaRules):
    """`Qwen2AudioForConditionalGeneration`; with `audio_truncate` off, audio beyond the window is refused instead."""

    name = "qwen2_audio"
    media_tokens = {"audio": MediaTokens("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")}
    media_defaults = {"audio_truncate": True}

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.audio = {**_AUDIO, **self.hf_config.get("audio_config", {})}

    def place(
        self,
        kind: str,
        *,
        width_px: int,
        height_px: int,
        num_frames: int,
        duration_s: float,
        num_images: int = 1,
        level: int = 0,
    ) -> Placement:
        if kind != "audio":
            raise ValueError(f"{self.name} takes no {kind}")
        num_positions = self.audio["max_source_positions"]
        window_samples = num_positions * MEL_PER_POSITION * MEL_HOP_SAMPLES
        num_samples = round(duration_s * SAMPLE_RATE_HZ)
        if num_samples > window_samples and not self.media["audio_truncate"]:
            raise ValueError(
                f"audio of {duration_s:.1f} s exceeds the encoder's {window_samples / SAMPLE_RATE_HZ:g} s and "
                "audio_truncate is off"
            )
        num_mel = math.ceil(min(num_samples, window_samples) / MEL_HOP_SAMPLES)
        num_rows = ((num_mel - 1) // 2 - 1) // 2 + 1
        if num_rows < 1:
            raise ValueError(f"audio of {duration_s:.3f} s is shorter than one token")
        return Placement(
            module="audio",
            grid=(num_mel, 0, 0),
            num_tokens=num_positions,
            sum_sq_tokens=num_positions**2,
            num_rows=num_rows,
            layout=self.media_tokens["audio"].wrap(num_rows),
        )

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        raise ValueError(f"{self.name} takes no video")
