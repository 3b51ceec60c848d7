"""Files that a path with braces or a glob in it stands for."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflop.errors import ConfigError

_BRACES = re.compile(r"\{([^{}]*,[^{}]*|-?\d+\.\.-?\d+)\}", re.ASCII)
_MAX_FILES = 1_000_000


def expand(pattern: str, folder: Path) -> tuple[Path, ...]:
    """Files of a path, in the order of its braces (`{a,b}`, `{000..012}`), those of a glob by name.

    A relative path is looked up in the working directory, and in `folder` if it is not there. A path that exists as
    it is written is taken as it is.

    Raises:
        ConfigError: there is no such file.
    """
    if os.path.exists(whole := relative_to(Path(pattern), folder)):
        return (whole,)
    return tuple(itertools.chain.from_iterable(_matches(path, pattern, folder) for path in _braces(pattern)))


def relative_to(path: Path, folder: Path) -> Path:
    """`path` as seen from the working directory, or from `folder` if only that has it."""
    # Not Path.exists, which raises where a pattern is longer than a name can be.
    return folder / path if not os.path.exists(path) and os.path.exists(folder / path) else path


def _braces(pattern: str) -> Iterator[str]:
    """What a shell makes of the braces, in its order."""
    match = _BRACES.search(pattern)
    if match is None:
        yield pattern
        return
    first, _, last = match[1].partition("..")
    if "," in match[1]:
        words: Sequence[str] = match[1].split(",")
    else:
        start, stop = int(first), int(last)
        if abs(stop - start) >= _MAX_FILES:
            raise ConfigError(f"more than {_MAX_FILES} files", where=pattern)
        padded = any(len(edge.lstrip("-")) > 1 and edge.lstrip("-")[0] == "0" for edge in (first, last))
        width = max(len(first), len(last)) if padded else 0
        step = 1 if stop >= start else -1
        words = [f"{number:0{width}d}" for number in range(start, stop + step, step)]
    for word in words:
        yield from _braces(pattern[: match.start()] + word + pattern[match.end() :])


def _matches(path: str, pattern: str, folder: Path) -> list[Path]:
    found = relative_to(Path(path), folder)
    if os.path.exists(found):
        return [found]
    for place in (path, os.path.join(glob.escape(str(folder)), path)):
        if files := sorted(glob.glob(place, recursive=True)):
            return [Path(file) for file in files]
    raise ConfigError(
        f"no file `{path}`",
        where=pattern,
        hint=f"searched in {Path.cwd()}" + f" and {folder}" * (not os.path.isabs(path)),
    )
