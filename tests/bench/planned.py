"""Plans a model of the family `generic` on synthetic samples for 64 H100 by data sheet: headers only, no pixels."""

import contextlib
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from dflop.cost.analytic import analytic_cost_tables, analytic_link_costs
from dflop.cost.devices import find_device
from dflop.cost.model import CostModel
from dflop.errors import DflopError
from dflop.models.generic.family import GenericFamily
from dflop.models.media import MediaHeader
from dflop.plan.search import optimize
from dflop.plan.space import Problem, SearchSpace
from dflop.profile.groups import used_modules
from dflop.records import ClusterSpec, SampleShape
from dflop.report.tables import layout_text

NUM_NODES, GPUS_PER_NODE, BATCH = 8, 8, 128
PICTURES = ((640, 480), (1024, 768), (448, 448), (1280, 720), (300, 900), (800, 600))
SECONDS = (2.0, 5.0, 9.0, 17.0, 29.0)
_LOADED_IN = "dflop.models.generic.{}.load_processor"


def planned(folder: Path, processor: Any) -> dict[str, Any]:
    """How a model's media are counted, its plan, and processor seconds.

    `problem` says why there is no plan, `untrained` what is planned for and not trained.

    Args:
        folder: With its config, and where facts are kept.
        processor: That its folder stands for.
    """
    config, found = json.loads((folder / "config.json").read_text()), {}
    try:
        with contextlib.ExitStack() as within:
            for name in ("read_facts", "media_processor"):
                within.enter_context(mock.patch(_LOADED_IN.format(name), return_value=processor))
            started = time.process_time()
            family = GenericFamily(config, {}, folder, folder / "cache")
            found["read_s"] = round(time.process_time() - started, 2)
            started = time.process_time()
            GenericFamily(config, {}, folder, folder / "cache")
            found["again_s"] = round(time.process_time() - started, 2)
            of_media = [f"{of.kind}: {of.untrained}" for of in family.facts.media if of.untrained]
            found["untrained"] = "; ".join(filter(None, (family.facts.untrained, *of_media)))
            found["media"] = {medium.kind: medium.problem or medium.way for medium in family.facts.media}
            if not family.media_tokens:
                problem = "; ".join(f"{kind}: {why}" for kind, why in found["media"].items())
                return found | {"problem": problem or "the processor takes neither pictures nor clips nor sounds"}
            started = time.process_time()
            found["plan"] = _plan(family, tuple(_shapes(family)))
            found["plan_s"] = round(time.process_time() - started, 2)
    except DflopError as error:
        found["problem"] = str(getattr(error, "what", error)).replace(str(folder), "")
    return found


def _plan(family: GenericFamily, shapes: tuple[SampleShape, ...]) -> str:
    specs, sheet = used_modules(family, shapes), find_device("h100")
    cluster = ClusterSpec("bench", "local", NUM_NODES, GPUS_PER_NODE, sheet.memory_bytes, "cuda", 64)
    links = analytic_link_costs(sheet, num_nodes=NUM_NODES, num_processes_per_node=GPUS_PER_NODE, profile_key="")
    cost = CostModel(analytic_cost_tables(specs, sheet, profile_key=""), specs=specs, links=links, extrapolate=True)
    space = SearchSpace(cps=(1,), microbatches=(2, 4))
    return layout_text(optimize(Problem("bench", specs, cluster, cost, (shapes,), BATCH, 0, space), top=4).plans[0])


def _shapes(family: GenericFamily) -> Iterator[SampleShape]:
    """Samples of text, four of five with an item of the first medium that is not refused."""
    rng = random.Random(0)
    kind = next((kind for kind in ("image", "video", "audio") if kind in family.media_tokens), "")
    for index in range(BATCH):
        text, items = rng.randint(20, 600), []
        if kind and rng.random() < 0.8:
            header = _header(kind, rng)
            with contextlib.suppress(ValueError):  # the processor refuses the size, as it would in a profile
                items.append(header.item("", family.place(header)))
        num = text + sum(item.num_rows for item in items)
        sum_sq = family.sum_sq_llm_tokens(num)
        yield SampleShape("bench", index, str(index), text, text // 2, num, tuple(items), sum_sq_llm_tokens=sum_sq)


def _header(kind: str, rng: random.Random) -> MediaHeader:
    if kind == "audio":
        return MediaHeader(kind, 0, 0, 0, rng.choice(SECONDS))
    frames = rng.choice((40, 90)) if kind == "video" else 1
    return MediaHeader(kind, *rng.choice(PICTURES), frames, frames / 10 if kind == "video" else 0.0)
