"""What an encoder's layers yield on the way, besides the hidden states that go from layer to layer.

Some projectors take hidden states of inner layers; some towers merge them into deep features for the LLM. When a tower
is cut, what the slices before have yielded travels beside the hidden states, and the last slice puts all of it where
Hugging Face's own forward looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Taps:
    """Nothing besides the hidden states; the base of the others.

    Args:
        width: Of what is yielded.
        num_before: How many of them the slices before have yielded.
    """

    def __init__(self, width: int = 0, num_before: int = 0) -> None:
        self.width, self.num_before = width, num_before
        self._yielded: list[torch.Tensor] | None = None

    @contextmanager
    def listening(self, before: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Everything yielded so far, `[rows, width]` each, beginning with `before`; grows while the slice runs.

        Outside of it nothing is noted: layers that are computed again in the backward pass yield a second time.
        """
        self._yielded = list(before)
        try:
            yield self._yielded
        finally:
            self._yielded = None

    def note(self, yielded: torch.Tensor) -> None:
        if self._yielded is not None:
            self._yielded.append(yielded.reshape(-1, self.width))

    def rows(self, rows: torch.Tensor, before: Sequence[torch.Tensor]) -> torch.Tensor:
        """The encoder's rows with what the slices before have yielded for the LLM."""
        return rows


class DeepFeatures(Taps):
    """Hidden states that mergers turn into rows of their own, beside those of the tower.

    Args:
        module: The tower; keeps the mergers of the slice's own layers.
        first: First layer of the slice.
        end: Behind its last layer.
        shift: Subtracted from a layer's global index for its place in the slice.
    """

    def __init__(self, module: Any, first: int, end: int, shift: int) -> None:
        indexes, mergers = list(module.deepstack_visual_indexes), list(module.deepstack_merger_list)
        super().__init__(int(module.config.out_hidden_size), sum(i < first for i in indexes))
        mine = [n for n, i in enumerate(indexes) if first <= i < end]
        module.deepstack_visual_indexes = [indexes[n] - shift for n in mine]
        module.deepstack_merger_list = nn.ModuleList([mergers[n] for n in mine])
        for merger in module.deepstack_merger_list:
            merger.register_forward_hook(lambda _module, _given, feature: self.note(feature))

    def rows(self, rows: torch.Tensor, before: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([rows[:, : self.width], *before, rows[:, self.width :]], dim=1)


class HiddenStates(Taps):
    """Hidden states of the layers that a projector takes: number i is what enters layer i, the last one what leaves.

    Args:
        module: The tower.
        layers: All of its layers.
        taken: Numbers of hidden states; negative ones count from the last.
        first: First layer of the slice.
        end: Behind its last layer.
        width: Of the hidden states.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], taken: Sequence[int], first: int, end: int, width: int
    ) -> None:
        self._count = len(layers) + 1
        self._numbers = sorted({number % self._count for number in taken})
        super().__init__(width, sum(number < first for number in self._numbers))
        for number in self._numbers:
            if first <= number < end:
                layers[number].register_forward_pre_hook(lambda _module, given: self.note(given[0]))
        if end == len(layers):
            if end in self._numbers:
                layers[-1].register_forward_hook(lambda _module, _given, made: self.note(made))
            module.register_forward_hook(self._hand_over)

    def _hand_over(self, module: nn.Module, given: Any, out: Any) -> None:
        """Put the hidden states where Hugging Face's forward picks them from the output of its tower."""
        assert self._yielded is not None, "a tower is run within `listening`"
        found = [hidden.contiguous().view_as(out.last_hidden_state) for hidden in self._yielded]
        at = dict(zip(self._numbers, found, strict=True))
        out.hidden_states = tuple(at.get(number) for number in range(self._count))


def taken_states(config: Any) -> tuple[int, ...]:
    """Numbers of the hidden states that the projector of a model takes."""
    taken = getattr(config, "vision_feature_layer", -1)
    return (taken,) if isinstance(taken, int) else tuple(taken)
