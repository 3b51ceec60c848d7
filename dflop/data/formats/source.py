"""What every format of training data offers: rows by number, and the media that lie inside it or beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from dflop.data.annotations import AnnotatedSample, MediaRef
from dflop.data.formats.annotation_file import SUFFIXES, AnnotationFile
from dflop.data.formats.parquet_file import ParquetFile
from dflop.data.formats.tar_shard import TarShard
from dflop.data.frame_files import AnySource
from dflop.errors import ConfigError


class RowSource(Protocol):
    """Random access to the rows of one file. Not to be shared by processes: open it in each."""

    path: Path

    def __len__(self) -> int:
        """Number of rows, good and bad."""

    def row(self, index: int) -> dict[str, Any]:
        """Row `index` as `read_row` takes it.

        Raises:
            BadSample: the row is not an object or cannot be read.
        """

    def sample(self, index: int) -> AnnotatedSample:
        """Row `index`, interpreted.

        Raises:
            BadSample: the row is malformed; the reason says how.
        """

    def embeds(self, ref: MediaRef) -> bool:
        """Whether a media item lies inside this file, so that `fingerprint` covers it."""

    def open_media(self, index: int, ref: MediaRef, media_root: Path) -> AnySource:
        """A media item of row `index`: an open file if it lies inside this one, else its path, not checked further.

        Raises:
            BadSample: there is no such item, or its path leaves the media root.
        """

    def fingerprint(self) -> str:
        """Text that changes when a row or the media inside the file change.

        Raises:
            DataError: the file cannot be read.
        """


def open_source(path: Path, ignored_keys: Collection[str] = ()) -> RowSource:
    """The rows of a file, found but not judged.

    Args:
        path: The file.
        ignored_keys: Keys, columns and extensions of tar members that may be ignored besides those of `keys.py`.

    Raises:
        ConfigError: the suffix is not one we read.
        DataError: the file cannot be read, is damaged or cut off, or holds no conversations.
    """
    return opener_of(path)(path, ignored_keys)


def opener_of(path: Path) -> Callable[..., RowSource]:
    """What opens a file of this name; the file need not be there.

    Raises:
        ConfigError: the suffix is not one we read.
    """
    name = path.name.lower()
    if name.endswith(".parquet"):
        return ParquetFile.open
    if name.endswith(".tar"):
        return TarShard.open
    if name.endswith(SUFFIXES):
        return AnnotationFile.open
    hint = f"valid: {', '.join((*SUFFIXES, '.parquet', '.tar'))}"
    if name.endswith((".tar.gz", ".tgz", ".tar.zst")):
        hint = f"decompress it: members of a compressed tar cannot be read one by one; {hint}"
    raise ConfigError(f"{path.name} has an unknown suffix", where=str(path), hint=hint)
