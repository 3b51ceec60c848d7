"""What a dataset consists of, and which of it is trained on: never a split for tests that nobody asked for.

Names of splits are read as `datasets` reads them: a word of `_WORDS` between characters that are no letters, in the
name of a folder or a file, and `data/NAME-00000-of-00012` is of split NAME. Where a name says two things, it is not
`train`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from dflop.data.mixture import MixtureEntry
from dflop.errors import ConfigError, printable

_FORMATS = {
    ".parquet": "Parquet", ".arrow": "Arrow", ".tar": "WebDataset tar", ".csv": "CSV", ".tsv": "TSV", ".mds": "MDS",
    ".jsonl": "JSON Lines", ".ndjson": "JSON Lines", ".json": "JSON",
}  # fmt: skip
_MAX_SHOWN = 8
TRAIN = "train"
_WORDS = {
    "test": "test testing eval evaluation testset testmini testdev testa testb minitest holdout heldout",
    "validation": "validation valid dev val devset valset minival",
    TRAIN: "train training",
}
_BETWEEN = re.compile(r"[-._ 0-9]+")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}.*\..*")


@dataclass(frozen=True, slots=True)
class Part:
    """Files of one split that are read in the same way."""

    name: str
    split: str
    """As the layout calls it; empty: nothing says."""
    entry: MixtureEntry
    pattern: str = ""
    """A path that stands for the files."""
    is_rooted: bool = False
    """Whether the layout says where the media lie."""
    repeats: int = 1
    """How often every row comes in an epoch."""
    num_rows: int | None = None
    """As the layout states it, or as they were counted."""
    is_estimate: bool = False
    columns: tuple[str, ...] = ()
    problem: str = ""
    """Why it cannot be trained on."""

    @property
    def format(self) -> str:
        """Format of its files, as people call it."""
        name = self.entry.paths[0].name.lower() if self.entry.paths else ""
        return next((found for suffix, found in _FORMATS.items() if suffix in name), "")

    def __str__(self) -> str:
        files = f" in {len(self.entry.paths)} files" * (len(self.entry.paths) > 1)
        times = f", {self.repeats} times each" * (self.repeats > 1)
        split = f", split {self.split}" * bool(self.split)
        rows = f"{'about ' * self.is_estimate}{self.num_rows or 0} rows{files}{times}{split}"
        return ", ".join(filter(None, (printable(self.name), self.format, rows)))


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies at a path."""

    path: Path
    kind: str
    parts: tuple[Part, ...]
    is_index: bool = False
    """Whether the parts of a split belong together, as an index says."""
    is_named: bool = False
    """Whether a person named what is to be trained on, whatever its split."""
    notes: tuple[str, ...] = ()


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


def chosen(layout: Layout, split: str) -> tuple[Part, ...]:
    """The parts to train on: those of `split`, a name or several with commas, else of `train`, else those of no split.

    Raises:
        ConfigError: nothing or several could be meant.
    """
    parts, words = layout.parts, split.split(",")
    usable = [p for p in parts if not p.problem]
    if split:
        taken = (
            [p for p in parts if p.name in words or (p.split in words and p in usable)]
            or [p for p in usable if role_of(p.split) in words]
            or [p for p in parts if p.split in words]
        )
    elif layout.is_named:
        taken = list(parts)
    else:
        taken = [p for p in usable if role_of(p.split) == TRAIN] or [p for p in usable if not p.split]
    if not taken:
        names = dict.fromkeys(p.split or p.name for p in parts)
        raise ConfigError(
            f"no split `{split or TRAIN}` in `{layout.path}`, but {_listed(parts)}",
            where="dataset.split",
            hint="; or ".join([*(f"--split {name}" for name in names)][:_MAX_SHOWN]) or "name a file",
        )
    splits = {p.split for p in taken}
    if len(taken) > 1 and not (split or layout.is_named or (layout.is_index and len(splits) == 1)):
        ways = [f"--split {p.split}" if len(splits) == len(taken) else f"--data {p.pattern}" for p in taken]
        raise ConfigError(
            f"`{layout.path}` has several parts that could be meant: {_listed(taken)}",
            where="dataset.annotations",
            hint="; or ".join(ways[:_MAX_SHOWN]) + "; a pattern (`*`, `{a,b}`) takes several",
        )
    return tuple(taken)


def entries(parts: Sequence[Part], media_root: Path, ignored_keys: tuple[str, ...] = ()) -> tuple[MixtureEntry, ...]:
    """What is read of some parts, each as often as its rows are to come."""
    return tuple(
        replace(p.entry, media_root=p.entry.media_root if p.is_rooted else media_root, ignored_keys=ignored_keys)
        for p in parts
        for _ in range(p.repeats)
    )


def _listed(parts: Sequence[Part]) -> str:
    rows = [
        p.name + (f" ({p.problem})" if p.problem else f" ({p.num_rows} rows)" if p.num_rows is not None else "")
        for p in parts[:_MAX_SHOWN]
    ]
    return ", ".join(rows) + f" and {len(parts) - len(rows)} more" * (len(parts) > len(rows))
