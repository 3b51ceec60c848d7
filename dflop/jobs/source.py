"""Tokens and media of a dataset on disk, for the training ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dflop.data.annotations import BadSample, MediaRef
from dflop.data.headers import BadMedia
from dflop.data.load import load_item
from dflop.data.profile import DatasetRef
from dflop.data.shapes import header_of, place
from dflop.data.tokens import ChatTokenizer
from dflop.models.family import TrainableFamily
from dflop.records import SampleShape
from dflop.train.feed import MediaError, TokenizedSample


class DatasetSource:
    """A `SampleSource` over profiled samples of one dataset.

    Args:
        dataset: Where the dataset lies.
        family: Family the shapes were profiled for.
        shapes: Healthy samples.
    """

    def __init__(self, dataset: DatasetRef, family: TrainableFamily, shapes: Sequence[SampleShape]) -> None:
        self._family = family
        self._rows = dataset.open()
        self._tokenizer = ChatTokenizer(dataset.tokenizer, family, dataset.chat_template)
        self._shapes = {s.sample_index: s for s in shapes}

    def shape(self, sample_index: int) -> SampleShape:
        return self._shapes[sample_index]

    def tokens(self, sample_index: int) -> TokenizedSample:
        shape = self._shapes[sample_index]
        num_images = sum(item.kind == "image" for item in shape.items)
        layouts = [place(self._family, header_of(item), num_images, shape.media_level).layout for item in shape.items]
        encoded = self._tokenizer.encode(self._rows.sample(sample_index), layouts, shape.num_llm_tokens)
        return TokenizedSample(encoded.input_ids, encoded.labels, encoded.media_positions)

    def array(self, sample_index: int, item: int) -> np.ndarray:
        shape = self._shapes[sample_index]
        media = shape.items[item]
        try:
            source = self._rows.open_media(sample_index, MediaRef(media.kind, media.path))
            return load_item(source, media, self._family, shape.media_level)
        except (BadMedia, BadSample, ValueError) as error:
            raise MediaError(str(error)) from error
