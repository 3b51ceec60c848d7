"""JSON schemas of the YAML that people edit, for editors: completion, descriptions, and red lines under typing errors.

A section that may be a file of its own is an object or a path.
"""

from __future__ import annotations

from typing import Any

from dflop.config.load import SECTION_FILES
from dflop.config.section import Section
from dflop.config.sections import ClusterConfig, Config, DatasetConfig, ModelConfig
from dflop.errors import ConfigError, did_you_mean

_FILES: dict[str, type[Section]] = {
    "run": Config, "model": ModelConfig, "cluster": ClusterConfig, "dataset": DatasetConfig,
}  # fmt: skip


def json_schema(name: str = "run") -> dict[str, Any]:
    """The schema of a kind of file.

    Args:
        name: `run`, or a section that is a file of its own: `model`, `cluster`, `dataset`.

    Raises:
        ConfigError: there is no such kind of file.
    """
    if name not in _FILES:
        raise ConfigError(f"no schema named `{name}`", hint=did_you_mean(name, _FILES))
    schema = _FILES[name].model_json_schema()
    for section in SECTION_FILES if name == "run" else ():
        field = schema["properties"][section]
        path = {"type": "string", "description": "Path of a YAML file, relative to this one."}
        schema["properties"][section] = {"anyOf": [field, path]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"dflop {name} configuration",
        **{key: value for key, value in schema.items() if key != "title"},
    }
