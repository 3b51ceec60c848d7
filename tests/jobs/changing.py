"""A run whose samples change midway: texts first, pictures behind them, in the order of the file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from dflop.jobs.rundir import RunDir
from dflop.records import SampleShape
from tests.jobs.training import BATCH_SIZE, ROOT, planned_run

MAX_PICTURES = 1
"""Per batch of texts: without any there would be no process for them."""


def encoder_heavy_model(folder: Path, *, encoder_layers: int, llm_layers: int) -> Path:
    """The tiny Omni model with other depths."""
    text = (ROOT / "configs/models/tiny_omni.yaml").read_text()
    changes = {
        "    depth: 4": f"    depth: {encoder_layers}",
        "[0, 1, 2, 3]": str(list(range(encoder_layers))),
        "num_hidden_layers: 6": f"num_hidden_layers: {llm_layers}",
    }
    for old, new in changes.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = folder / "encoder_heavy.yaml"
    path.write_text(text)
    return path


def changing_run(folder: Path, *overrides: str, num_text_steps: int, num_picture_steps: int) -> RunDir:
    """As `planned_run`, trained in the order in which the samples are listed."""
    folder.mkdir(parents=True, exist_ok=True)
    model = encoder_heavy_model(folder, encoder_layers=8, llm_layers=2)
    run = planned_run(
        folder, f"model={model}", f"dataset.shuffle_window={BATCH_SIZE}",
        f"train.num_steps={num_text_steps + num_picture_steps}", *overrides, num_rows=192, num_kept=144,
    )  # fmt: skip
    texts = [s for s in run.shapes() if not s.items]
    pictures = sorted((s for s in run.shapes() if s.items), key=lambda s: len(s.items))
    first = _batches(texts, num_text_steps, BATCH_SIZE - MAX_PICTURES)
    few, many = _batches(pictures, num_text_steps, MAX_PICTURES), _batches(pictures, num_picture_steps, BATCH_SIZE)
    mixed = [shape for batch in zip(first, few, strict=True) for part in batch for shape in part]
    run.write_shapes([*mixed, *itertools.chain.from_iterable(many)])
    return run


def _batches(shapes: Sequence[SampleShape], num_batches: int, size: int) -> list[list[SampleShape]]:
    """Samples in turn, over and over."""
    endless = itertools.cycle(shapes)
    return [list(itertools.islice(endless, size)) for _ in range(num_batches)]
