"""What ranks and commands of a test would import and work out by themselves, once, in the server that forks them."""

from __future__ import annotations

import gc
import importlib

import pytest  # noqa: F401, with the modules that ranks' functions are in
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import dflop.cli  # noqa: F401, what commands are forked with
from dflop.jobs import train  # noqa: F401, with numba and SciPy
from dflop.report import run_page  # noqa: F401, with matplotlib
from dflop.steps import session  # noqa: F401, with numba and SciPy
from dflop.store import console  # noqa: F401, with DuckDB and Arrow
from dflop.views import explain_plan  # noqa: F401, with numba and SciPy
from tests.train import synthetic  # noqa: F401

for family in (
    "internvl",
    "llama",
    "llava_onevision",
    "qwen2",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_vl",
    "siglip",
):
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
get_checkpoint_conversion_mapping("")  # compiles its expressions for all families
gc.freeze()  # a collection in a forked process would copy all of it
