"""YAML files -> validated values, and back: composition of files and `--set`."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dflop.config.places import Key, Origins, Place, composed, lines_of
from dflop.config.sections import Config, MixtureConfig, ModelConfig, spellings
from dflop.errors import ConfigError, did_you_mean

SECTION_FILES = ("model", "cluster", "dataset")
"""Sections that may be files of their own."""
MAX_DEPTH = 32
MAX_VALUES = 100_000
_MAX_SHOWN = 60
_NO_TEXT = re.compile(r"[\ud800-\udfff]")
RENAMED = {"plan.layouts": "`plan.share_ranks`: [false] for split, [true] for colocated, [false, true] for both"}
"""Keys of earlier versions, and what took their place."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and where each of its keys was written."""

    config: Config
    origins: Origins


def load_mixture(path: Path) -> MixtureConfig:
    """Read and validate a mixture. Paths are left as they are written.

    Raises:
        ConfigError: naming file and key, with the valid keys where one is unknown.
    """
    data, places = _read(path)
    try:
        mixture = MixtureConfig.model_validate(data)
    except ValidationError as error:
        raise config_error(error, Origins(path, places), root=MixtureConfig) from None
    if not mixture.datasets:
        raise ConfigError("an empty mixture", where=f"{path}: datasets", hint="add at least one entry")
    return mixture


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file of another program holds.

    Raises:
        ConfigError: it cannot be read, or holds no mapping.
    """
    return _read(path)[0]


def load_model(path: Path) -> ModelConfig:
    """A model section that is a file of its own, such as those in `configs/models/`.

    Raises:
        ConfigError: naming file and key.
    """
    data, places = _read(path)
    try:
        return ModelConfig.model_validate(data)
    except ValidationError as error:
        raise config_error(error, Origins(path, places), root=ModelConfig) from None


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read, compose and validate a run configuration.

    Args:
        path: YAML file.
        overrides: `a.b.c=value` strings; the value is parsed as YAML. A whole section may be another file.

    Raises:
        ConfigError: naming file, line and key, with the valid keys where one is unknown.
    """
    return load_with_origins(path, overrides).config


def load_with_origins(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """As `load_config`, with the place of every key.

    Raises:
        ConfigError: as `load_config`.
    """
    data, origins = _compose(path, overrides)
    try:
        return Loaded(Config.model_validate(data), origins)
    except ValidationError as error:
        raise config_error(error, origins) from None


def _validated(values: Any) -> Any:
    try:
        return Config.model_validate(values) if isinstance(values, Mapping) else values
    except ValidationError as error:
        raise config_error(error, Origins(Path("parameters: config"))) from None


TypedConfig = Annotated[Config | None, BeforeValidator(_validated)]
"""A run configuration as a parameter of a function; a key that is unknown is a ConfigError with the valid ones."""


def load_problems(path: Path, overrides: Sequence[str] = ()) -> list[ConfigError]:
    """Everything that keeps a configuration from being loaded, an error each; none where it can be.

    A file that is missing or no YAML ends the search, and is the only one.
    """
    try:
        data, origins = _compose(path, overrides)
        Config.model_validate(data)
    except ValidationError as error:
        return config_errors(error, origins)
    except ConfigError as error:
        return [error]
    return []


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that `load_config` reads back to an equal value."""
    return dump_yaml(config.model_dump(mode="json"), width=80)


def dump_yaml(values: Mapping[str, Any], *, width: int = 100_000) -> str:
    """Plain values as YAML; texts longer than `width` characters go over several lines."""
    yaml, text = YAML(), io.StringIO()
    yaml.allow_unicode = False  # escapes what YAML reads as a line break but Python does not, such as U+0085
    yaml.width = width
    yaml.dump(dict(values), text)
    return text.getvalue()


def _compose(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Origins]:
    """Files and overrides laid over one another; nothing is judged."""
    data, places = _read(path)
    whole = [o for o in overrides if o.partition("=")[0] in SECTION_FILES]
    for override in whole:
        _apply(data, places, override)
    for section in SECTION_FILES:
        if isinstance(data.get(section), str):
            file = _section_path(path, section, data[section], places)
            data[section], inside = _read(file, above=(section,))
            _forget(places, (section,))
            places[(section,)] = Place(str(file), 1, 1)  # for what the file leaves out
            places.update(inside)
    for override in overrides:
        if override not in whole:
            _apply(data, places, override)
    return data, Origins(path, places)


def _read(path: Path, above: Key = ()) -> tuple[dict[str, Any], dict[Key, Place]]:
    """Content of a file, and the places of its keys, which begin with `above`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the configuration: {error.strerror}", where=str(path)) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 text: {error.reason} at byte {error.start}", where=str(path)) from None
    data, lines = _parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError("the file must hold a mapping of keys", where=str(path))
    return data, {(*above, *key): Place(str(path), line, len(above)) for key, line in lines.items()}


def _parse_yaml(text: str, where: str) -> tuple[Any, dict[Key, int]]:
    """Plain values of a text and the lines of its keys; `where` names it in errors."""
    reader = YAML(typ="safe", pure=True)
    try:
        root = composed(text, reader)  # refuses what would be too large before it is
        lines = lines_of(root)  # before values are constructed, which merges nodes
        data = reader.constructor.construct_document(root) if root is not None else None
        check_plain(data)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = f":{mark.line + 1}" if mark and where[:1] != "-" else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"not valid YAML: {problem}", where=f"{where}{at}") from None
    except NotPlain as error:
        at = f": {'.'.join(error.key)}" if error.key else ""
        raise ConfigError(str(error), where=f"{where}{at}") from None
    except RecursionError:
        raise ConfigError("not valid YAML: nested too deeply", where=where) from None
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
        # What looks like a number, a date or a tag of YAML's own and is none: the reader lets Python's errors through.
        raise ConfigError(f"not valid YAML: {shortened(str(error))}", where=where) from None
    return data, lines


def _section_path(parent: Path, section: str, name: str, places: dict[Key, Place]) -> Path:
    found = parent.parent / name
    if not found.is_file():
        raise ConfigError(
            f"file `{name}` of section `{section}` does not exist",
            where=Origins(parent, places).where(section),
            hint=f"the path is relative to {parent.parent}; or write the section in place",
        )
    return found


def _apply(data: dict[str, Any], places: dict[Key, Place], override: str) -> None:
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
    node[leaf], _ = _parse_yaml(text, f"--set {shortened(override)}")
    _forget(places, (*parents, leaf))
    places[(*parents, leaf)] = Place()


def _forget(places: dict[Key, Place], key: Key) -> None:
    for other in [known for known in places if known[: len(key)] == key]:
        del places[other]


class NotPlain(ValueError):
    """A value that no configuration holds.

    Args:
        key: Where it is.
        what: What is wrong with it.
    """

    def __init__(self, key: tuple[str, ...], what: str) -> None:
        super().__init__(what)
        self.key = key


def check_plain(value: Any) -> None:
    """Refuse what a configuration cannot hold, as YAML reads it.

    Raises:
        NotPlain: naming the key.
    """
    _check(value, (), [MAX_VALUES])


def _check(value: Any, key: tuple[str, ...], left: list[int]) -> None:
    left[0] -= 1
    if left[0] < 0:
        raise NotPlain(key, f"more than {MAX_VALUES} values, aliases counted as often as they are used")
    if len(key) > MAX_DEPTH:
        raise NotPlain(key[:3], f"nested more than {MAX_DEPTH} levels deep, or within itself")
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise NotPlain(key, f"a key that is not text but a {type(name).__name__}: write it in quotes")
            if problem := _problem(name):
                raise NotPlain(key, f"a key with {problem}")
            _check(inner, (*key, shortened(name)), left)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check(inner, (*key, str(number)), left)
    elif problem := _problem(value):
        raise NotPlain(key, problem)


def _problem(value: Any) -> str:
    """What is wrong with a single value; empty where nothing is."""
    if isinstance(value, str):
        found = _NO_TEXT.search(value)
        return f"the character U+{ord(found[0]):04X}, which is not allowed in text" if found else ""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, int):
        return "" if -(2**63) <= value < 2**63 else "a number that does not fit 64 bits"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is no finite number"
    return f"a {type(value).__name__}, which is not supported here: write it in quotes if it is text"


def shortened(text: str) -> str:
    """Text as an error shows it."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def config_error(error: ValidationError, origins: Origins, root: type[BaseModel] = Config) -> ConfigError:
    """The error a person reads: the first problem, and where the others are.

    Args:
        error: As pydantic raised it.
        origins: Where the keys were written.
        root: What was validated.
    """
    first, *others = config_errors(error, origins, root)
    if not others:
        return first
    hint = f"{first.hint}; " if first.hint else ""
    hint += f"and {len(others)} more: " + ", ".join(other.where for other in others)
    return ConfigError(first.what, where=first.where, hint=hint)


def config_errors(error: ValidationError, origins: Origins, root: type[BaseModel] = Config) -> list[ConfigError]:
    """An error for every problem, misspelt keys first.

    Args:
        error: As pydantic raised it.
        origins: Where the keys were written.
        root: What was validated.
    """
    # A misspelt key is often also a missing one: the first says more.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    return [_describe(e, origins, root) for e in errors]


def _describe(error: Any, origins: Origins, root: type[BaseModel]) -> ConfigError:
    loc = [str(part) for part in error["loc"]]
    where = origins.where(*loc)
    if error["type"] == "extra_forbidden":
        hint = RENAMED.get(".".join(loc)) or did_you_mean(loc[-1], _valid_keys(root, error["loc"][:-1]))
        return ConfigError(f"unknown key `{loc[-1]}`", where=where, hint=hint)
    if error["type"] == "missing":
        return ConfigError(f"missing key `{loc[-1]}`", where=where)
    message = str(error["msg"]).removeprefix("Value error, ")
    return ConfigError(f"{message} (got {_short(error['input'])})", where=where)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _valid_keys(section: type[BaseModel], loc: Sequence[str | int]) -> list[str]:
    for name in loc:
        if isinstance(name, int):
            continue  # of a list, whose elements are one class
        annotation = section.model_fields[name].annotation
        annotation = next(iter(get_args(annotation)), annotation)
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        section = annotation
    return [key for name, field in section.model_fields.items() for key in spellings(name, field)]
