"""Folders and files that state what a dataset is, as the programs that made them wrote it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from dflop.config import read_yaml
from dflop.data.formats.row_mapping import RowMapping
from dflop.data.mixture import MixtureEntry, make_entry
from dflop.data.parts import TRAIN, Layout, Part, role_of
from dflop.data.path_patterns import expand, relative_to
from dflop.errors import ConfigError

_MAX_DESCRIPTION_BYTES = 2**20
_REMOTE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_OF_SHAREGPT = {"messages": "conversations", "system": None, "tools": None}
_OF_ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "system": None, "history": None}
_OURS = {"messages": "conversations", "prompt": "instruction", "query": "input", "response": "output"}
_TAGS = {
    "user": "human", "assistant": "gpt", "observation": "observation", "function_call": "function_call",
    "system": "system",
}  # fmt: skip


def read_index(path: Path) -> Mapping[str, Any]:
    """An object in a JSON file; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def indexed(folder: Path) -> Layout | None:
    """The layout of a folder that has an index of a name that says which.

    Raises:
        ConfigError: the index is damaged or names files that are not there.
    """
    try:
        if (folder / ".nv-meta").is_dir():
            return _energon(folder)
        if (folder / "dataset_dict.json").is_file():
            names = read_index(folder / "dataset_dict.json")["splits"]
            return _saved(folder, {str(name): folder / str(name) for name in names})
        if (state := read_index(folder / "state.json")) and "_data_files" in state:
            return _saved(folder, {str(state.get("_split") or ""): folder})
        return _mosaic(folder)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"the index of `{folder}` is damaged: {error!r}", where=str(folder)) from error


def described(path: Path) -> Layout | None:
    """The layout of a JSON file that describes datasets: LLaMA-Factory's or InternVL's; None: it is another file.

    Raises:
        ConfigError: it names files that are not there.
    """
    entries = read_index(path) if path.stat().st_size <= _MAX_DESCRIPTION_BYTES else {}
    if not entries or not all(isinstance(entry, dict) for entry in entries.values()):
        return None
    try:
        if all("annotation" in entry for entry in entries.values()):
            return _internvl(path, entries)
        if path.name == "dataset_info.json" and all({"file_name", *_REMOTE} & e.keys() for e in entries.values()):
            parts = tuple(_factory_part(path.parent, name, entry) for name, entry in entries.items())
            return Layout(path, "LLaMA-Factory", parts, is_index=True)
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"damaged: {error!r}", where=str(path)) from error
    return None


def _energon(folder: Path) -> Layout:
    meta = folder / ".nv-meta"
    if not (meta / "split.yaml").is_file():
        raise ConfigError("an Energon folder without .nv-meta/split.yaml", where=str(folder), hint="energon prepare .")
    stated = read_yaml(meta / "split.yaml")
    left_out = set(stated.get("exclude") or ())
    info = read_yaml(meta / ".info.yaml") if (meta / ".info.yaml").is_file() else read_index(meta / ".info.json")
    counts = info.get("shard_counts") or {}
    parts = []
    for split, names in stated["split_parts"].items():
        found = [shard for name in names or () for shard in expand(str(folder / name), folder)]
        shards = tuple(s for s in found if str(s.relative_to(folder)) not in left_out)
        known = [counts[name] for shard in shards if (name := str(shard.relative_to(folder))) in counts]
        samples = sorted(name for name in left_out if ".tar/" in name)
        if shards:
            parts.append(
                Part(
                    str(split), str(split), MixtureEntry(str(split), shards, folder), str(folder),
                    num_rows=sum(known) if len(known) == len(shards) else None,
                    problem=f"split.yaml excludes single samples, which is not read: {samples[0]}" if samples else "",
                )
            )  # fmt: skip
    return Layout(folder, "Energon", tuple(parts), is_index=True)


def _saved(folder: Path, folders: Mapping[str, Path]) -> Layout:
    parts = []
    for split, place in folders.items():
        state = read_index(place / "state.json")
        files = tuple(place / str(file["filename"]) for file in state["_data_files"])
        has_selection = bool(state.get("_indices_data_files") or state.get("_indices_files"))
        parts.append(
            Part(
                split or place.name, split, MixtureEntry(place.name, files, place), str(place),
                problem="a selection of its rows is stored: flatten_indices() and save it again" * has_selection,
            )
        )  # fmt: skip
    return Layout(folder, "save_to_disk", tuple(parts), is_index=True)


def _mosaic(folder: Path) -> Layout | None:
    parts = []
    for place in (folder, *sorted(path for path in folder.iterdir() if path.is_dir())):
        shards = read_index(place / "index.json").get("shards")
        if not isinstance(shards, list) or not shards or not isinstance(shards[0], dict) or "samples" not in shards[0]:
            continue
        split = "" if place == folder else place.name
        files = tuple(place / (s.get("zip_data") or s["raw_data"])["basename"] for s in shards)
        parts.append(
            Part(
                split or place.name, split, MixtureEntry(place.name, files, place), str(place),
                num_rows=sum(int(shard["samples"]) for shard in shards),
                problem=f"this is an {str(shards[0]['format']).upper()} folder of mosaicml-streaming, not read: "
                "write what `StreamingDataset(local=...)` gives as Parquet",
            )
        )  # fmt: skip
    return Layout(folder, "MDS", tuple(parts), is_index=True) if parts else None


def _internvl(path: Path, entries: Mapping[str, Mapping[str, Any]]) -> Layout:
    parts, notes = [], []
    for name, entry in entries.items():
        times = entry.get("repeat_time", 1)
        is_number = isinstance(times, int | float) and not isinstance(times, bool) and math.isfinite(times)
        if not is_number or times <= 0 or (times > 1 and times != int(times)):
            hint = "a share of the rows between 0 and 1, or a whole number of repetitions"
            raise ConfigError(f"`{name}` has repeat_time {times!r}", where=str(path), hint=hint)
        strategy = "all" if times >= 1 else f"first:{100 * Decimal(str(times)):f}%"
        notes += [f"{name}: repeat_time {times} takes that share of the rows, the first ones"] * (times < 1)
        root = relative_to(Path(entry.get("root", "")), path.parent)
        made = make_entry(entry["annotation"], root, path.parent, strategy)
        parts.append(Part(name, "", made, entry["annotation"], is_rooted=True, repeats=max(1, int(times))))
        notes += [f"{name}: `{key}` is not followed" for key in ("max_dynamic_patch", "data_augment") if entry.get(key)]
    return Layout(path, "InternVL", tuple(parts), is_named=True, notes=tuple(notes))


def _factory_part(folder: Path, name: str, entry: Mapping[str, Any]) -> Part:
    split = role_of(name) or TRAIN
    file = entry.get("file_name")
    if file is None:
        where = next(key for key in _REMOTE if key in entry)
        return Part(name, split, MixtureEntry(name, (), folder), problem=f"is elsewhere, {where} {entry[where]}")
    is_alpaca = entry.get("formatting", "alpaca") == "alpaca"
    columns = {**(_OF_ALPACA if is_alpaca else _OF_SHAREGPT), **(entry.get("columns") or {})}
    mapping = RowMapping(
        columns=tuple((_OURS.get(key, key), theirs) for key, theirs in columns.items() if theirs),
        tags=() if is_alpaca else tuple(_our_tags(entry.get("tags") or {})),
    )
    number, problem = entry.get("num_samples"), "preference data" if entry.get("ranking") else ""
    try:
        made = make_entry(str(folder / file), folder, folder, f"random:{number}" if number else "all")
    except ConfigError as error:  # of the program's own list, few files are downloaded
        made, problem = MixtureEntry(name, (), folder), error.what
    return Part(name, split, replace(made, mapping=mapping), str(folder / file), problem=problem)


def _our_tags(tags: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(our word, theirs) of a turn's keys and speakers."""
    yield "role", tags.get("role_tag", "from")
    yield "content", tags.get("content_tag", "value")
    for word, theirs in _TAGS.items():
        yield word, tags.get(f"{word.removesuffix('_call')}_tag", theirs)
