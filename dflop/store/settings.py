"""What one store is set to, in `<store>/store.json`: every process that meets the store finds the same answer there.

A store without the file has the defaults. The live database may be put on a node's own disk, where it is faster and
its locks can be trusted; another node that ingests builds its own from the spool. Everything else stays in the store.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError, StoreError, did_you_mean, path_problem
from dflop.records import parse_json
from dflop.store import access, durable, schema

FILE = "store.json"
_RANGES = {
    "keep_snapshots": (1, 1_000_000), "grace_s": (0, 1_000_000_000), "max_snapshots_ratio": (1, 1_000_000),
    "lease_s": (10, 1_000_000),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a store."""

    live: str = ""
    """Folder of the live database; empty: `<store>/live`."""
    keep_snapshots: int = 5
    """Newest snapshots that are always kept."""
    grace_s: float = 3600.0
    """Older snapshots in use, and one per sixth of this time, stay until they were replaced so long ago."""
    max_snapshots_ratio: float = 6.0
    """The oldest ones not in use go sooner, once all snapshots take more than so many times the newest one."""
    lease_s: float = 120.0
    """An ingester on another node that has not been heard of for this long is taken for dead."""

    def live_file(self, store_root: Path) -> Path:
        """Path of the live database."""
        return (Path(self.live) if self.live else store_root / "live") / "dflop.duckdb"


def read_settings(store_root: Path | str) -> Settings:
    """Settings of a store; the defaults where it has none.

    Raises:
        StoreError: The file cannot be read, is damaged or holds an unknown key or a value of the wrong type.
    """
    path = Path(store_root) / FILE
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Settings()
    except OSError as error:
        raise access.error_of("cannot read the store's settings", error, Path(store_root)) from error
    except ValueError as error:
        hint = "fix it, or recreate it with dflop store init"
        raise StoreError(f"not JSON: {error}", where=str(path), hint=hint) from None
    defaults = dataclasses.asdict(Settings())
    if not isinstance(data, dict):
        raise StoreError("must hold an object of settings", where=str(path))
    for key in data.keys() - defaults.keys():
        raise StoreError(f"unknown setting `{key}`", where=str(path), hint=did_you_mean(key, defaults))
    settings = Settings(**data)
    if problem := _problem(settings):
        raise StoreError(problem, where=str(path), hint="fix it with dflop store init")
    return settings


def init(store_root: Path | str, *, group: str | None = None, **changes: Path | str | float | None) -> Settings:
    """Creates the store's folder, for the members of a group if one is given, and writes settings that are not None.

    Raises:
        ConfigError: A value makes no sense, or this user is not in the group.
        StoreError: The folder cannot be written, or holds what is others' and not the group's.
    """
    root = Path(store_root)
    given: dict[str, Any] = {k: str(v) if isinstance(v, Path) else v for k, v in changes.items() if v is not None}
    settings = dataclasses.replace(read_settings(root), **given)
    if settings.live and not Path(settings.live).is_absolute():
        hint = "every node resolves it: write an absolute path"
        raise ConfigError(f"live folder `{settings.live}` is relative", hint=hint)
    if problem := _problem(settings):
        raise ConfigError(problem)
    gid = None if group is None else access.group_id(group)
    live = settings.live_file(root).parent
    try:
        durable.make_folder(root / "spool")
        durable.replace(root / FILE, json.dumps(dataclasses.asdict(settings), indent=1).encode())
        if gid is not None:
            durable.make_folder(live)
            access.share(sorted({root.resolve(), live.resolve()}), gid)
            for kind in schema.KINDS:  # no member is ever the first in them
                durable.make_folder(root / "spool" / kind)
    except OSError as error:
        raise access.error_of("cannot set up the store", error, root) from error
    return settings


def _problem(settings: Settings) -> str:
    for name, default in dataclasses.asdict(Settings()).items():
        value, (least, most) = getattr(settings, name), _RANGES.get(name, (0, 0))
        expected = (int, float) if isinstance(default, float) else type(default)
        if not isinstance(value, expected) or isinstance(value, bool):
            return f"setting `{name}` is {value!r}, expected a value like {default!r}"
        if name in _RANGES and not least <= value <= most:  # NaN is nowhere
            return f"{name} is {value}, must be at least {least} and at most {most}"
    return path_problem(Path(settings.live))
