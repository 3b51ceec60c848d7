"""What is wrong with a command line, in one to three lines, with the word that was probably meant."""

from __future__ import annotations

import re
import sys
from importlib import metadata

from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError, ValidationError
from packaging.requirements import Requirement

from dflop.errors import ConfigError, did_you_mean


def usage_error(error: CycloptsError) -> ConfigError:
    """What cyclopts refused, as an error of ours: exit code 2, and what to type instead."""
    command = " ".join(["dflop", *(error.command_chain or ())])
    if isinstance(error, UnknownCommandError) and error.app is not None and error.unused_tokens:
        word = error.unused_tokens[0]
        if word.startswith("-"):
            return ConfigError(f"`{command}` takes no option {word}", hint=f"{command} --help")
        return ConfigError(
            f"no command `{command} {word}`",
            hint=did_you_mean(word, [name for name in error.app if not name.startswith("-")]),
        )
    if isinstance(error, UnknownOptionError):
        word = error.token.keyword or error.token.value
        options = sorted({name for argument in error.argument_collection if argument.parse for name in argument.names})
        valid = [option for option in options if option.startswith("-")]
        return ConfigError(f"`{command}` takes no option {word}", hint=did_you_mean(word, valid))
    if isinstance(error, UnusedCliTokensError):
        words = " ".join(error.unused_tokens or ())
        return ConfigError(f"`{command}` got unexpected arguments: {words}", hint=f"{command} --help")
    if isinstance(error, ValidationError) and error.argument is not None and error.exception_message:
        name = error.argument.name  # not the value, in which a path has lost a slash of an address
        return ConfigError(_one_line(error.exception_message), where=name, hint=f"{command} --help")
    return ConfigError(_one_line(str(error)).rstrip("."), hint=f"{command} --help")


def missing_package(error: ModuleNotFoundError) -> ConfigError | None:
    """A command that needs an extra which is not installed; None where dflop's metadata names no such package."""
    module = (error.name or "").partition(".")[0]
    try:
        wanted = [Requirement(text) for text in metadata.requires("dflop") or []]
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return None
    found: dict[str, int] = {}
    for extra in metadata.metadata("dflop").get_all("Provides-Extra") or []:
        of_extra = [r for r in wanted if r.marker is not None and r.marker.evaluate({"extra": extra})]
        if any(re.split("[.-]", r.name)[0] == module for r in of_extra):
            found[extra] = len(of_extra)
    if not found:
        return None
    hint = f"pip install 'dflop[{min(found, key=found.__getitem__)}]', in {sys.prefix}"  # the smallest that has it
    return ConfigError(f"this command needs the package {module}", hint=hint)


def _one_line(text: str) -> str:
    flat = " ".join(text.split())
    return flat[:1].lower() + flat[1:] if flat[1:2].islower() else flat
