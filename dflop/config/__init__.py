"""YAML that a person edits -> one frozen, validated configuration.

A section (`model`, `cluster`, `dataset`) may be written in place or be the path of another YAML file, relative to
the file that names it. Relative paths inside a file are relative to the working directory, as in every other tool.
Precedence: `--set a.b=value` over the file over defaults. Unknown keys are errors that list the valid ones; nothing
here imports torch, so a bad file is reported before anything slow happens.
"""

from __future__ import annotations

from dflop.config.load import dump_config, load_config, load_mixture, load_model
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
    TrainConfig,
)
from dflop.config.slurm import ContainerConfig, SlurmConfig

__all__ = [
    "ClusterConfig",
    "CompareConfig",
    "Config",
    "ContainerConfig",
    "DataProfileConfig",
    "DatasetConfig",
    "MixtureConfig",
    "MixtureEntryConfig",
    "ModelConfig",
    "ModelProfileConfig",
    "PlanConfig",
    "Section",
    "SlurmConfig",
    "TrainConfig",
    "dump_config",
    "load_config",
    "load_mixture",
    "load_model",
]
