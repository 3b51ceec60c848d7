"""The rows of a file, read as its name says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from dflop.data.formats.annotation_file import SUFFIXES, AnnotationFile
from dflop.data.formats.row_mapping import RowMapping, mapping_of
from dflop.data.formats.row_source import RowSource
from dflop.data.formats.table_file import TABLES, TableFile
from dflop.data.formats.tar_shard import TarShard
from dflop.errors import ConfigError

ROW_FILES = (*SUFFIXES, *TABLES, ".tar")


def open_source(path: Path, ignored_keys: Collection[str] = (), mapping: RowMapping | None = None) -> RowSource:
    """The rows of a file, found but not judged.

    Args:
        path: The file.
        ignored_keys: Keys, columns and extensions of tar members that may be ignored besides those of `row_keys.py`.
        mapping: What is done to its rows before they are read; None: what the file's name says.

    Raises:
        ConfigError: the suffix is not one we read.
        DataError: the file cannot be read, is damaged or cut off, or holds no conversations.
    """
    return opener_of(path)(path, ignored_keys, mapping or mapping_of(path))


def opener_of(path: Path) -> Callable[..., RowSource]:
    """What opens a file of this name; the file need not be there.

    Raises:
        ConfigError: the suffix is not one we read.
    """
    name = path.name.lower()
    if name.endswith(TABLES):
        return TableFile
    if name.endswith(".tar"):
        return TarShard
    if name.endswith(SUFFIXES):
        return AnnotationFile
    hint = f"valid: {', '.join(ROW_FILES)}"
    if name.endswith((".tar.gz", ".tgz", ".tar.zst")):
        hint = f"decompress it: members of a compressed tar cannot be read one by one; {hint}"
    raise ConfigError(f"{path.name} has an unknown suffix", where=str(path), hint=hint)
