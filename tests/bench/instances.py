"""Global batches and plans that benches share: real models on data-sheet costs, small models that a CPU trains.

Sizes of samples come from a table of real ones, kinds in stated shares, or are generated. `mild` cuts samples at 8k
tokens and videos at 16 frames, `heavy` at 32k and 128.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

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
SMALL_SHARES = {"text": 0.3, "image": 0.5, "video": 0.2}
MIN_SMALL_TOKENS, MAX_SMALL_TOKENS, GENERATED_TEXT_FRAC = 8, 256, 0.125
SIDE_FRAC, S_PER_FRAME = 0.25, 8.0
UNCUT_TOKENS = 1 << 30


@dataclass(frozen=True)
class BenchStep:
    """One global batch on one plan."""

    plan: Plan
    batch: tuple[SampleShape, ...]
    cost: CostModel


def bench_step(modules: int, mixture: str, num_samples: int, seed: int, sizes: Path | None) -> BenchStep:
    """A step of 1 to 3 modules. Generated batches, without a table, have no audio."""
    family = _family(modules, mixture)
    specs = [s for s in family.specs() if modules > 1 or s.module == LLM]
    batch = _batch(family, modules, mixture, num_samples, seed, sizes)
    places, first_rank = [], 0
    for spec in specs:
        pp, dp = (6, 8) if spec.module == LLM else (2, 8)
        layers = split_layers(spec.num_layers, pp, layer_s=1.0, edge_s=0.0)
        places.append(ModulePlan(spec.module, ParallelSpec(1, pp, dp), first_rank, layers, (0,) * pp))
        first_rank += pp * dp
    plan = Plan(
        plan_id="bench", run_id="bench", candidate_rank=0, layout="split", modules=tuple(places),
        num_microbatches=16, global_batch_size=num_samples, formula_step_s=0.0, predicted_step_s=0.0,
        baseline_step_s=0.0, sync_s=0.0, uniform_step_s=0.0, table_ids=(), snapshot_seq=0, reason="",
    )  # fmt: skip
    return BenchStep(plan, batch, _balanced(analytic_costs(specs, A100, 1, 1.0), plan, batch))


def _balanced(cost: CostModel, plan: Plan, batch: tuple[SampleShape, ...]) -> CostModel:
    """The same costs with encoders as fast or slow as it takes to be `ENCODER_SHARE` of the LLM, stage by stage."""
    per_stage = {}
    for m in plan.modules:
        edge, num_layers = has_edge(m.layers_per_stage, m.parallel.pp - 1), m.layers_per_stage[-1]
        loads = module_items(batch, m.module).loads
        seconds = cost.item_seconds(m.module, *loads, num_layers=num_layers, edge=edge)
        per_stage[m.module] = float(seconds.sum()) / m.parallel.dp
    return cost.with_corrections(
        {m.module: ENCODER_SHARE * per_stage[LLM] / (per_stage[m.module] or per_stage[LLM]) for m in plan.encoders}
    )


@functools.cache
def _family(modules: int, mixture: str) -> Family:
    model = load_model(resources.path("configs") / "models" / f"{MODEL_OF[modules]}.yaml")
    frames = "video_max_frames" if modules == 3 else "video_frames"
    return load_family(model.family, model.hf_config, {**model.media, frames: MAX_FRAMES[mixture]})


def _batch(
    family: Family, modules: int, mixture: str, num_samples: int, seed: int, sizes: Path | None
) -> tuple[SampleShape, ...]:
    if sizes:
        return real_batch(family, SHARES[modules], num_samples, MAX_TOKENS[mixture], (seed,), sizes)
    (drawn,) = draw_batches(
        family, MAIN if mixture == "mild" else HEAVY, max_llm_tokens=MAX_TOKENS[mixture],
        global_batch_size=num_samples, num_batches=1, seed=seed,
    )  # fmt: skip
    return drawn if modules > 1 else tuple(replace(s, items=(), num_llm_tokens=s.num_text_tokens) for s in drawn)


def real_batch(
    family: Family, shares: Mapping[str, float], num_samples: int, max_llm_tokens: int, seed: Sequence[int], sizes: Path
) -> tuple[SampleShape, ...]:
    """Rows of a table of sizes; within a kind all sources are alike likely, and so are a source's samples."""
    rng, rows = np.random.default_rng(seed), _rows(sizes)
    found: list[SampleShape] = []
    while len(found) < num_samples:
        kind = str(rng.choice(list(shares), p=list(shares.values())))
        source = rows[kind][int(rng.integers(len(rows[kind])))]
        shape = _shape(family, source[int(rng.integers(len(source)))], len(found), max_llm_tokens)
        if shape is not None:
            found.append(shape)
    return tuple(found)


@functools.cache
def _rows(sizes: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """Rows by kind and source; a source is what an id names before its slash."""
    kinds = (
        pl.when(pl.col("video_seconds").list.len() > 0).then(pl.lit("video"))
        .when(pl.col("audio_seconds").list.len() > 0).then(pl.lit("audio"))
        .when(pl.col("image_w").list.len() > 0).then(pl.lit("image"))
        .otherwise(pl.lit("text"))
    )  # fmt: skip
    rows = read_sizes(sizes).with_columns(kind=kinds, source=pl.col("id").str.split("/").list.first())
    found: dict[str, list[list[dict[str, Any]]]] = {}
    for (kind, _), of_source in sorted(rows.group_by("kind", "source"), key=lambda group: str(group[0])):
        found.setdefault(str(kind), []).append(of_source.sort("id").to_dicts())
    return found


def _shape(family: Family, row: Mapping[str, Any], index: int, max_llm_tokens: int) -> SampleShape | None:
    """The row as the family sees it, shrunk and then cut to the limit; None: an image smaller than one patch."""

    def of(*columns: str) -> list[tuple[Any, ...]]:
        return list(zip(*(row[column] or [] for column in columns), strict=False))

    media = [("image", w, h, 1, 0.0) for w, h in of("image_w", "image_h")]
    media += [
        ("video", w, h, max(1, round(2 * s)), s) for w, h, s in of("video_w", "video_h", "video_seconds") if w and s
    ]
    if "audio" in {spec.module for spec in family.specs()}:
        media += [("audio", 0, 0, 0, s) for (s,) in of("audio_seconds") if s]
    num_text = max(1, (row["prompt_tokens"] or 0) + (row["response_tokens"] or 0))
    items: list[MediaItem] = []
    for level in range(family.max_level + 1):
        try:
            items = [place(family, *m, num_images=len(media), level=level) for m in media]
        except ValueError:
            return None
        if num_text + sum(i.num_rows for i in items) <= max_llm_tokens:
            break
    num_rows = sum(i.num_rows for i in items)
    num_text = max(1, min(num_text, max_llm_tokens - num_rows))
    num_supervised = max(1, min(row["response_tokens"] or 0, num_text))
    return SampleShape("bench", index, str(index), num_text, num_supervised, num_text + num_rows, tuple(items))


def place(
    family: Family, kind: str, width_px: float, height_px: float, num_frames: int, duration_s: float, *,
    num_images: int, level: int = 0,
) -> MediaItem:  # fmt: skip
    """A media item as the family sees it."""
    size: dict[str, Any] = {
        "width_px": int(width_px), "height_px": int(height_px), "num_frames": num_frames, "duration_s": duration_s,
    }  # fmt: skip
    placed = family.place(kind, **size, num_images=num_images, level=level)
    return MediaItem(
        kind=kind, path="", **size, module=placed.module, grid=placed.grid, num_tokens=placed.num_tokens,
        sum_sq_tokens=placed.sum_sq_tokens, num_rows=placed.num_rows,
    )  # fmt: skip


def small_batch(
    family: Family, num_samples: int, seed: int, sizes: Path | None, first_index: int = 0
) -> list[SampleShape]:
    """Samples made small enough for a tiny model on one core.

    Who has media, how many, and how sizes go together is kept: text is clipped, pictures are shown at a quarter of
    their sides, videos at a frame every eight seconds. Audio is left out. Indices count from `first_index`.
    """
    if sizes:
        drawn, text_frac = real_batch(family, SMALL_SHARES, num_samples, UNCUT_TOKENS, (seed,), sizes), 1.0
    else:
        (drawn,) = draw_batches(
            family, HEAVY, max_llm_tokens=MAX_TOKENS["heavy"], global_batch_size=num_samples, num_batches=1, seed=seed
        )
        text_frac = GENERATED_TEXT_FRAC
    return [_small(family, shape, index, text_frac) for index, shape in enumerate(drawn, first_index)]


def _small(family: Family, shape: SampleShape, index: int, text_frac: float) -> SampleShape:
    seen = [i for i in shape.items if i.kind != "audio"]
    items = tuple(
        place(
            family, i.kind, max(1, i.width_px * SIDE_FRAC), max(1, i.height_px * SIDE_FRAC),
            max(1, round(i.duration_s / S_PER_FRAME)), i.duration_s, num_images=len(seen),
        )
        for i in seen
    )  # fmt: skip
    num_text = min(max(round(shape.num_text_tokens * text_frac), MIN_SMALL_TOKENS), MAX_SMALL_TOKENS)
    answer_frac = shape.num_supervised_tokens / shape.num_text_tokens
    num_supervised = min(max(1, round(num_text * answer_frac)), num_text - 1)  # one token carries no loss
    num_rows = sum(i.num_rows for i in items)
    return SampleShape("bench", index, str(index), num_text, num_supervised, num_text + num_rows, items)
