"""Which samples are held out of training to validate on: drawn by a seed, or whole entries of the dataset.

What tells nothing new must not be in both: the same picture with another question, a row that a mixture has twice. So
samples are drawn by groups, those with the same media, or of the same id with as many tokens. A dataset whose samples
all show one picture is one group, and nothing of it can be held out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dflop.data.mixture import Dataset
from dflop.data.parts import role_of
from dflop.errors import DataError, did_you_mean
from dflop.records import SampleShape

_STREAM = 2**64 - 1
"""Stream of random numbers; epochs of `SampleOrder` use the ones from 0."""


def held_out(shapes: Sequence[SampleShape], num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """Positions of the samples to hold out, ascending.

    Args:
        shapes: Healthy samples of the dataset.
        num_samples: How many at most; fewer where no group that is left is small enough.
        seed: 0 .. 2**64 - 1.
    """
    keys = np.random.Philox(key=np.array([seed, _STREAM], np.uint64)).random_raw(len(shapes))
    order = np.argsort(keys, kind="stable").tolist()
    taken, judged, num_drawn = list[int](), set[Hashable](), 0
    while len(taken) < num_samples and num_drawn < len(order):
        # Groups of a few draws at a time: those of all samples would take gigabytes of ten million.
        drawn, num_drawn = order[num_drawn : 4 * (num_drawn + num_samples)], 4 * (num_drawn + num_samples)
        wanted = dict.fromkeys(content for p in drawn if (content := _content(shapes[p])) not in judged)
        judged |= wanted.keys()
        for group in _groups(shapes, wanted):
            if len(taken) + len(group) <= num_samples and any(shapes[p].num_supervised_tokens for p in group):
                taken += group
    return np.array(sorted(taken), dtype=np.int64)


def sources_held_out(dataset: Dataset, shapes: Sequence[SampleShape], names: Sequence[str]) -> npt.NDArray[np.int64]:
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
    trained = {_content(shape) for shape, is_out in zip(shapes, taken, strict=True) if not is_out}
    num_shared = sum(_content(shapes[p]) in trained for p in np.flatnonzero(taken).tolist())
    if num_shared:
        raise DataError(
            f"{num_shared} of {taken.sum()} samples of {', '.join(names)} are trained on, too: samples of others "
            "have the same media, or the same id and length",
            where=where, hint="remove them from one side, or validation.num_samples, which holds all of a group out",
        )  # fmt: skip
    return np.flatnonzero(taken)


def _groups(shapes: Sequence[SampleShape], wanted: Iterable[Hashable]) -> Iterable[list[int]]:
    """Positions of all samples of each content, in the order of contents."""
    found: dict[Hashable, list[int]] = {content: [] for content in wanted}
    for position, shape in enumerate(shapes):
        if (content := _content(shape)) in found:
            found[content].append(position)
    return found.values()


def _content(shape: SampleShape) -> Hashable:
    return (*(item.path for item in shape.items),) or (shape.sample_id, shape.num_text_tokens)
