"""What lies at a path: names and indices are read, rows are not."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

from dflop.config import load_mixture
from dflop.data.formats.annotation_file import list_names
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.formats.source import ROW_FILES
from dflop.data.indices import described, indexed
from dflop.data.media_value import EXTENSIONS
from dflop.data.mixture import MixtureEntry, make_entry
from dflop.data.parts import Layout, Part, chosen
from dflop.data.patterns import expand
from dflop.data.splits import groups, missing_shards, pattern_of, row_files, split_of
from dflop.errors import ConfigError, DataError

_MIXTURES = (".yaml", ".yml")
_MAX_INDICES = 50


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
        root = entry.media_root
        for part in chosen(layout_of(Path(entry.path), folder), entry.split):
            made = make_entry(
                entry.path, root or part.entry.media_root, folder=folder, strategy=entry.sampling_strategy,
                weight=entry.weight,
            )  # fmt: skip
            made = replace(made, paths=part.entry.paths, mapping=part.entry.mapping)
            parts.append(replace(part, entry=made, split="", is_rooted=part.is_rooted or root is not None))
    return Layout(path, "mixture", tuple(parts), is_named=True)
