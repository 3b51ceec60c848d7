"""Which files of a folder belong together, and of which split their names say that they are.

Names are read as `datasets` reads them: a word of `_WORDS` between characters that are no letters, in the name of a
folder or a file, and `data/NAME-00000-of-00012` is of split NAME. Where a name says two things, it is not `train`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

from dflop.data.patterns import expand
from dflop.errors import ConfigError

TRAIN = "train"
_WORDS = {
    "test": "test testing eval evaluation testset testmini testdev testa testb minitest holdout heldout",
    "validation": "validation valid dev val devset valset minival",
    TRAIN: "train training",
}
_BETWEEN = re.compile(r"[-._ 0-9]+")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*")
_NUMBER = re.compile(
    r"((?<![a-z])(?:v|stage|phase|fold|epoch|of)[-_.]?)?\d++(?!(?:k|m|b|pct|percent|shot|%)(?![a-z]))", re.IGNORECASE
)
"""A number of a shard; one of a version, of a stage, or of how many shards there are, has a word before it."""
_MAX_FILES = 100_000
_MAX_DEPTH = 3


def role_of(name: str) -> str:
    """`train`, `validation` or `test`, as a name says; empty: it says nothing."""
    words = set(_BETWEEN.split(name.lower().replace("held-out", "heldout").replace("held_out", "heldout")))
    return next((role for role, known in _WORDS.items() if words & set(known.split())), "")


def split_of(name: PurePath) -> str:
    """The split that a path, from the dataset's folder on, is of; empty: it says nothing."""
    if name.parts[:-1] == ("data",) and (match := _SHARD.fullmatch(name.name)):
        return match[1]
    roles = [role_of(part) for part in name.parts]
    return next((role for role in _WORDS if role in roles), "")


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
