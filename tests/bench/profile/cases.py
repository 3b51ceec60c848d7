"""Two small models that a CPU can run, and samples for them as real data has: many short, a few long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from ruamel.yaml import YAML

from dflop.models import load_family
from dflop.models.family import Family
from dflop.records import MediaItem, SampleShape

VOCAB_SIZE = 2048
ROOT = Path(__file__).parents[3]


def tiny_omni() -> tuple[Family, dict[str, int], tuple[str, ...]]:
    """The demo's model: (family, token entries, kinds of media)."""
    model = YAML(typ="safe").load(ROOT / "configs/models/tiny_omni.yaml")
    config = dict(model["hf_config"])
    config["text_config"] = {**config["text_config"], "vocab_size": VOCAB_SIZE}
    names = ("IMAGE", "VIDEO", "AUDIO", "vision_bos", "vision_eos", "audio_bos", "audio_eos")
    family = load_family(model["family"], config, model["media"])
    return family, family.token_ids({f"<|{n}|>": i + 1 for i, n in enumerate(names)}), ("image", "video", "audio")


def tiny_llava() -> tuple[Family, dict[str, int], tuple[str, ...]]:
    """A SigLIP tower over tiles of 64 patches and a Qwen2 decoder."""
    config = {
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[112 * h, 112 * w] for h in range(1, 4) for w in range(1, 4)],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 8,
            "num_attention_heads": 4, "image_size": 112, "patch_size": 14, "vision_use_head": False,
        },
        "text_config": {
            "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        },
    }  # fmt: skip
    family = load_family("llava_onevision", config, {"video_frames": 8})
    return family, family.token_ids({"<image>": 1, "<video>": 2}), ("image", "video")


MODELS = {"tiny omni": tiny_omni, "tiny LLaVA-OneVision": tiny_llava}


def make_shapes(family: Family, kinds: tuple[str, ...], num_samples: int, seed: int) -> list[SampleShape]:
    """Samples with no, one or two media and lognormal text."""
    rng = np.random.default_rng(seed)
    shapes = []
    for index in range(num_samples):
        num_items = int(rng.choice([0, 1, 2], p=[0.2, 0.6, 0.2]))
        items = tuple(_item(family, str(rng.choice(kinds)), num_items, rng) for _ in range(num_items))
        num_text = int(np.clip(rng.lognormal(4.5, 0.8), 8, 1500))
        shapes.append(
            SampleShape(
                profile_key="bench",
                sample_index=index,
                sample_id=str(index),
                num_text_tokens=num_text,
                num_supervised_tokens=max(1, num_text // 2),
                items=items,
                num_llm_tokens=num_text + sum(i.num_rows for i in items),
            )
        )
    return shapes


def _item(family: Family, kind: str, num_items: int, rng: np.random.Generator) -> MediaItem:
    width, height = (int(x) for x in rng.lognormal(5.2, 0.4, 2).clip(60, 500))
    num_frames = {"image": 1, "video": int(rng.integers(10, 60)), "audio": 0}[kind]
    duration_s = {"image": 0.0, "video": num_frames / 10, "audio": float(rng.uniform(0.5, 10.0))}[kind]
    placed = family.place(
        kind, width_px=width, height_px=height, num_frames=num_frames, duration_s=duration_s, num_images=num_items
    )
    return MediaItem(
        kind=kind, path="", width_px=width, height_px=height, num_frames=num_frames, duration_s=duration_s,
        module=placed.module, grid=placed.grid, num_tokens=placed.num_tokens, sum_sq_tokens=placed.sum_sq_tokens,
        num_rows=placed.num_rows,
    )  # fmt: skip
