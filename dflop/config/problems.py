"""What pydantic found wrong, in words that name the file, the key and the nearest valid key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dflop.config.sections import Config, spellings
from dflop.errors import ConfigError, did_you_mean


def config_error(
    error: ValidationError, files: Mapping[str, Path], overridden: Sequence[str] = (), root: type[BaseModel] = Config
) -> ConfigError:
    """The error a person reads.

    Args:
        error: As pydantic raised it.
        files: Section to the file it came from; the empty name is the main file.
        overridden: Keys that `--set` gave.
        root: What was validated.
    """
    # A misspelt key is often also a missing one: the first says more.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    problems = [_describe(e, files, overridden, root) for e in errors]
    what, where, hint = problems[0]
    if len(problems) > 1:
        hint += f"{'; ' if hint else ''}and {len(problems) - 1} more: " + ", ".join(p[1] for p in problems[1:])
    return ConfigError(what, where=where, hint=hint)


def _describe(
    error: Any, files: Mapping[str, Path], overridden: Sequence[str], root: type[BaseModel]
) -> tuple[str, str, str]:
    loc = [str(part) for part in error["loc"]]
    key = ".".join(loc)
    section = loc[0] if loc and loc[0] in files else ""
    where = f"{files[section]}: {'.'.join(loc[1:]) if section else key}"
    if any(key == k or key.startswith(f"{k}.") for k in overridden):
        where = f"--set {key}"
    if error["type"] == "extra_forbidden":
        return f"unknown key `{loc[-1]}`", where, did_you_mean(loc[-1], _valid_keys(root, error["loc"][:-1]))
    if error["type"] == "missing":
        return f"missing key `{loc[-1]}`", where, ""
    message = str(error["msg"]).removeprefix("Value error, ")
    return f"{message} (got {_short(error['input'])})", where, ""


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
