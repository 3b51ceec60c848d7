"""What every command shares: where the store is, and how to talk without touching stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.errors import ConfigError

Store = Annotated[Path, Parameter(help="Folder of the store.", env_var="DFLOP_STORE")]
DEFAULT_STORE = Path(".dflop/store")


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


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
            f"cannot write `{path}`: {error.strerror or error}", hint="name a file in a folder that you may write to"
        ) from error


def check_folder(path: Path | None) -> None:
    """Refuses a file whose folder is not there, before anything is computed for it.

    Raises:
        ConfigError: there is no such folder.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder `{path.parent}` to write `{path.name}` into", hint="make it first")
