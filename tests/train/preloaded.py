"""What ranks and commands of a test would import and work out by themselves, once, in the server that forks them."""

from __future__ import annotations

import contextlib
import gc
import importlib

import __main__

__main__.__file__ = __file__  # without one DuckDB takes this for a prompt, and draws progress bars into stdout
# On a borrowed GPU some are not there.
for name in (
    "pytest", "dflop.cli", "dflop.jobs.train", "dflop.report.run_page", "dflop.steps.session", "dflop.store.console",
    "dflop.views.explain_plan", "tests.train.synthetic", "transformers.conversion_mapping",
):  # fmt: skip
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(name)
FAMILIES = "internvl llama llava_onevision qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_vl qwen3_vl siglip"
for family in FAMILIES.split():
    importlib.import_module(f"transformers.models.{family}.modeling_{family}")
mapping = importlib.import_module("transformers.conversion_mapping")
mapping.get_checkpoint_conversion_mapping("")  # compiles its expressions for all families
gc.freeze()  # a collection in a forked process would copy all of it
