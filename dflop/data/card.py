"""The card of a dataset: what lies at a path, and which rows of it are trained on.

Files are opened, and a few rows of each part read as training would read them. Rows are counted, but of many files in
proportion to their sizes from some of them: counting a thousand tar files takes longer than a plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflop.data.annotations import BadSample
from dflop.data.formats.row_source import RowSource
from dflop.data.formats.source import open_source
from dflop.data.layouts import layout_of
from dflop.data.mixture import MixtureEntry, check_ignored, select
from dflop.data.parts import Layout, Part, chosen, entries
from dflop.errors import ConfigError, DataError, printable

_MAX_COUNTED = 32
_NUM_SAMPLED_FILES = 8
_NUM_SAMPLED_ROWS = 8
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """What lies at a path, and what of it is trained on."""

    layout: Layout
    taken: tuple[Part, ...]
    left: tuple[Part, ...]
    split: str
    """That was asked for."""

    @property
    def annotations(self) -> str:
        """What `dataset.annotations` has to be."""
        is_plain = self.layout.kind in ("files", "media folder with metadata") and len(self.taken) == 1
        return self.taken[0].pattern if is_plain else str(self.layout.path)

    @property
    def written_split(self) -> str:
        """What `dataset.split` has to be."""
        if self.annotations == str(self.layout.path) and not self.layout.is_named:
            return self.split or ",".join(dict.fromkeys(of.split or of.name for of in self.taken))
        mapping = self.taken[0].entry.mapping
        return mapping.list_name if mapping is not None else ""

    @property
    def num_rows(self) -> int:
        """Of an epoch."""
        return sum((part.num_rows or 0) * part.repeats for part in self.taken)

    def lines(self) -> Iterator[str]:
        """What a person should know: the layout, what is taken, what is left and why."""
        about = "about " * any(part.is_estimate for part in self.taken)
        form = self.taken[0].format if len(self.taken) == 1 else ""
        names = {part.split for part in self.taken} - {""}
        split = f", split {', '.join(sorted(names))}" * bool(names)
        what = [self.layout.kind] * (self.layout.kind != "files" or not form) + [form] * bool(form)
        yield f"{printable(self.annotations)}, {', '.join(what)}, {about}{self.num_rows} rows{split}"
        yield from (f"taken: {part}" for part in self.taken[:_MAX_SHOWN] if len(self.taken) > 1)
        # Of plain files, many are no rows at all.
        left = [part for part in self.left if self.layout.is_index or not part.problem]
        for part in left[:_MAX_SHOWN]:
            yield f"not taken: {part}" + f": {part.problem}" * bool(part.problem)
        if (more := len(left) - _MAX_SHOWN) > 0:
            yield f"not taken: {more} more, see `dflop data card {printable(str(self.layout.path))}`"
        yield from self.layout.notes


def entries_of(
    path: Path, media_root: Path, split: str = "", ignored_keys: tuple[str, ...] = ()
) -> tuple[MixtureEntry, ...]:
    """What a configuration's `dataset` section stands for; files are read only where their names leave it open.

    Raises:
        ConfigError: there is nothing, a file of the layout is not there, it is open what is to be trained on, or a key
            cannot be ignored.
    """
    check_ignored(ignored_keys)
    layout = layout_of(path)
    taken: tuple[Part, ...] = ()
    with contextlib.suppress(ConfigError):
        taken = chosen(layout, split)
    if not taken or any(part.problem for part in taken):
        taken = read_card(path, split).taken
    return entries(taken, media_root, ignored_keys)


def read_card(path: Path, split: str = "") -> DatasetCard:
    """The card of what lies at a path.

    Args:
        path: A file, a pattern of several, a mixture, a folder, or a file that describes datasets.
        split: Which to train on, or several with commas; empty: the one for training.

    Raises:
        ConfigError: there is nothing, nothing that could be read as training data, or it is open what is meant.
    """
    found = layout_of(path)
    layout = replace(found, parts=tuple(map(_looked_at, found.parts)))
    if all(part.problem for part in layout.parts):
        raise _nothing(layout, layout.parts)
    taken = chosen(layout, split)
    if bad := [part for part in taken if part.problem]:
        raise _nothing(layout, bad)
    return DatasetCard(layout, taken, tuple(part for part in layout.parts if part not in taken), split)


def _nothing(layout: Layout, parts: Sequence[Part]) -> ConfigError:
    reasons = "; ".join(f"{part.name}: {part.problem}" for part in parts[:3])
    return ConfigError(
        f"no training data at `{layout.path}`" + f": {reasons}" * bool(reasons),
        where="dataset.annotations",
        hint="layouts, formats and rows that are read: docs/formats.md",
    )


def _looked_at(part: Part) -> Part:
    files, entry = part.entry.paths, part.entry
    if part.problem or not files:
        return replace(part, problem=part.problem or "no files")
    is_counted = part.num_rows is None and len(files) > _MAX_COUNTED
    opened = files[:: len(files) // _NUM_SAMPLED_FILES] if is_counted else files if part.num_rows is None else files[:1]
    try:
        sources = [open_source(file, entry.ignored_keys, entry.mapping) for file in opened]
        total_bytes, opened_bytes = (sum(file.stat().st_size for file in group) for group in (files, opened))
    except (ConfigError, DataError) as error:
        return replace(part, problem=f"{error.what}" + f" ({error.hint})" * bool(error.hint))
    except OSError as error:
        return replace(part, problem=f"cannot be read: {error.strerror}")
    counted = sum(map(len, sources))
    num_rows = part.num_rows if part.num_rows is not None else round(counted * total_bytes / max(1, opened_bytes))
    columns, problem = _read(sources[0])
    num_rows = len(select(num_rows, entry.strategy))
    return replace(part, num_rows=num_rows, is_estimate=is_counted, columns=columns, problem=problem)


def _read(source: RowSource) -> tuple[tuple[str, ...], str]:
    """(columns of some rows, why none of them is a sample)."""
    columns: dict[str, None] = {}
    problems: list[str] = []
    rows = range(0, len(source), max(1, len(source) // _NUM_SAMPLED_ROWS))[:_NUM_SAMPLED_ROWS]
    for index in rows:
        try:
            columns |= dict.fromkeys(map(str, source.row(index)))
            source.sample(index)
        except BadSample as error:
            # Rows that a key alone makes bad are training data: which keys they can do without is for a person to say.
            problems += [] if error.key else [f"row {index}: {error.reason}"]
    if len(problems) < len(rows):
        return tuple(columns), ""
    return tuple(columns), f"{problems[0]} (keys: {', '.join(columns)})" if problems else "no rows"
