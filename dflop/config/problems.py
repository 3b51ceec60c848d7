"""What pydantic found wrong, in words that name the file, the line, the key and the nearest valid key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from dflop.config.places import Origins
from dflop.config.sections import Config, spellings
from dflop.errors import ConfigError, did_you_mean


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


RENAMED = {"plan.layouts": "`plan.share_ranks`: [false] for split, [true] for inline, [false, true] for both"}
"""Keys of earlier versions, and what took their place."""


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
