"""Media of a dataset on disk to encoder inputs; what decode workers run, so it imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dflop.data.annotations import BadSample, MediaRef
from dflop.data.dataset_profile import DatasetRef
from dflop.data.headers import BadMedia
from dflop.data.load_media import load_item
from dflop.models.family import Family
from dflop.records import MediaItem
from dflop.train.prefetch import MediaError


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
