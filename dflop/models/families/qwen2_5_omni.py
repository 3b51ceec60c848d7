"""Qwen2.5-Omni thinker: a native-resolution vision tower and a chunked audio tower feeding a Qwen2.5 decoder.

Images, videos and audio follow the Hugging Face processors exactly (tests hold them equal), for videos with
`do_sample_frames` at two frames a second, the rate that processor assumes; the rules are in `native.py`. Audio becomes
10 ms mel frames, cut into chunks of `2 * n_window`; the published processor drops what is beyond 300 s, `audio_max_s`
refuses such audio. Attention runs per frame (or per window) in the vision tower and per chunk in the audio tower,
hence the sums of squares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dflop.models.arrays import MEL_HOP_SAMPLES, SAMPLE_RATE_HZ, log_mel, patchify
from dflop.models.family import Decoder, Family, Tower
from dflop.models.media import MediaTokens, Placement
from dflop.models.native import (
    IMAGE_LIMITS,
    SHRINKABLE,
    TEMPORAL_PATCH_FRAMES,
    VIDEO_LIMITS,
    NativeVision,
    sample_evenly,
)
from dflop.records import LLM, ModuleSpec

_VISION = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "window_size": 112, "out_hidden_size": 3584, "fullatt_block_indexes": (7, 15, 23, 31),
}  # fmt: skip
_AUDIO = {
    "encoder_layers": 32, "d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "n_window": 100, "output_dim": 3584,
}  # fmt: skip
_TEXT = {
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4,
}  # fmt: skip


class Qwen25OmniThinker(Family):
    """`Qwen2_5OmniThinkerForConditionalGeneration`; media limits as in `media_defaults`."""

    name = "qwen2_5_omni_thinker"
    modules = ("vision", "audio", LLM)
    media_tokens = {
        "image": MediaTokens("<|vision_bos|>", "<|IMAGE|>", "<|vision_eos|>"),
        "video": MediaTokens("<|vision_bos|>", "<|VIDEO|>", "<|vision_eos|>"),
        "audio": MediaTokens("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"),
    }
    media_defaults = {**IMAGE_LIMITS, **VIDEO_LIMITS, "audio_max_s": 300.0}
    shrinkable = SHRINKABLE
    config_class = "Qwen2_5OmniThinkerConfig"
    model_class = "Qwen2_5OmniThinkerForConditionalGeneration"

    towers = {
        "vision": Tower("model.visual", "hidden_states", 0, "grid_thw", 3, "pooler_output"),
        "audio": Tower("model.audio_tower", "input_features", 1, "feature_lens", 1, "last_hidden_state"),
    }
    decoder = Decoder(path="model.language_model", head="lm_head", rope="model")

    def __init__(self, hf_config: Mapping[str, Any], media: Mapping[str, Any]) -> None:
        super().__init__(hf_config, media)
        self.vision = {**_VISION, **self.hf_config.get("vision_config", {})}
        self._native = NativeVision.of(self.vision)
        self.audio = {**_AUDIO, **self.hf_config.get("audio_config", {})}
        self.text = {**_TEXT, **self.hf_config.get("text_config", {})}

    def frame_size_px(self, grid: tuple[int, int, int]) -> tuple[int, int]:
        return grid[1] * self.vision["patch_size"], grid[2] * self.vision["patch_size"]

    def array_shape(self, module: str, grid: tuple[int, int, int]) -> tuple[int, int]:
        if module == "audio":
            return self.audio["num_mel_bins"], grid[0]
        patch_values = self.vision["in_channels"] * TEMPORAL_PATCH_FRAMES * self.vision["patch_size"] ** 2
        return grid[0] * grid[1] * grid[2], patch_values

    def item_array(self, kind: str, media: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
        if kind == "audio":
            return log_mel(media, num_frames=grid[0], num_mel_bins=self.audio["num_mel_bins"])
        return patchify(
            media,
            grid,
            patch_px=self.vision["patch_size"],
            merge=self.vision["spatial_merge_size"],
            temporal_patch=TEMPORAL_PATCH_FRAMES,
        )

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {
            "image_token_index": token_id["<|IMAGE|>"],
            "video_token_index": token_id["<|VIDEO|>"],
            "audio_token_index": token_id["<|AUDIO|>"],
            "vision_start_token_id": token_id["<|vision_bos|>"],
            "audio_start_token_id": token_id["<|audio_bos|>"],
            "audio_end_token_id": token_id["<|audio_eos|>"],
        }

    def shallow(self, module: str, num_layers: int) -> dict[str, Any]:
        depth = {m: num_layers if m == module else 1 for m in self.modules}
        # The last layer of a probe keeps full attention, so that two depths see both kinds where the model has both.
        every_layer_full = len(self.vision["fullatt_block_indexes"]) >= self.vision["depth"]
        full = list(range(depth["vision"])) if every_layer_full else [depth["vision"] - 1]
        sections: dict[str, dict[str, Any]] = {
            "vision_config": {"depth": depth["vision"], "fullatt_block_indexes": full},
            "audio_config": {"encoder_layers": depth["audio"]},
            "text_config": {"num_hidden_layers": depth[LLM]},
        }
        return self.hf_config | {key: {**self.hf_config.get(key, {}), **cut} for key, cut in sections.items()}

    def specs(self) -> tuple[ModuleSpec, ...]:
        return (self._vision_spec(), self._audio_spec(), self._text_spec())

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
        if kind == "audio":
            return self._place_audio(duration_s)
        limits, tokens = self.limits(level), self.media_tokens[kind]
        if kind == "image":
            return self._native.place_image(width_px, height_px, limits, tokens)
        return self._native.place_video(width_px, height_px, num_frames, duration_s, limits, tokens)

    def frame_indices(self, num_frames: int, duration_s: float, level: int = 0) -> tuple[int, ...]:
        return sample_evenly(num_frames, duration_s, self.limits(level))

    def _place_audio(self, duration_s: float) -> Placement:
        if duration_s > self.media["audio_max_s"]:
            raise ValueError(f"audio of {duration_s:.1f} s exceeds audio_max_s = {self.media['audio_max_s']:g}")
        num_mel = math.ceil(round(duration_s * SAMPLE_RATE_HZ) / MEL_HOP_SAMPLES)
        num_tokens = (num_mel - 1) // 2 + 1
        num_rows = (num_tokens - 2) // 2 + 1
        if num_rows < 1:
            raise ValueError(f"audio of {duration_s:.3f} s is shorter than one token")
        chunk = 2 * self.audio["n_window"]
        lengths = [min(chunk, num_mel - start) for start in range(0, num_mel, chunk)]
        return Placement(
            module="audio",
            grid=(num_mel, 0, 0),
            num_tokens=num_tokens,
            sum_sq_tokens=sum(((n - 1) // 2 + 1) ** 2 for n in lengths),
            num_rows=num_rows,
            layout=self.media_tokens["audio"].wrap(num_rows),
        )

    def _vision_spec(self) -> ModuleSpec:
        c = self.vision
        h, mlp, out = c["hidden_size"], c["intermediate_size"], c["out_hidden_size"]
        merged = h * c["spatial_merge_size"] ** 2
        layer = 4 * (h * h + h) + 3 * h * mlp + 2 * mlp + h + 2 * h
        patch_embed = c["in_channels"] * TEMPORAL_PATCH_FRAMES * c["patch_size"] ** 2 * h
        merger = h + merged * merged + merged + merged * out + out
        return ModuleSpec("vision", c["depth"], h, c["num_heads"], c["num_heads"], layer, patch_embed + merger, 1, (1,))

    def _audio_spec(self) -> ModuleSpec:
        c = self.audio
        h, mlp, out = c["d_model"], c["encoder_ffn_dim"], c["output_dim"]
        layer = 4 * h * h + 3 * h + 2 * h * mlp + mlp + h + 4 * h
        convolutions = 3 * c["num_mel_bins"] * h + h + 3 * h * h + h
        edge = convolutions + 2 * out + 2 * h + h * out + out
        heads = c["encoder_attention_heads"]
        return ModuleSpec("audio", c["encoder_layers"], h, heads, heads, layer, edge, 1, (1,))

    def _text_spec(self) -> ModuleSpec:
        c = self.text
        h, mlp, heads, kv_heads = (
            c["hidden_size"],
            c["intermediate_size"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
        )
        kv = h // heads * kv_heads
        layer = 2 * h * h + h + 2 * (h * kv + kv) + 3 * h * mlp + 2 * h
        tied = bool(self.hf_config.get("tie_word_embeddings", False))
        edge = c["vocab_size"] * h * (1 if tied else 2) + h
        depth = c["num_hidden_layers"]
        return ModuleSpec(LLM, depth, h, heads, kv_heads, layer, edge, depth, (1,))
