"""Media of a rank's encoder stages: begun in workers where there are some, and laid side by side for the encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from dflop.models.family import Family
from dflop.parallel.topology import Seat
from dflop.records import LLM, MediaItem, ModuleWork, SampleShape, StepPlan
from dflop.train.activity import Activity
from dflop.train.decode_worker import MediaError
from dflop.train.prefetch import Prefetcher, Wanted

Bad = dict[int, tuple[str, str]]
"""Position in the global batch -> (path, reason)."""


class MediaPacker:
    """Encoder inputs of one seat.

    Args:
        shape: Shape of a sample.
        array: Encoder input of an item of a sample, used where there are no workers; raises `MediaError`.
        family: Shapes of encoder inputs.
        seat: The rank's place.
        prefetcher: Workers, or None.
        dtype: What encoders take.
        pins: Whether tensors lie in page-locked memory.
        activity: Told which file is waited for.
    """

    def __init__(
        self, shape: Callable[[int], SampleShape], array: Callable[[int, int], np.ndarray], family: Family, seat: Seat,
        *, prefetcher: Prefetcher | None, dtype: torch.dtype, pins: bool, activity: Activity,
    ) -> None:  # fmt: skip
        self._shape, self._array, self._family, self._seat = shape, array, family, seat
        self._prefetcher, self._dtype, self._pins, self._activity = prefetcher, dtype, pins, activity

    def begin(self, step_plan: StepPlan, later: Sequence[StepPlan]) -> None:
        """Let workers decode a step's media, then those of later steps as far as there is room for them."""
        if self._prefetcher is not None:
            self._prefetcher.begin(step_plan.step, self._wanted(step_plan))
            self.look_ahead(later)

    def look_ahead(self, later: Sequence[StepPlan]) -> None:
        """The second half of `begin`."""
        if self._prefetcher is not None:
            for step_plan in later:
                if not self._prefetcher.begin(step_plan.step, self._wanted(step_plan), if_room=True):
                    return

    def pack(self, step_plan: StepPlan, work: ModuleWork, items: Sequence[int], bad: Bad) -> torch.Tensor:
        """Arrays of some items side by side; zeros for those that cannot be had, which are noted in `bad`."""
        axis = self._family.towers[work.module].data_axis
        shapes = [self._family.array_shape(work.module, self.media(step_plan, work, item)[1].grid) for item in items]
        whole = list(shapes[0])
        whole[axis] = sum(shape[axis] for shape in shapes)
        data: torch.Tensor | None = None
        start = 0
        for item, shape in zip(items, shapes, strict=True):
            path = self.media(step_plan, work, item)[1].path
            self._activity.works(f"media {path}")
            try:
                array = torch.from_numpy(self._take(step_plan, work, item, shape))
                if data is None:  # bytes stay bytes, until they are on the device
                    dtype = array.dtype if array.dtype == torch.uint8 else self._dtype
                    data = torch.zeros(whole, dtype=dtype, pin_memory=self._pins)
                data.narrow(axis, start, shape[axis]).copy_(array)
            except MediaError as error:
                bad[work.item_sample[item]] = (path, str(error))
            start += shape[axis]
        return torch.zeros(whole, dtype=self._dtype) if data is None else data

    def finish(self, step_plan: StepPlan) -> None:
        """The step is packed."""
        if self._prefetcher is not None:
            self._prefetcher.finish(step_plan.step)

    def close(self) -> None:
        """End the workers; whoever waits for one gets an error."""
        if self._prefetcher is not None:
            self._prefetcher.close()

    def media(self, step_plan: StepPlan, work: ModuleWork, item: int) -> tuple[int, MediaItem]:
        """(sample index, media item) of an item of a module."""
        index = step_plan.sample_index[work.item_sample[item]]
        return index, self._shape(index).items[work.item_rank_in_sample[item]]

    def _take(self, step_plan: StepPlan, work: ModuleWork, item: int, shape: tuple[int, ...]) -> np.ndarray:
        if self._prefetcher is not None:
            array = self._prefetcher.take(step_plan.step, (work.module, item))
        else:
            index, _ = self.media(step_plan, work, item)
            array = self._array(index, work.item_rank_in_sample[item])
        if array.shape != shape:
            raise MediaError(f"decodes to an array of shape {array.shape}, not {shape} as in its profile")
        return array

    def _wanted(self, step_plan: StepPlan) -> dict[tuple[str, int], Wanted]:
        """Media that this rank's encoder stages take, by (module, item), in the order in which they do."""
        found = {}
        for k in range(step_plan.num_microbatches):
            for part in (p for p in self._seat.parts if p.module != LLM and p.is_first):
                work = step_plan.of(part.module)
                for item in work.owner[k][self._seat.dp_rank]:
                    index, media = self.media(step_plan, work, item)
                    value_bytes = 1 if self._family.towers[part.module].colours else 4
                    size_bytes = value_bytes * math.prod(self._family.array_shape(part.module, media.grid))
                    found[part.module, item] = Wanted(index, media, self._shape(index).media_level, size_bytes)
        return found
