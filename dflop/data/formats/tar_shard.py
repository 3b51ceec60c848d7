"""WebDataset shards: a tar whose members `key.jpg`, `key.json`, `key.txt` are one row.

Only tar headers are read on opening; members are read where they lie. The key ends at the first dot of the file name.
`.json` is the row; where it holds no conversation (metadata of a crawl), `.txt` or its `caption` is what the assistant
says about the media, or plain text if there are none. Media members take the place of the files the row names; those
it names by member name, file name or extension in that order, others in order of the numbers in their names, else of
the tar. A member of any other extension is a reason against its row, unless the extension may be ignored as a key may.
"""

from __future__ import annotations

import itertools
import os
import re
import tarfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import MEDIA_KINDS, AnnotatedSample, BadSample, MediaRef, printable
from dflop.data.conversation import form_of
from dflop.data.formats.embedded import open_window
from dflop.data.formats.json_rows import parse_object
from dflop.data.formats.row_mapping import RowMapping, kind_of
from dflop.data.formats.row_source import RowSource
from dflop.data.frame_files import AnySource
from dflop.data.row_keys import CAPTIONS, FOLLOWED, IGNORED
from dflop.errors import DataError

_MAX_TEXT_BYTES = 2**26
_NOT_PLAIN = -1


class _Member(NamedTuple):
    name: str
    start: int
    size_bytes: int

    @property
    def extension(self) -> str:
        return self.name.rpartition("/")[2].partition(".")[2].lower()

    @property
    def kind(self) -> str | None:
        return kind_of(f".{self.extension}")


class TarShard(RowSource):
    """Random access to the rows of an uncompressed tar, by its headers; about 100 bytes are held per member.

    Raises:
        DataError: not a tar, or one that is damaged or cut off.
    """

    def __init__(self, path: Path, ignored_keys: Collection[str] = (), mapping: RowMapping | None = None) -> None:
        super().__init__(path, ignored_keys, mapping)
        self._prefix = f"{self._container}/"
        groups = _groups(path)
        names = [m.name.encode("utf-8") for group in groups for m in group]
        self._names = b"".join(names)
        self._name_stops = np.cumsum([0, *map(len, names)])
        places = [(m.start, m.size_bytes) for group in groups for m in group]
        self._places: npt.NDArray[np.int64] = np.array(places, np.int64).reshape(-1, 2)
        self._row_stops = np.cumsum([0, *map(len, groups)])
        self._all: frozenset[str] | None = None

    def __len__(self) -> int:
        return len(self._row_stops) - 1

    def row(self, index: int) -> dict[str, Any]:
        """The `.json` of row `index`, or one made from its caption, with its media members as files.

        Raises:
            BadSample: no conversation or caption, media members that do not fit the row, or a member of no known kind.
        """
        members = self._members(index)
        names = [m.name for m in members]
        unknown = [m for m in members if m.kind is None and m.extension not in ("json", "txt")]
        for member in unknown:
            extension = member.extension.rpartition(".")[2]
            if extension not in IGNORED and not {extension, member.extension} & set(self._ignored_keys):
                raise BadSample(
                    f"member {member.name} has an unknown extension; to ignore it, add to dataset.ignored_keys: "
                    f"`{member.extension}`",
                    path=self._prefix + member.name,
                )
        if len(set(names)) < len(names):
            raise BadSample(f"a member occurs twice: {max(names, key=names.count)}")
        texts = {m.extension: m for m in members if m.extension in ("json", "txt")}
        row = parse_object(self._content(texts["json"]), f"member {texts['json'].name}") if "json" in texts else {}
        row = {"id": _key(names[0]), **row}
        media = {kind: _in_order([m.name for m in members if m.kind == kind]) for kind in MEDIA_KINDS}
        if not _holds_conversation(row):
            caption = self._content(texts["txt"]) if "txt" in texts else None
            row = _captioned(row, caption, has_media=any(media.values()))
        for kind in MEDIA_KINDS:
            if media[kind]:
                chosen = _chosen(row, kind, media[kind])
                row = {**row, kind: [self._prefix + name for name in chosen], f"{kind}s": None}
        return row

    def sample(self, index: int) -> AnnotatedSample:
        """Row `index`, interpreted.

        Raises:
            BadSample: the row is malformed, or mixes media members with files elsewhere.
        """
        sample = super().sample(index)
        outside = [ref.path for ref in sample.media if not self.embeds(ref)]
        if outside and any(m.kind for m in self._members(index)):
            reason = "row has media members but names other files"
            raise BadSample(reason, path=outside[0], sample_id=sample.sample_id)
        return sample

    def open_media(self, index: int, ref: MediaRef, media_root: Path) -> AnySource:
        """A member of row `index` as an open file, or the path of a file under the media root.

        Raises:
            BadSample: no such member, not a plain file, or a path that leaves the media root.
        """
        if not ref.path.startswith(self._prefix):
            return super().open_media(index, ref, media_root)
        found = [m for m in self._members(index) if self._prefix + m.name == ref.path]
        if not found or found[0].size_bytes == _NOT_PLAIN:
            raise BadSample("not a plain file in the shard" if found else "no such member in its row", path=ref.path)
        try:
            return open_window(self.path, found[0].start, found[0].size_bytes, found[0].name)
        except OSError as error:
            raise BadSample(f"shard cannot be read: {error.strerror}", path=ref.path) from error

    def members(self) -> Collection[str]:
        """Names of all members."""
        if self._all is None:
            stops = self._name_stops.tolist()
            names = (self._names[start:stop].decode("utf-8") for start, stop in itertools.pairwise(stops))
            self._all = frozenset(names)
        return self._all

    def _holds(self, path: str) -> bool:
        return path.startswith(self._prefix) or super()._holds(path)

    def _members(self, index: int) -> list[_Member]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        members = range(int(self._row_stops[index]), int(self._row_stops[index + 1]))
        names = [self._names[self._name_stops[i] : self._name_stops[i + 1]].decode("utf-8") for i in members]
        return [_Member(name, *map(int, self._places[i])) for name, i in zip(names, members, strict=True)]

    def _content(self, member: _Member) -> bytes:
        if not 0 <= member.size_bytes <= _MAX_TEXT_BYTES:
            raise BadSample(f"member {member.name} is not a plain file of at most {_MAX_TEXT_BYTES} bytes")
        try:
            with open_window(self.path, member.start, member.size_bytes, member.name) as file:
                content = file.read()
        except OSError as error:
            raise BadSample(f"shard cannot be read: {error.strerror}") from error
        if len(content) < member.size_bytes:
            raise BadSample(f"member {member.name} is cut off")
        return content


def _groups(path: Path) -> list[list[_Member]]:
    """Members of every row."""
    groups: dict[str, list[_Member]] = {}
    bare: list[_Member] = []
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (info := tar.next()) is not None:
                if info.size < 0:
                    raise tarfile.ReadError("a member of negative size")
                _add(groups, bare, info)
            # The library takes any nonsense between two members for the end.
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError(f"no member and no end mark at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"shard cannot be read: {error}", where=str(path), hint="is it complete, and not compressed?"
        ) from error
    for member in bare:  # a README is nobody's, a member `key` is that of its row
        if member.name in groups:
            groups[member.name].append(member)
    return list(groups.values())


def _add(groups: dict[str, list[_Member]], bare: list[_Member], info: tarfile.TarInfo) -> None:
    name = printable(os.fsencode(info.name.removeprefix("./")).decode("utf-8", "backslashreplace"))
    stem, _, extension = name.rpartition("/")[2].partition(".")
    if info.isdir() or not stem:
        return  # folders, and the ._files of macOS
    plain = info.isreg() and info.sparse is None
    member = _Member(name, info.offset_data, info.size if plain else _NOT_PLAIN)
    (groups.setdefault(_key(name), []) if extension else bare).append(member)


def _in_order(names: list[str]) -> list[str]:
    """Names that differ in a number by that number: 2 before 10; others as they come."""
    stems = {name: name.rpartition(".")[0] for name in names}
    if len({re.sub(r"\d+", "", stem).rstrip(".") for stem in stems.values()}) == len(names):
        return names
    return sorted(names, key=lambda name: [(int(n), t) for t, n in re.findall(r"(\D*)(\d+)", stems[name])])


def _key(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _holds_conversation(row: dict[str, Any]) -> bool:
    try:
        return form_of(row) not in CAPTIONS
    except BadSample:
        return False


def _captioned(row: dict[str, Any], caption: bytes | None, *, has_media: bool) -> dict[str, Any]:
    """A row that says its caption about its media; what the row itself calls them does not matter."""
    kept = {k: v for k, v in row.items() if k == "id" or k not in FOLLOWED["row"]}
    text: object = row.get("caption") if row.get("text") is None else row["text"]
    if caption is not None:
        try:
            text = caption.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadSample(f"caption is not UTF-8: {error.reason}") from error
    if text is None:
        raise BadSample("neither a conversation in a .json member nor a caption in a .txt member")
    return {**kept, "caption" if has_media else "text": text}


def _chosen(row: dict[str, Any], kind: str, names: list[str]) -> list[str]:
    values = [row[key] for key in (kind, f"{kind}s") if row.get(key) is not None]
    given = list(itertools.chain.from_iterable(v if isinstance(v, list) else [v] for v in values))
    known = {n.rpartition("/")[2].partition(".")[2]: n for n in names}
    known |= {n.rpartition("/")[2]: n for n in names} | {n: n for n in names}
    found = [known[g] for g in given if isinstance(g, str) and g in known]
    if len(found) < len(given) and (found or len(given) != len(names)):
        raise BadSample(f"row names {len(given)} {kind} files, its {len(names)} members match {len(found)}")
    return found or names
