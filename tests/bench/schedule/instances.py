"""Steps to schedule: real models on data-sheet costs, with real sample shapes where a file of them is given.

`mild` cuts samples at 8k tokens and videos at 16 frames, `heavy` at 32k and 128. Kinds of samples come in the shares of
a general training set; within a kind all sources of the file are alike likely, and so are a source's samples.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from dflop import resources
from dflop.config import load_model
from dflop.cost.devices import A100
from dflop.cost.model import CostModel, has_edge
from dflop.data.sizes import read_sizes
from dflop.jobs.suite.cases import analytic_costs
from dflop.jobs.suite.mixtures import HEAVY, MAIN, draw_batches
from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.media import Placement
from dflop.plan.candidates import split_layers
from dflop.records import LLM, MediaItem, ModulePlan, ParallelSpec, Plan, SampleShape
from dflop.schedule.items import module_items

MODEL_OF = {1: "llava_onevision_qwen2_5_7b", 2: "llava_onevision_qwen2_5_7b", 3: "qwen2_5_omni_7b"}
"""By number of modules; 1 is the language model on the text alone."""
MAX_TOKENS = {"mild": 8_192, "heavy": 32_768}
MAX_FRAMES = {"mild": 16, "heavy": 128}
SHARES: Mapping[int, Mapping[str, float]] = {
    1: {"text": 1.0},
    2: {"text": 0.5, "image": 0.43, "video": 0.07},
    3: {"text": 0.35, "image": 0.33, "video": 0.07, "audio": 0.25},
}
ENCODER_SHARE = 0.95
"""Seconds per stage of each encoder, relative to the LLM's: what a good plan comes to."""


@dataclass(frozen=True)
class BenchStep:
    """One global batch on one plan."""

    name: str
    plan: Plan
    batch: tuple[SampleShape, ...]
    cost: CostModel


def bench_step(
    modules: int, mixture: str, num_samples: int, *, num_microbatches: int, num_ranks: int, encoder_pp: int = 1,
    llm_pp: int = 1, encoder_dp: int = 1, seed: int = 0, sizes: Path | None = None,
) -> BenchStep:  # fmt: skip
    """A step of `modules` modules.

    Args:
        modules: 1 to 3.
        mixture: `mild` or `heavy`.
        num_samples: Of the global batch.
        num_microbatches: Slots.
        num_ranks: Data-parallel ranks of the LLM.
        encoder_pp: Stages of each encoder.
        llm_pp: Stages of the LLM.
        encoder_dp: Ranks of each encoder.
        seed: Of the batch.
        sizes: Table of real sizes; None: a generated mixture, which has no audio.
    """
    family = _family(modules, mixture)
    specs = [s for s in family.specs() if modules > 1 or s.module == LLM]
    cost = _costs(modules, mixture)
    batch = _batch(family, modules, mixture, num_samples, seed, sizes)
    places, first_rank = [], 0
    for spec in specs:
        pp, dp = (llm_pp, num_ranks) if spec.module == LLM else (encoder_pp, encoder_dp)
        layers = split_layers(spec.num_layers, pp, layer_s=1.0, edge_s=0.0)
        places.append(ModulePlan(spec.module, ParallelSpec(1, pp, dp), first_rank, layers, (0,) * pp))
        first_rank += pp * dp
    plan = Plan(
        plan_id="bench", run_id="bench", candidate_rank=0, layout="split", modules=tuple(places),
        num_microbatches=num_microbatches, global_batch_size=num_samples, formula_step_s=0.0, predicted_step_s=0.0,
        baseline_step_s=0.0, sync_s=0.0, uniform_step_s=0.0, table_ids=(), snapshot_seq=0, reason="",
    )  # fmt: skip
    name = f"{num_samples} samples, {num_microbatches} x {num_ranks}, {modules} modules, {mixture}"
    return BenchStep(name, plan, batch, _balanced(cost, plan, batch))


def _balanced(cost: CostModel, plan: Plan, batch: tuple[SampleShape, ...]) -> CostModel:
    """The same costs with encoders as fast or slow as it takes to be `ENCODER_SHARE` of the LLM, stage by stage."""
    per_stage = {}
    for m in plan.modules:
        items = module_items(batch, m.module)
        seconds = cost.item_seconds(
            m.module,
            *items.loads,
            num_layers=m.layers_per_stage[-1],
            edge=has_edge(m.layers_per_stage, m.parallel.pp - 1),
        )
        per_stage[m.module] = float(seconds.sum()) / m.parallel.dp
    return cost.with_corrections(
        {m.module: ENCODER_SHARE * per_stage[LLM] / (per_stage[m.module] or per_stage[LLM]) for m in plan.encoders}
    )


@functools.cache
def _family(modules: int, mixture: str) -> Family:
    model = load_model(resources.path("configs") / "models" / f"{MODEL_OF[modules]}.yaml")
    frames = "video_max_frames" if modules == 3 else "video_frames"
    return load_family(model.family, model.hf_config, {**model.media, frames: MAX_FRAMES[mixture]})


@functools.cache
def _costs(modules: int, mixture: str) -> CostModel:
    specs = [s for s in _family(modules, mixture).specs() if modules > 1 or s.module == LLM]
    return analytic_costs(specs, A100, 1, 1.0)


def _batch(
    family: Family, modules: int, mixture: str, num_samples: int, seed: int, sizes: Path | None
) -> tuple[SampleShape, ...]:
    if sizes is None:
        drawn = draw_batches(
            family, MAIN if mixture == "mild" else HEAVY, max_llm_tokens=MAX_TOKENS[mixture],
            global_batch_size=num_samples, num_batches=1, seed=seed,
        )[0]  # fmt: skip
        return drawn if modules > 1 else tuple(_text_only(s) for s in drawn)
    return real_batch(family, SHARES[modules], num_samples, MAX_TOKENS[mixture], (seed,), sizes)


def real_batch(
    family: Family, shares: Mapping[str, float], num_samples: int, max_llm_tokens: int, seed: Sequence[int], sizes: Path
) -> tuple[SampleShape, ...]:
    """Rows of a table of sizes, kinds in given shares; a pure function of the arguments and the table."""
    rng, rows = np.random.default_rng(seed), _rows(sizes)
    found: list[SampleShape] = []
    while len(found) < num_samples:
        kind = str(rng.choice(list(shares), p=list(shares.values())))
        source = rows[kind][int(rng.integers(len(rows[kind])))]
        row = source[int(rng.integers(len(source)))]
        shape = _shape(family, row, len(found), max_llm_tokens)
        if shape is not None:
            found.append(shape)
    return tuple(found)


def _text_only(shape: SampleShape) -> SampleShape:
    return replace(shape, items=(), num_llm_tokens=shape.num_text_tokens)


@functools.cache
def _rows(sizes: Path) -> dict[str, list[list[dict[str, object]]]]:
    """Rows by kind and source; a source is what an id names before its slash."""
    table = read_sizes(sizes)
    kinds = (
        pl.when(pl.col("video_seconds").list.len() > 0).then(pl.lit("video"))
        .when(pl.col("audio_seconds").list.len() > 0).then(pl.lit("audio"))
        .when(pl.col("image_w").list.len() > 0).then(pl.lit("image"))
        .otherwise(pl.lit("text"))
    )  # fmt: skip
    table = table.with_columns(kind=kinds, source=pl.col("id").str.split("/").list.first())
    found: dict[str, list[list[dict[str, object]]]] = {}
    for (kind, _), rows in sorted(table.group_by("kind", "source"), key=lambda group: str(group[0])):
        found.setdefault(str(kind), []).append(rows.sort("id").to_dicts())
    return found


def _shape(family: Family, row: Mapping[str, object], index: int, max_llm_tokens: int) -> SampleShape | None:
    """The row as the family sees it, shrunk and then cut to the limit; None: an image smaller than one patch."""
    modules = {spec.module for spec in family.specs()}
    media = [("image", w, h, 1, 0.0) for w, h in zip(*_lists(row, "image_w", "image_h"), strict=True)]
    media += [
        ("video", w, h, max(1, round(2 * s)), s)
        for w, h, s in zip(*_lists(row, "video_w", "video_h", "video_seconds"), strict=False)
        if w and h and s
    ]
    if "audio" in modules:
        media += [("audio", 0, 0, 0, s) for (s,) in zip(*_lists(row, "audio_seconds"), strict=True) if s]
    num_text = max(1, int(row["prompt_tokens"]) + int(row["response_tokens"]))  # type: ignore[call-overload]  # rows of a table are objects
    items: list[MediaItem] = []
    for level in range(family.max_level + 1):
        try:
            items = [_item(family, m, len(media), level) for m in media]
        except ValueError:
            return None
        if num_text + sum(i.num_rows for i in items) <= max_llm_tokens:
            break
    num_rows = sum(i.num_rows for i in items)
    num_text = max(1, min(num_text, max_llm_tokens - num_rows))
    num_supervised = max(1, min(int(row["response_tokens"]), num_text))  # type: ignore[call-overload]  # rows of a table are objects
    return SampleShape("bench", index, str(index), num_text, num_supervised, num_text + num_rows, tuple(items))


def _lists(row: Mapping[str, object], *names: str) -> list[list[float]]:
    return [row[name] or [] for name in names]  # type: ignore[misc]  # rows of a table are objects


def _item(family: Family, media: tuple[str, float, float, int, float], num_images: int, level: int) -> MediaItem:
    kind, width, height, num_frames, duration_s = media
    size = {"width_px": int(width), "height_px": int(height), "num_frames": num_frames, "duration_s": duration_s}
    placed: Placement = family.place(kind, **size, num_images=num_images, level=level)
    return MediaItem(
        kind=kind, path="", **size, module=placed.module, grid=placed.grid, num_tokens=placed.num_tokens,
        sum_sq_tokens=placed.sum_sq_tokens, num_rows=placed.num_rows,
    )  # fmt: skip
