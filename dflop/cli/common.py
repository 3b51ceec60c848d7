"""What every command shares: its options' names and words, and how to talk without touching stdout.

stdout is data, stderr is talk. `--json` is one object per line, `--parsable` the one thing that a script wants,
`--quiet` leaves errors on stderr and nothing else, `--dry-run` says what would be done and does nothing.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dflop.addresses import address_problem, hub_repo
from dflop.errors import ConfigError, path_problem
from dflop.run.messages import Say, say

if TYPE_CHECKING:
    from dflop.report.html_page import Page

Store = Annotated[Path, Parameter(help="Folder of the store.", env_var="DFLOP_STORE")]
DEFAULT_STORE = Path(".dflop/store")
Runs = Annotated[Path, Parameter(help="Folder of run directories.", env_var="DFLOP_RUNS")]
Run = Annotated[str, Parameter(help="Run directory, id, beginning of one, or `latest`.")]
RUNS = Path("runs")

ConfigFile = Annotated[Path, Parameter(help="Run configuration, a YAML file.")]
Overrides = Annotated[tuple[str, ...], Parameter(name="--set", help="Override a key: --set train.num_steps=20.")]
Form = Annotated[Literal["table", "csv", "json"], Parameter(name="--format", help="Form of the rows.")]
Json = Annotated[bool, Parameter(name="--json", help="One JSON object per line.")]
Quiet = Annotated[bool, Parameter(name=("--quiet", "-q"), help="Print only errors on stderr.")]
DryRun = Annotated[bool, Parameter(name=("--dry-run", "-n"), help="Show what would be done without doing it.")]

_MOST = 1e9


def talk(quiet: bool) -> Say:
    """Where a command's lines for people go: stderr, or nowhere."""
    return _say_nothing if quiet else say


def form_of(form: str, as_json: bool) -> str:
    """The form of rows that two options ask for; `--json` is short for `--format json`."""
    return "json" if as_json else form


def command_line(*words: str, **options: object) -> str:
    """A command to copy, with those options that are given: neither None, empty nor 0; a tuple repeats its option."""
    found = list(words)
    for name, value in options.items():
        for each in value if isinstance(value, tuple) else (value,) if value else ():
            found += [name, str(each)]
    return shlex.join(found)


def _say_nothing(_line: str) -> None:
    pass


def prepare_kernels() -> None:
    """To be called before anything is imported that has kernels."""
    from dflop.launch.kernels import kernel_environment

    os.environ |= kernel_environment(os.environ)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around what writes a file that a person named.

    Raises:
        ConfigError: the file system refused it.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write `{path}`: {error.strerror or error}", hint="name a file in a writable folder"
        ) from error


def write_page(path: Path, page: Page, say: Say) -> None:
    """Write a page to the file that a person named, and say so.

    Raises:
        ConfigError: the file system refused it.
    """
    from dflop import files
    from dflop.report.html_page import render_page

    with writing(path):
        files.replace(path, render_page(page))
    say(f"page: {path}")


def check_value(_type: object, value: object) -> None:
    """Refuses a path that no file can have and a number that nothing can wait for or count to, before anything does.

    Raises:
        ValueError: it is one.
    """
    if isinstance(value, tuple):
        for each in value:
            check_value(_type, each)
    if isinstance(value, Path) and (problem := path_problem(value) or address_problem(value)):
        raise ValueError(problem)
    if isinstance(value, int | float) and not -_MOST <= value <= _MOST:  # NaN is nowhere
        raise ValueError(f"a number between -{_MOST:g} and {_MOST:g} is expected")


def at_least(least: float) -> Callable[[object, object], None]:
    """A validator that refuses what `check_value` does, and numbers below `least`."""

    def check(type_: object, value: object) -> None:
        check_value(type_, value)
        if isinstance(value, int | float) and value < least:
            raise ValueError(f"a number of {least:g} or more is expected, not {value:g}")

    return check


UsdPerGpuHour = Annotated[
    float,
    Parameter(help="Price of a GPU-hour in US dollars, for the cost of a run or an epoch.", validator=at_least(0)),
]


def check_source(type_: object, value: object) -> None:
    """As `check_value`, of what may also be a name or an address on the Hugging Face hub.

    Raises:
        ValueError: it is neither that nor a path.
    """
    for each in value if isinstance(value, tuple) else (value,):
        if not isinstance(each, Path) or hub_repo(each, is_dataset=False) is None:
            check_value(type_, each)


def check_folder(path: Path | None) -> None:
    """Refuses a file whose folder is not there, before anything is computed for it.

    Raises:
        ConfigError: there is no such folder.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"no folder `{path.parent}` to write `{path.name}` into", hint="make it first")
