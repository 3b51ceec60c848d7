"""Write a trained model as a folder that Hugging Face's `from_pretrained` loads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dflop.errors import TrainError
from dflop.models.family import Family
from dflop.models.weights import build_empty


def write_folder(
    family: Family, hf_config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], folder: Path,
    *, max_shard_bytes: int,
) -> None:  # fmt: skip
    """Write `config.json` and the weights, tied ones once and named as the family's published folders name them.

    Args:
        family: Names the transformers classes.
        hf_config: Keyword arguments of the config class, token ids included.
        weights: Every parameter by global name, in the type it is to have in the folder.
        folder: Made if need be.
        max_shard_bytes: A larger model becomes several files and an index.

    Raises:
        TrainError: the weights are not this model's.
    """
    model: Any = build_empty(family, hf_config, next(iter(weights.values())).dtype)
    expected = dict(model.named_parameters())
    if different := expected.keys() ^ weights.keys():
        few = ", ".join(f"`{name}`" for name in sorted(different)[:3])
        raise TrainError(f"{len(different)} parameters are not both in model and checkpoint, e.g. {few}")
    model.save_pretrained(folder, state_dict=dict(weights), max_shard_size=max_shard_bytes)
    for path in folder.glob("*.safetensors"):
        path.chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read what it writes
    # Made up from defaults: nobody has said how the model is to generate.
    (folder / "generation_config.json").unlink(missing_ok=True)
