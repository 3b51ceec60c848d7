"""How a published folder names and stores tensors: under other names, experts apart, matrices fused or split.

All of it is transformers' knowledge, and asked of it; a tensor that it computes from several is computed when it is
read, so that a rank never holds more than one layer's.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor of a folder belongs."""

    name: str
    """Name of the model's parameter; of several that are made of it, the first."""
    pattern: str | None
    """By which transformers knows how it is converted; None: it is the parameter."""


class StoredNames:
    """Names of a model's tensors in folders.

    Args:
        model: Whole model, which may be empty.
        names: Of its parameters and buffers.
    """

    def __init__(self, model: Any, names: Collection[str]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        transforms = get_model_conversion_mapping(model)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._converters = converters
        self._of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        self._model, self._present = model, dict.fromkeys(names, True)

    def stored(self, key: str) -> Stored:
        """Where the tensor of a name in a folder belongs."""
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        found = Stored(*rename_source_key(key, self._renamings, self._converters, prefix, self._present))
        if found.name not in self._present and key in self._present:  # it has the model's own name and form
            return Stored(key, None)
        return found

    def made_of(self, stored: Stored) -> list[str]:
        """Names of all parameters that are made of a tensor."""
        if stored.pattern is None:
            return [stored.name]
        first, *others = self._of_pattern[stored.pattern].target_patterns
        return [stored.name, *(stored.name.replace(first, other) for other in others)]

    def convert(self, parts: Sequence[tuple[Stored, str]], tensors: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by name.

        Args:
            parts: All tensors that belong to one name, in the order of a folder, with their names in it.
            tensors: Of them.
        """
        (stored, _), *_ = parts
        assert stored.pattern is not None, "what is not converted is read as it lies"
        converter: Any = copy.deepcopy(self._of_pattern[stored.pattern])
        for (each, key), tensor in zip(parts, tensors, strict=True):
            converter.add_tensor(stored.name, key, each.pattern, tensor)
        made = converter.convert(stored.name, model=self._model, config=self._model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}
