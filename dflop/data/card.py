"""The card of a dataset: what lies at a path, and which rows of it are trained on.

For its layout names and indices are read. For its card files are opened, and a few rows of each part read as training
would read them. Rows are counted, but of many files in proportion to their sizes from some of them: counting a thousand
tar files takes longer than a plan.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dflop.config import load_mixture
from dflop.data.annotations import BadSample
from dflop.data.formats.annotation_file import list_names
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.formats.row_source import RowSource
from dflop.data.formats.source import ROW_FILES, open_source
from dflop.data.indices import described, indexed
from dflop.data.media_value import EXTENSIONS
from dflop.data.mixture import MixtureEntry, select
from dflop.data.parts import Layout, Part, chosen, entries, split_of
from dflop.data.path_patterns import expand, groups, missing_shards, pattern_of, relative_to, row_files
from dflop.data.row_keys import never_ignored
from dflop.errors import ConfigError, DataError, printable

_MIXTURES = (".yaml", ".yml")
_MAX_INDICES = 50
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
    """Split that was asked for."""

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
        """Rows of an epoch."""
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
    if needed := never_ignored(ignored_keys):
        raise ConfigError(
            f"{', '.join(needed)} cannot be ignored: they hold the conversation",
            where="dataset.ignored_keys",
            hint="use keys that the reason of a skipped row names",
        )
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
    rows = source.spread(_NUM_SAMPLED_ROWS)
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


def layout_of(path: Path, folder: Path = Path()) -> Layout:
    """The layout at a path: a file, a pattern of several, a mixture, or a folder.

    Args:
        path: It.
        folder: Where it is looked up if it is not in the working directory.

    Raises:
        ConfigError: there is nothing, or an index is damaged or names files that are not there.
    """
    files = expand(str(path), folder)
    first = files[0]
    if len(files) > 1:
        part = Part(str(path), "", MixtureEntry(path.name, files, first.parent), str(path))
        return Layout(path, "files", (part,), is_named=True)
    if first.is_dir():
        return indexed(first) or _indexed_by_file(first) or _plain(first)
    if first.suffix in _MIXTURES:
        return _mixture(first)
    parts = _of_file(first, first.name)
    return described(first) or Layout(first, "files", parts, is_named=len(parts) == 1)


def _indexed_by_file(folder: Path) -> Layout | None:
    """The layout of a folder with a mixture or another file in it that describes datasets; None: it has none.

    Raises:
        ConfigError: it has several.
    """
    files = sorted(file for suffix in (".json", *_MIXTURES) for file in folder.glob(f"*{suffix}"))
    found = [layout for file in files[:_MAX_INDICES] if (layout := _of_index(file)) is not None]
    if len(found) > 1:
        names = ", ".join(str(layout.path) for layout in found)
        raise ConfigError(f"several files describe datasets: {names}", where=str(folder), hint="name one of them")
    return found[0] if found else None


def _of_index(file: Path) -> Layout | None:
    if file.suffix == ".json":
        return described(file)
    try:
        load_mixture(file)
    except ConfigError:  # a YAML file of something else
        return None
    return _mixture(file)


def _plain(folder: Path) -> Layout:
    found = groups(folder, list(row_files(folder, ROW_FILES)))
    parts: list[Part] = []
    for files in found:
        split, name = split_of(files[0].relative_to(folder)), str(files[0].relative_to(folder))
        if len(files) == 1:
            parts += [replace(p, split=p.split or split) for p in _of_file(files[0], name)]
        else:
            pattern = pattern_of(files)
            entry = MixtureEntry(os.path.basename(pattern), files, files[0].parent)
            parts.append(Part(os.path.relpath(pattern, folder), split, entry, pattern))
    if not parts:
        return _media_folder(folder)
    has_metadata = any(part.entry.paths[0].name.startswith("metadata.") for part in parts)
    kind = "media folder with metadata" if has_metadata else "files"
    return Layout(folder, kind, tuple(parts), notes=tuple(filter(None, map(missing_shards, found))))


def _of_file(file: Path, name: str) -> tuple[Part, ...]:
    """The part that a file is, or those that its lists are."""
    try:
        lists = list_names(file)
    except (DataError, OSError):  # reading it will say why
        lists = ("",)
    whole = Part(name, "", MixtureEntry(file.name, (file,), file.parent), str(file))
    if len(lists) < 2:
        return (whole,)
    return tuple(
        replace(whole, name=f"{name}: {of}", split=of, entry=replace(whole.entry, mapping=RowMapping(list_name=of)))
        for of in lists
    )


def _media_folder(folder: Path) -> Layout:
    """Media without rows, by class or not: what they are, and why they are no training data."""
    suffixes = {f".{extension}": kind for kind, found in EXTENSIONS.items() for extension in found}
    files = list(row_files(folder, tuple(suffixes)))
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_of(file.relative_to(folder)), []).append(file)
    parts = []
    for split, of_split in by_split.items():
        classes = Counter(file.parent.name for file in of_split)
        problem = (
            f"{len(of_split)} media files in folders {', '.join(list(classes)[:5])} and no text about them: write a "
            "metadata.csv with the columns file_name and text"
        )
        entry = MixtureEntry(split, tuple(of_split), folder)
        parts.append(Part(split or folder.name, split, entry, str(folder), num_rows=len(of_split), problem=problem))
    return Layout(folder, "media folder by class", tuple(parts), is_index=True)


def _mixture(path: Path) -> Layout:
    folder, parts = path.absolute().parent, list[Part]()
    for entry in load_mixture(path).datasets:
        for part in chosen(layout_of(Path(entry.path), folder), entry.split):
            made = replace(
                part.entry,
                name=os.path.basename(entry.path),
                media_root=relative_to(entry.media_root or part.entry.media_root, folder),
                strategy=entry.sampling_strategy,
                weight=entry.weight,
            )
            is_rooted = part.is_rooted or entry.media_root is not None
            parts.append(replace(part, entry=made, split="", is_rooted=is_rooted))
    return Layout(path, "mixture", tuple(parts), is_named=True)
