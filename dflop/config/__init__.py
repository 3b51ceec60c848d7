"""YAML that a person edits -> one frozen, validated configuration.

A section (`model`, `cluster`, `dataset`) may be written in place or be the path of another YAML file, relative to
the file that names it. Relative paths inside a file are relative to the working directory, as in every other tool.
Precedence: `--set a.b=value` over the file over defaults. Unknown keys are errors that list the valid ones; nothing
here imports torch, so a bad file is reported before anything slow happens. Where a value was written is kept beside
the configuration (`places.py`), so that what later turns out to be wrong with it names file, line and key.
"""

from __future__ import annotations

from dflop.config.json_schema import json_schema
from dflop.config.load import (
    Loaded,
    TypedConfig,
    dump_config,
    dump_yaml,
    load_config,
    load_mixture,
    load_model,
    load_problems,
    load_with_origins,
    read_yaml,
)
from dflop.config.lora_section import LoraConfig
from dflop.config.places import Origins
from dflop.config.section import Section
from dflop.config.sections import (
    ClusterConfig,
    CompareConfig,
    Config,
    DataProfileConfig,
    DatasetConfig,
    MixtureConfig,
    MixtureEntryConfig,
    ModelConfig,
    ModelProfileConfig,
    PlanConfig,
)
from dflop.config.show import annotated, shown_config, shown_keys
from dflop.config.slurm_section import ContainerConfig, SlurmConfig
from dflop.config.train_section import GroupConfig, TrainConfig, ValidationConfig

__all__ = [
    "ClusterConfig",
    "CompareConfig",
    "Config",
    "ContainerConfig",
    "DataProfileConfig",
    "DatasetConfig",
    "GroupConfig",
    "Loaded",
    "LoraConfig",
    "MixtureConfig",
    "MixtureEntryConfig",
    "ModelConfig",
    "ModelProfileConfig",
    "Origins",
    "PlanConfig",
    "Section",
    "SlurmConfig",
    "TrainConfig",
    "TypedConfig",
    "ValidationConfig",
    "annotated",
    "dump_config",
    "dump_yaml",
    "json_schema",
    "load_config",
    "load_mixture",
    "load_model",
    "load_problems",
    "load_with_origins",
    "read_yaml",
    "shown_config",
    "shown_keys",
]
