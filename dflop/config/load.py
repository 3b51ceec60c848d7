"""YAML files -> validated values, and back: composition of files and `--set`."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dflop.config.problems import config_error
from dflop.config.sections import Config, MixtureConfig, ModelConfig
from dflop.errors import ConfigError

_SECTION_FILES = ("model", "cluster", "dataset")


def load_mixture(path: Path) -> MixtureConfig:
    """Read and validate a mixture. Paths are left as they are written.

    Raises:
        ConfigError: naming file and key, with the valid keys where one is unknown.
    """
    try:
        mixture = MixtureConfig.model_validate(_read_yaml(path))
    except ValidationError as error:
        raise config_error(error, {"": path}, root=MixtureConfig) from None
    if not mixture.datasets:
        raise ConfigError("a mixture of nothing", where=f"{path}: datasets", hint="write one entry or more")
    return mixture


def load_model(path: Path) -> ModelConfig:
    """A model section that is a file of its own, such as those in `configs/models/`."""
    return ModelConfig.model_validate(_read_yaml(path))


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, compose and validate a run configuration.

    Args:
        path: YAML file.
        overrides: `a.b.c=value` strings; the value is parsed as YAML. A whole section may be another file.

    Raises:
        ConfigError: naming file and key, with the valid keys where one is unknown.
    """
    data = _read_yaml(path)
    files = {"": path}
    whole = [o for o in overrides if o.partition("=")[0] in _SECTION_FILES]
    for override in whole:
        _apply(data, override)
    for section in _SECTION_FILES:
        if isinstance(data.get(section), str):
            files[section] = _section_path(path, section, data[section])
            data[section] = _read_yaml(files[section])
    for override in overrides:
        if override not in whole:
            _apply(data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise config_error(error, files, [o.partition("=")[0] for o in overrides]) from None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal value."""
    yaml, text = YAML(), io.StringIO()
    yaml.allow_unicode = False  # escapes what YAML reads as a line break but Python does not, such as U+0085
    yaml.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from None
    try:
        data = _parse_yaml(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise ConfigError(_yaml_problem(error), where=f"{path}:{mark.line + 1}" if mark else str(path)) from None
    if not isinstance(data, dict):
        raise ConfigError("the file must hold a mapping of keys", where=str(path))
    return data


def _parse_yaml(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def _yaml_problem(error: YAMLError) -> str:
    return f"not valid YAML: {getattr(error, 'problem', None) or str(error).splitlines()[0]}"


def _section_path(parent: Path, section: str, name: str) -> Path:
    found = parent.parent / name
    if not found.is_file():
        raise ConfigError(
            f"file `{name}` of section `{section}` does not exist",
            where=f"{parent}: {section}",
            hint=f"the path is relative to {parent.parent}; or write the section in place",
        )
    return found


def _apply(data: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise ConfigError(f"cannot read override `{override}`", where="--set", hint="write it as section.key=value")
    node = data
    *parents, leaf = key.split(".")
    for name in parents:
        child = node.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"`{name}` is not a section", where=f"--set {override}")
        node = child
    try:
        node[leaf] = _parse_yaml(text)
    except YAMLError as error:
        raise ConfigError(_yaml_problem(error), where=f"--set {override}") from None
