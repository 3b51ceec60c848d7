"""Media rules read from processors, in a process that may have torchvision: a JSON case per line in, an answer out.

A case has a `folder` with a processor's files, or a `class` of `stand_in_processors.py` and its model `types`;
`options` of the processor; and `items` (kind, width, height, frames, seconds). The answer has `checks` by kind (way,
items, mismatches, reason, several), and per item `layout` and `frames`, or `error`. With a `config` in the folder's
place of a model it is the family `generic` that answers: `specs`, `media`, per item its placement, and per `large` item
its encoder tokens at `levels`. With a `medium` of a model type `exact` the answer is the check of its stages, with the
function `broken` returning False in it.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.models.with_torchvision import import_torchvision


def answer(case):
    from dflop.models.generic.media_check import check_media
    from dflop.models.generic.media_processor import MediaProcessor, load_processor
    from dflop.models.media import MediaHeader

    options = case.get("options")
    if "config" in case:
        return family_answer(case)
    if "medium" in case:
        return exactness_answer(**case)
    if "folder" in case:
        processor = MediaProcessor(load_processor(Path(case["folder"])), options)
    else:
        from tests.models.stand_in_processors import make_processor

        processor = MediaProcessor(make_processor(case["class"], case["types"]), options)
    checks = check_media(processor)
    items = [item_answer(processor, checks, MediaHeader(*item)) for item in case.get("items", ())]
    return {"checks": {kind: check_answer(check) for kind, check in checks.items()}, "items": items}


def exactness_answer(exact, medium, broken=None):
    from dflop.models.generic import exact as check
    from dflop.models.generic.media_processor import MediaProcessor
    from dflop.models.generic.processed_items import small_processor
    from dflop.models.generic.structure import read_structure
    from tests.bench.model_configs import config_of
    from tests.bench.models import fitted

    config = config_of(exact)
    processor = MediaProcessor(fitted(exact, config))
    model, _ = check.small_model(config, read_structure(config))
    processor = small_processor(processor, config, model.config)
    with mock.patch(broken, return_value=False) if broken else contextlib.nullcontext():
        found = check._checked(model, medium, processor)
    return {"problem": found.problem, "is_exact": found.is_exact, "error": found.error}


def family_answer(case):
    from dflop.models.generic.family import GenericFamily
    from dflop.models.media import MediaHeader
    from dflop.records import to_dict

    folder = Path(case["folder"])
    family = GenericFamily(case["config"], {}, folder, folder / "cache")
    placed = []
    for header in (MediaHeader(*item) for item in case["items"]):
        try:
            placed.append(to_dict(family.place(header)))
        except ValueError as error:
            placed.append(str(error))
    media = {of.kind: of.problem for of in family.facts.media}
    shrunk = [tokens_by_level(family, MediaHeader(*item), case["levels"]) for item in case.get("large", ())]
    return {"specs": [to_dict(spec) for spec in family.specs()], "media": media, "placed": placed, "shrunk": shrunk}


def tokens_by_level(family, header, levels):
    """Encoder tokens of an item at levels of shrinking; what its frames become has the shape that was planned."""
    found, is_trained = [], next(of.form for of in family.facts.media if of.kind == header.kind)
    for level in levels:
        placed = family.place(header, level=level)
        found.append(placed.num_tokens)
        if not is_trained:
            continue
        item = header.item("", placed)
        indices = family.frame_indices(item.num_frames, item.duration_s, level) if header.kind == "video" else (0,)
        frames = [np.zeros((len(indices), *size, 3), np.uint8) for size in family.frame_sizes_px(item, level)]
        assert family.array_of(item, frames).shape == family.array_shape(placed.module, item.grid), (header, level)
    return found


def check_answer(check):
    shown = [[m.header.width_px, m.header.height_px, *m.counted, *m.real] for m in check.mismatches]
    way = check.rule.way if check.rule else ""
    return {"way": way, "items": check.num_items, "mismatches": shown, "reason": check.reason, "several": check.several}


def item_answer(processor, checks, header):
    frames = ()
    try:
        if header.kind == "video":
            frames = processor.frame_indices(header.num_frames, header.num_frames / header.duration_s)
        return {"layout": checks[header.kind].rule.expand(header), "frames": frames}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    answers, sys.stdout = sys.stdout, sys.stderr
    kept = import_torchvision()
    for line in sys.stdin:
        try:
            said = answer(json.loads(line))
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)
    del kept


if __name__ == "__main__":
    main()
