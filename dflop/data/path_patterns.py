"""Files that a path with braces or a glob in it stands for, and those of a folder that belong together."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflop.errors import ConfigError

_BRACES = re.compile(r"\{([^{}]*,[^{}]*|-?\d+\.\.-?\d+)\}", re.ASCII)
_MAX_EXPANDED = 1_000_000
_NUMBER = re.compile(
    r"((?<![a-z])(?:v|stage|phase|fold|epoch|of)[-_.]?)?\d++(?!(?:k|m|b|pct|percent|shot|%)(?![a-z]))", re.IGNORECASE
)
"""A number of a shard; one of a version, of a stage, or of how many shards there are, has a word before it."""
_MAX_FILES = 100_000
_MAX_DEPTH = 3


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
        if abs(stop - start) >= _MAX_EXPANDED:
            raise ConfigError(f"more than {_MAX_EXPANDED} files", where=pattern)
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


def row_files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files with one of these suffixes down to the third level, in order of their names; none that is hidden.

    Raises:
        ConfigError: there are too many.
    """
    number = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if name[0] != "." and name[:2] != "__" and depth < _MAX_DEPTH - 1)
        for name in sorted(names):
            if name[0] != "." and name.lower().endswith(suffixes) and os.path.isfile(os.path.join(place, name)):
                number += 1
                yield Path(place, name)
        if number > _MAX_FILES:
            raise ConfigError(f"more than {_MAX_FILES} files in `{folder}`", where="--data", hint="name a pattern")


def groups(folder: Path, files: Sequence[Path]) -> list[tuple[Path, ...]]:
    """Files whose names, from `folder` on, differ in numbers of shards alone."""
    found: dict[str, list[Path]] = {}
    for file in files:
        name = str(file.relative_to(folder))
        found.setdefault(_NUMBER.sub(lambda match: match[0] if match[1] else "#", name), []).append(file)
    return [tuple(group) for group in found.values()]


def pattern_of(files: Sequence[Path]) -> str:
    """One path with a glob or braces that stands for these files and no others.

    Raises:
        ConfigError: there is none: a name has the signs of a pattern in it.
    """
    texts = [str(file) for file in files]
    pieces = [re.split(r"(\d+)", text) for text in texts]
    starred = "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*pieces, strict=False))
    marked = "".join(parts[0] if len(set(parts)) == 1 else "?" * len(parts[0]) for parts in zip(*pieces, strict=False))
    folder = os.path.commonpath([os.path.dirname(text) for text in texts])
    listed = os.path.join(folder, "{" + ",".join(os.path.relpath(text, folder) for text in texts) + "}")
    for pattern in (starred, marked, listed):
        try:
            if sorted(expand(pattern, Path())) == sorted(files):
                return pattern
        except ConfigError:
            pass
    raise ConfigError(f"`{texts[0]}` has signs of a pattern in its name", where="--data", hint="rename it")


def missing_shards(files: Sequence[Path]) -> str:
    """What to say where names tell of more shards than there are; empty: nothing."""
    found = re.search(r"-of-(\d+)", files[0].name)
    if found is None or int(found[1]) <= len(files):
        return ""
    return f"{len(files)} of {int(found[1])} shards are there: {files[0].name}"
