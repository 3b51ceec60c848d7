"""What every rank of a test would import and work out by itself, done once in the server that they are forked from."""

from __future__ import annotations

import importlib

import pytest  # noqa: F401, with the modules that ranks' functions are in
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from dflop.jobs import train  # noqa: F401
from tests.train import synthetic  # noqa: F401

for family in (
    "internvl",
    "llama",
    "llava_onevision",
    "qwen2",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen3_vl",
    "siglip",
):
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
get_checkpoint_conversion_mapping("")  # compiles its expressions for all families
