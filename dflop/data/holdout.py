"""Which samples are held out of training to validate on: drawn by a seed, or whole entries of the dataset.

What tells nothing new must not be in both: the same picture with another question, a row that a mixture has twice. So
samples are drawn by groups, those with the same media or the same content (`content.py`). A dataset whose samples all
show one picture is one group, and nothing of it can be held out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import MediaRef
from dflop.data.mixture import Dataset
from dflop.data.parts import role_of
from dflop.errors import DataError, did_you_mean
from dflop.records import MediaItem, SampleShape

_STREAM = 2**64 - 1
"""Stream of random numbers; epochs of `SampleOrder` use the ones from 0."""
_NUM_NAMED = 3

_Ints = npt.NDArray[np.int64]


def held_out(shapes: Sequence[SampleShape], num_samples: int, seed: int) -> _Ints:
    """Positions of the samples to hold out, ascending.

    Args:
        shapes: Healthy samples of the dataset.
        num_samples: How many at most; fewer where no group that is left is small enough.
        seed: 0 .. 2**64 - 1.
    """
    keys = np.random.Philox(key=np.array([seed, _STREAM], np.uint64)).random_raw(len(shapes))
    groups = _groups(*_keys(shapes, lambda _, item: item.path))
    members = np.argsort(groups, kind="stable")
    ends = np.cumsum(np.bincount(groups))
    taken, judged = list[int](), set[int]()
    for group in groups[np.argsort(keys, kind="stable")]:
        if len(taken) >= num_samples:
            break
        if group in judged:
            continue
        judged.add(group)
        found = members[ends[group - 1] if group else 0 : ends[group]].tolist()
        if len(taken) + len(found) <= num_samples and any(shapes[p].num_supervised_tokens for p in found):
            taken += found
    return np.array(sorted(taken), dtype=np.int64)


def sources_held_out(dataset: Dataset, shapes: Sequence[SampleShape], names: Sequence[str]) -> _Ints:
    """Positions of the samples of whole entries, ascending.

    Args:
        dataset: That the shapes are of.
        shapes: Its healthy samples.
        names: Of entries, or `validation` or `test`: entries whose names say so.

    Raises:
        DataError: an unknown name, an entry without a healthy sample, or samples that are trained on, too.
    """
    where, named = "validation.sources", [{entry.name, role_of(entry.name)} for entry in dataset.entries]
    of_shapes = [named[dataset.locate(shape.sample_index)[0]] for shape in shapes]
    for name in names:
        if not any(name in words for words in of_shapes):
            known = dict.fromkeys(entry.name for entry in dataset.entries)
            raise DataError(f"no sample is of `{name}`", where=where, hint=did_you_mean(name, list(known)))
    taken = np.array([not words.isdisjoint(names) for words in of_shapes])

    def place(shape: SampleShape, item: MediaItem) -> str:
        return f"{dataset.home(shape.sample_index, MediaRef(item.kind, item.path))}\t{item.path}"

    found = [np.isin(keys[taken], keys[~taken]) for keys in _keys(shapes, place)]
    shared = np.flatnonzero(taken)[np.logical_or(*found)].tolist()
    if shared:
        first = (f"row {shapes[p].sample_index} (id `{shapes[p].sample_id}`)" for p in shared[:_NUM_NAMED])
        raise DataError(
            f"{len(shared)} of {taken.sum()} samples of {', '.join(names)} are trained on, too: samples of other "
            f"entries have the same media or the same content; {', '.join(first)}",
            where=where, hint="remove them from one side, or set validation.num_samples, which holds whole groups out",
        )  # fmt: skip
    return np.flatnonzero(taken)


def _keys(shapes: Sequence[SampleShape], place: Callable[[SampleShape, MediaItem], str]) -> tuple[_Ints, _Ints]:
    """Media and content of every sample, as numbers; of a sample without media both are its content."""
    media, content = np.empty(len(shapes), np.int64), np.empty(len(shapes), np.int64)
    for p, shape in enumerate(shapes):
        # Where texts are unknown, an id with a length stands for them.
        content[p] = shape.content_hash or _number(f"{shape.sample_id}\t{shape.num_text_tokens}", *_paths(shape))
        media[p] = _number(*(place(shape, item) for item in shape.items)) if shape.items else content[p]
    return media, content


def _paths(shape: SampleShape) -> list[str]:
    return [item.path for item in shape.items]


def _number(*texts: str) -> int:
    digest = hashlib.blake2b("\n".join(texts).encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _groups(*keys: _Ints) -> _Ints:
    """Number of the group of each sample, from 0: samples that share any key, or share one with a third, are together.

    Every sample takes the lowest number among those with its key, by one kind of key after the other, until none does.
    """
    of_keys = [np.unique(key, return_inverse=True)[1] for key in keys]
    found, before = np.arange(len(keys[0])), None
    while before is None or not np.array_equal(found, before):
        before = found
        for of_key in of_keys:
            least = np.full(len(found), len(found))
            np.minimum.at(least, of_key, found)
            found = least[of_key]
    return np.unique(found, return_inverse=True)[1]
