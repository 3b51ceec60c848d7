"""What a row of training data says, as a number: equal ones teach the same, wherever they lie and whatever their ids.

Texts are compared without case, runs of white space and forms of Unicode. A media file is known by its name and the
size in its header, which costs no access to the file; bytes in a container have no name of their own and are known by
their length and first bytes. Hashing media whole was rejected (`docs/tried.md`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import unicodedata
from pathlib import Path

from dflop.data.annotations import AnnotatedSample, BadSample, MediaRef
from dflop.data.frame_files import FrameFiles
from dflop.data.mixture import Dataset
from dflop.records import MediaItem

_HEAD_BYTES = 4096


def content_hash(dataset: Dataset, sample: AnnotatedSample, items: tuple[MediaItem, ...]) -> int:
    """Signed 64-bit hash of the turns (a system prompt left out) and media of a sample; never 0.

    Args:
        dataset: That the sample is of.
        sample: With its texts.
        items: Its media, as profiled.
    """
    digest = hashlib.blake2b(digest_size=8)
    for turn in sample.turns:
        if turn.role != "system":
            text = " ".join(unicodedata.normalize("NFKC", turn.text).casefold().split())
            digest.update(f"{turn.role}\n{text}\n".encode("utf-8", "backslashreplace"))
    for ref, item in zip(sample.media, items, strict=True):
        name = _name(dataset, sample.sample_index, ref)
        size = f"{item.kind}\t{item.width_px}\t{item.height_px}\t{item.num_frames}\t{item.duration_s}\t"
        digest.update(size.encode() + name + b"\n")
    return int.from_bytes(digest.digest(), "little", signed=True) or 1


def _name(dataset: Dataset, index: int, ref: MediaRef) -> bytes:
    if dataset.embeds(index, ref):
        with contextlib.suppress(BadSample, OSError):  # its header was read a moment ago
            source = dataset.open_media(index, ref)
            if not isinstance(source, Path | FrameFiles):
                with source:
                    head = source.read(_HEAD_BYTES)
                    return b"%d\t" % source.seek(0, os.SEEK_END) + head
    names = ref.frames or (os.path.basename(ref.path),)  # frames of all videos may be called alike
    return "\t".join(names).encode("utf-8", "backslashreplace")
