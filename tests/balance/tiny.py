"""Tiny models with random weights of four types, and batches of a few samples with images, videos or neither."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.models.generic.configs import IDS, MROPE, NATIVE, PARTS, TEXT, VIT

IMAGE, VIDEO, FIRST_TEXT = 3, 4, 10
WINDOWS = {"fullatt_block_indexes": [1], "window_size": 28, "patch_size": 7, "num_heads": 2}
PATCHES = NATIVE | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
CONFIGS = {
    "qwen2_5_vl": {
        **IDS, "vision_config": {**NATIVE, **WINDOWS},
        "text_config": {**TEXT, "rope_parameters": {"type": "mrope", **MROPE}},
    },
    "qwen3_vl": {**IDS, "vision_config": PATCHES, "text_config": {**TEXT, "rope_parameters": MROPE}},
    "qwen3_5": PARTS["qwen3_5"],
    "llava": {
        "image_token_index": IMAGE, "vision_config": {"model_type": "clip_vision_model", **VIT, "patch_size": 14},
        "text_config": {"model_type": "llama", **TEXT},
    },
}  # fmt: skip
TEXTS = {"windows": ("mistral", {**TEXT, "sliding_window": 8})}
"""Models without media: model type and config."""
SIDE = 2
"""Patches per row of the LLM's tokens, each way."""


def make_model(kind: str, seed: int = 0) -> Any:
    """In float64, with attention that is plain matrix products."""
    import transformers  # seconds of every collection

    torch.manual_seed(seed)
    model_type, stated = TEXTS.get(kind) or (kind, CONFIGS[kind])
    config = transformers.CONFIG_MAPPING[model_type].from_dict({"model_type": model_type, **stated})
    auto = transformers.AutoModelForCausalLM if kind in TEXTS else transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").double()
    for name, p in model.named_parameters():
        p.data += 0.05 * torch.randn(p.shape)
        if name.endswith("A_log"):  # states that forget at once leave gradients that are rounding alone
            p.data -= 3.0
    return model.train()


def sample(
    kind: str, model: Any, seed: int, images: list[int], videos: list[int], num_text: int = 12
) -> dict[str, Tensor]:
    """One sample as a processor makes it; an image of size n has 2 n rows, a video n frames of 2."""
    rng = np.random.default_rng(seed)
    text = iter(rng.integers(FIRST_TEXT, 160, 400).tolist())
    if kind == "windows":
        rows, grids, values = [], {}, {}
    elif kind == "llava":
        rows, grids, pixels = [16] * len(images), {}, [rng.standard_normal((1, 3, 56, 56)) for _ in images]
        values = {"pixel_values": pixels}
    else:
        grids = {"image": [(1, SIDE, 2 * SIDE * n) for n in images], "video": [(n, SIDE, 2 * SIDE) for n in videos]}
        rows = [t * h * w // SIDE**2 for of in grids.values() for t, h, w in of]
        vision = model.config.vision_config
        width = 3 * vision.patch_size**2 * vision.temporal_patch_size
        values = {"image": "pixel_values", "video": "pixel_values_videos"}
        values = {
            name: [rng.standard_normal((t * h * w, width)) for t, h, w in grids[of]] for of, name in values.items()
        }
    pads = [(IMAGE, count) for count in rows[: len(images)]]
    # Qwen3's processors write a video's frames one by one.
    frames = videos if kind.startswith("qwen3") else [1] * len(videos)
    pads += [(VIDEO, count // n) for count, n in zip(rows[len(images) :], frames, strict=True) for _ in range(n)]
    ids = [next(text) for _ in range(2)]
    for pad, count in pads:
        ids += [IDS["vision_start_token_id"], *[pad] * count, IDS["vision_end_token_id"]]
    ids += [next(text) for _ in range(num_text)]
    found = {"input_ids": torch.tensor([ids])}
    found["labels"] = torch.where(found["input_ids"] < FIRST_TEXT, -100, found["input_ids"])
    found["labels"][0, :3] = -100
    found["mm_token_type_ids"] = (found["input_ids"] == IMAGE).long() + 2 * (found["input_ids"] == VIDEO).long()
    found |= {f"{of}_grid_thw": torch.tensor(grid) for of, grid in grids.items() if grid}
    found |= {name: torch.tensor(np.concatenate(of)) for name, of in values.items() if of}
    if kind in ("llava", "windows"):
        del found["mm_token_type_ids"]
    return found
