"""Places media items by the processor and by the model on meta, and remembers every size.

A placement takes some 10 ms; sizes of a dataset repeat. What a process placed is a file of lines in the folder of the
model's facts: no lock, and a torn line costs one placement.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.models.generic.arrays import grid_of
from dflop.models.generic.facts import ModelFacts
from dflop.models.media import MediaHeader, Placement
from dflop.records import from_dict, parse_json, to_dict

if TYPE_CHECKING:
    from dflop.models.generic.media_processor import MediaProcessor

Size = tuple[str, int, int, int, float]
"""Kind, width, height, frames, seconds."""


class Placer:
    """Placements of one model's items.

    Args:
        facts: Of the model.
        hf_config: Content of its `config.json`.
        folder: With processor and tokenizer.
        cache: Where sizes are kept; None: in this process only.
    """

    def __init__(self, facts: ModelFacts, hf_config: Mapping[str, Any], folder: Path, cache: Path | None) -> None:
        self._facts, self._hf_config, self._folder = facts, hf_config, folder
        self._sizes = cache / f"{facts.key}.sizes" if cache else None
        self._own = f"{uuid.uuid4().hex}.jsonl"

    @cached_property
    def processor(self) -> MediaProcessor:
        """The model's processor, loaded when a size is new."""
        from dflop.models.generic.media_processor import MediaProcessor, load_processor

        return MediaProcessor(load_processor(self._folder))

    def place(self, header: MediaHeader) -> Placement:
        """Placement of an item of a medium that is not refused.

        Raises:
            ValueError: the processor refuses the item.
        """
        size = (header.kind, header.width_px, header.height_px, header.num_frames, header.duration_s)
        if (found := self._known.get(size)) is None:
            found = self._known[size] = self._placed(header)
            self._keep(size, found)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    @cached_property
    def _known(self) -> dict[Size, Placement | str]:
        """What was placed before, a text where the processor refuses it."""
        found: dict[Size, Placement | str] = {}
        for file in sorted(self._sizes.glob("*.jsonl")) if self._sizes else ():
            for line in file.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError, TypeError):  # a torn line
                    size, placed = parse_json(line)
                    found[tuple(size)] = placed if isinstance(placed, str) else from_dict(Placement, placed)
        return found

    def _keep(self, size: Size, placed: Placement | str) -> None:
        if self._sizes is None:
            return
        content = placed if isinstance(placed, str) else to_dict(placed)
        with contextlib.suppress(OSError):  # it is placed again
            self._sizes.mkdir(parents=True, exist_ok=True)
            with open(self._sizes / self._own, "a", encoding="utf-8") as file:
                file.write(json.dumps([size, content]) + "\n")

    def _placed(self, header: MediaHeader) -> Placement | str:
        from dflop.models.generic.lengths import encoder_lengths

        medium = next(of for of in self._facts.media if of.kind == header.kind)
        encoder = self._facts.structure.encoder_of(header.kind)
        assert encoder is not None, "a medium without an encoder is refused"
        try:
            layout, inputs = self.processor.made(header, medium.pad, has_values=medium.needs_values)
            of = encoder_lengths(self._model, encoder, header.kind, inputs)
        except Exception as error:  # whatever processor and model raise, they do not take the item
            return " ".join(str(error).split())[:200]
        num_rows = sum(part for part in layout if isinstance(part, int))
        sequences = (of.num_sequences, of.num_tokens // of.num_sequences, 1)
        grid = grid_of(medium.form, header.kind, inputs) if medium.form else sequences
        return Placement(encoder.medium, grid, of.num_tokens, of.sum_sq_tokens, num_rows, layout)

    @cached_property
    def _model(self) -> Any:
        from dflop.models.generic.meta_run import empty_model

        return empty_model(self._hf_config)
