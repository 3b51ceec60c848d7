"""The two datasets that are trained on: the demo's, and a folder of real media with its annotations."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from dflop.data.demo import make_demo_dataset

DEMO, MEDIA = "demo", "media"
NUM_ROWS = 320
ANNOTATIONS = "llava_demo.jsonl"
"""In the folder of media."""


@dataclass(frozen=True)
class Files:
    """Where a dataset lies."""

    annotations: Path
    media_root: Path
    tokenizer: Path


def make_files(name: str, folder: Path, media: Path | None, num_rows: int = NUM_ROWS) -> Files:
    """Build a dataset below a folder.

    Args:
        name: `DEMO` or `MEDIA`.
        folder: For what is written.
        media: The folder of media; with `DEMO` not looked at.
        num_rows: Of the annotation file. A folder of media has fewer: each row of it occurs several times, under ids of
            its own, so that no global batch is the small rest of an epoch.

    Raises:
        SystemExit: the folder of media has no annotations.
    """
    demo = folder / "demo"
    make_demo_dataset(demo, num_rows)
    if name == DEMO:
        return Files(demo / "annotations.jsonl", demo / "media", demo / "tokenizer.json")
    given = (media or Path()) / ANNOTATIONS
    if media is None or not given.is_file():
        raise SystemExit(f"no {given}: --media names a folder of media with annotations of that name")
    rows = [json.loads(line) for line in given.read_text().splitlines()]
    repeated = itertools.islice(itertools.cycle(rows), num_rows)
    lines = [json.dumps(row | {"id": f"{row['id']}-{number}"}) for number, row in enumerate(repeated)]
    annotations = folder / "media.jsonl"
    annotations.write_text("\n".join(lines) + "\n")
    # The demo's tokenizer, trained on the demo's texts: a vocabulary of 150 000 would make the head most of the model.
    return Files(annotations, media.absolute(), demo / "tokenizer.json")
