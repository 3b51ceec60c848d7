"""What is wrong with a command line, in one to three lines, with the word that was probably meant."""

from __future__ import annotations

from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

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
    return ConfigError(_one_line(str(error)), hint=f"{command} --help")


def _one_line(text: str) -> str:
    flat = " ".join(text.split()).rstrip(".")
    return flat[:1].lower() + flat[1:] if flat[1:2].islower() else flat
