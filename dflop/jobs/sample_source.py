"""Tokens and media of a dataset on disk, for the ranks. Decode workers import this file, so it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample, MediaRef
from dflop.data.dataset_profile import DatasetRef
from dflop.data.headers import BadMedia
from dflop.data.load_media import load_item
from dflop.data.shapes import header_of, place
from dflop.data.tokens import EncodedSample
from dflop.models.family import Family
from dflop.records import MediaItem, SampleShape
from dflop.train.prefetch import MediaError, Prefetcher

if TYPE_CHECKING:
    from dflop.config import Config  # a worker needs none

_NUM_WORKERS_BESIDE_GPU = 4


class DatasetReader:
    """Decodes media items of samples that were profiled for a family.

    Pickled, it is a reference to the dataset, which is opened again where it arrives.
    """

    def __init__(self, dataset: DatasetRef, family: Family) -> None:
        self._dataset, self._family = dataset, family
        self.rows = dataset.open()

    def __reduce__(self) -> tuple[type[DatasetReader], tuple[DatasetRef, Family]]:
        return DatasetReader, (self._dataset, self._family)

    def __call__(self, sample_index: int, item: MediaItem, level: int) -> npt.NDArray[np.generic]:
        """Encoder input of one item; MediaError where the file is missing, damaged, or not what was profiled."""
        try:
            source = self.rows.open_media(sample_index, MediaRef(item.kind, item.path))
            return load_item(source, item, self._family, level)
        except (BadMedia, BadSample, ValueError) as error:
            raise MediaError(str(error)) from error


class DatasetSource:
    """A `SampleSource` over the healthy samples of a dataset, profiled for this family."""

    def __init__(self, dataset: DatasetRef, family: Family, shapes: Sequence[SampleShape]) -> None:
        self._family = family
        self.reader = DatasetReader(dataset, family)
        self._rows = self.reader.rows
        self._tokenizer = dataset.chat_tokenizer(family)
        self._shapes = {s.sample_index: s for s in shapes}

    def shape(self, sample_index: int) -> SampleShape:
        return self._shapes[sample_index]

    @property
    def num_sources(self) -> int:
        """Sources with different names."""
        return len({entry.name for entry in self._rows.entries})

    def source(self, sample_index: int) -> str:
        """Name of the entry of the dataset that a sample is from."""
        return self._rows.entries[self._rows.locate(sample_index)[0]].name

    def tokens(self, sample_index: int) -> EncodedSample:
        shape = self._shapes[sample_index]
        num_images = sum(item.kind == "image" for item in shape.items)
        layouts = [place(self._family, header_of(item), num_images, shape.media_level).layout for item in shape.items]
        (whole,) = self._tokenizer.encode([self._rows.sample(sample_index)], [layouts])
        return whole.cut(shape.num_llm_tokens)

    def array(self, sample_index: int, item: int) -> np.ndarray:
        shape = self._shapes[sample_index]
        return self.reader(sample_index, shape.items[item], shape.media_level)


def make_prefetcher(config: Config, source: DatasetSource, device_type: str) -> Prefetcher | None:
    """The workers of one rank as the configuration has them; None: the rank decodes for itself."""
    t, cluster = config.train, config.cluster.spec()
    num_workers = t.num_workers
    if num_workers is None:
        # One core is the rank's own.
        spare_cores = cluster.num_cores_per_node // cluster.num_processes_per_node - 1
        num_workers = max(1, min(_NUM_WORKERS_BESIDE_GPU, spare_cores)) if device_type == "cuda" else 0
    if not num_workers:
        return None
    # Other ranks wait for this one, and none may take the job for stuck.
    timeout_s = min(t.decode_timeout_s, t.timeout_s / 2, *([t.stall_s / 2] if t.stall_s else []))
    return Prefetcher(source.reader, num_workers, timeout_s=timeout_s, max_ahead_bytes=int(t.prefetch_gib * 2**30))
