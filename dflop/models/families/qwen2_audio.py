"""Qwen2-Audio: a Whisper encoder feeding a Qwen2 decoder.

Audio follows the Hugging Face processor exactly (tests hold them equal): 10 ms mel frames, cut off after the encoder's
30 s window and padded to it. The encoder runs over the whole window however short the audio is: audio and padding
attend among themselves, which for the audio equals Hugging Face's mask; only the audio's own rows go to the LLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dflop.models import counts
from dflop.models.arrays import MEL_HOP_SAMPLES, SAMPLE_RATE_HZ, log_mel, mel_settings
from dflop.models.family import Family, Grid, Processor, Tower
from dflop.models.media import MediaHeader, MediaTokens, Placement
from dflop.records import LLM, MediaItem, ModuleSpec

MEL_PER_POSITION = 2
"""Mel frames the encoder's convolutions turn into one position."""


class Qwen2Audio(Family):
    """`Qwen2AudioForConditionalGeneration`; with `audio_truncate` off, audio beyond the window is refused instead."""

    name = "qwen2_audio"
    media_tokens = {"audio": MediaTokens("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")}
    media_defaults = {"audio_truncate": True}
    processor = Processor(
        "Qwen2AudioProcessor",
        {"audio": "WhisperFeatureExtractor"},
        {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"},
    )
    section_types = {"audio": "qwen2_audio_encoder", LLM: "qwen2"}
    towers = {
        "audio": Tower("model.audio_tower", "windows", "layers", extras=("model.multi_modal_projector",)),
    }

    def fixed_settings(self, kind: str) -> Mapping[str, Any]:
        window_s = self.configs["audio"]["max_source_positions"] * MEL_PER_POSITION * MEL_HOP_SAMPLES / SAMPLE_RATE_HZ
        return {**mel_settings(self.configs["audio"]), "chunk_length": window_s}

    def specs(self) -> tuple[ModuleSpec, ...]:
        text = self._text
        projector = (self.configs["audio"]["d_model"], text["hidden_size"])
        return counts.qwen2_audio(self.configs["audio"], projector), counts.decoder(text, tied=False)

    def array_shape(self, module: str, grid: Grid) -> tuple[int, ...]:
        return (
            1,
            self.configs["audio"]["num_mel_bins"],
            self.configs["audio"]["max_source_positions"] * MEL_PER_POSITION,
        )

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        _, num_mel_bins, window = self.array_shape("audio", item.grid)
        return log_mel(versions[0], num_frames=item.grid[0], window_frames=window, num_mel_bins=num_mel_bins)[None]

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {"audio_token_index": token_id["<|AUDIO|>"]}

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        num_positions = self.configs["audio"]["max_source_positions"]
        window_samples = num_positions * MEL_PER_POSITION * MEL_HOP_SAMPLES
        num_samples = round(header.duration_s * SAMPLE_RATE_HZ)
        if num_samples > window_samples and not self.media["audio_truncate"]:
            raise ValueError(
                f"audio of {header.duration_s:.1f} s exceeds the encoder's {window_samples / SAMPLE_RATE_HZ:g} s and "
                "audio_truncate is off"
            )
        num_mel = math.ceil(min(num_samples, window_samples) / MEL_HOP_SAMPLES)
        num_kept = (num_mel - 1) // MEL_PER_POSITION + 1
        num_rows = num_kept // 2
        if num_rows < 1:
            raise ValueError(f"audio of {header.duration_s:.3f} s is shorter than one token")
        return Placement(
            module="audio",
            grid=(num_mel, 0, 0),
            num_tokens=num_positions,
            sum_sq_tokens=num_kept**2 + (num_positions - num_kept) ** 2,
            num_rows=num_rows,
            layout=self.media_tokens["audio"].wrap(num_rows),
        )
