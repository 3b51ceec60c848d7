"""Planning problems of real-size models on data-sheet costs, with real sample shapes where a file of them is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from dflop.cost.devices import A100, H200, Device
from dflop.data.distribution import sample_batches
from dflop.data.sizes import read_sizes
from dflop.jobs.suite.cases import CASES, Case, analytic_costs, suite_family, suite_specs
from dflop.jobs.suite.mixtures import MIXTURES, draw_batches
from dflop.models.family import Family
from dflop.plan.space import Problem, SearchSpace
from dflop.records import ClusterSpec, MediaItem, SampleShape

NUM_ROWS = 20_000
"""Of the file of sizes, evenly spread."""
NUM_PLANNING, NUM_UNSEEN = 4, 4
REAL = "real"
"""Name of the mixture in the file of sizes."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """One problem and batches that the planner does not see."""

    name: str
    problem: Problem
    unseen: tuple[Sequence[SampleShape], ...]


def make_instance(
    case: Case, mixture: str, num_gpus: int, device: Device, global_batch_size: int, *, sizes: Path | None,
    space: SearchSpace, encoder_factor: float = 1.0, seed: int = 0, num_planning: int = NUM_PLANNING,
) -> Instance:  # fmt: skip
    """A case on so many GPUs, eight to a node."""
    drawn_from = MIXTURES["main" if mixture == REAL else mixture]
    family = suite_family(case, drawn_from)
    specs = suite_specs(family)
    each = min(num_gpus, 8)
    cost = analytic_costs(specs, device, num_gpus // each, encoder_factor)
    cluster = ClusterSpec(device.name, "slurm", num_gpus // each, each, device.memory_bytes, "cuda", 128)
    if mixture == REAL:
        assert sizes is not None, "real shapes need --sizes"
        shapes = list(real_shapes(family, sizes))
        batches = sample_batches(shapes, global_batch_size, num_planning + NUM_UNSEEN, seed)
    else:
        batches = draw_batches(
            family,
            drawn_from,
            global_batch_size=global_batch_size,
            num_batches=num_planning + NUM_UNSEEN,
            seed=seed,
            max_llm_tokens=case.max_llm_tokens,
        )
    problem = Problem(
        run_id="bench", specs=specs, cluster=cluster, cost=cost,
        batches=tuple(batches[:num_planning]), global_batch_size=global_batch_size, snapshot_seq=0, space=space,
    )  # fmt: skip
    name = f"{case.name}, {num_gpus} x {device.name}, {mixture}" + (
        f", encoder x{encoder_factor:g}" if encoder_factor != 1 else ""
    )
    return Instance(name, problem, tuple(batches[num_planning:]))


def real_shapes(family: Family, path: Path) -> Iterator[SampleShape]:
    """Rows of a table of sizes as the family sees them; audio, which these families do not hear, is left out."""
    table = read_sizes(path)
    for index, row in enumerate(table.gather_every(max(1, len(table) // NUM_ROWS)).to_dicts()):
        sizes = [("image", w, h, 1, 0.0) for w, h in zip(row["image_w"] or (), row["image_h"] or (), strict=True)]
        videos = (row["video_w"] or (), row["video_h"] or (), row["video_seconds"] or ())
        sizes += [("video", w, h, max(1, round(s)), s) for w, h, s in zip(*videos, strict=False) if w and h and s]
        try:
            items = tuple(_item(family, *size, num_images=len(row["image_w"] or ())) for size in sizes)
        except ValueError:
            continue  # smaller than one patch
        num_text = row["prompt_tokens"] + row["response_tokens"]
        yield SampleShape(
            "bench", index, str(index), num_text, max(1, row["response_tokens"]),
            num_text + sum(i.num_rows for i in items), items,
        )  # fmt: skip


def _item(
    family: Family, kind: str, width_px: int, height_px: int, num_frames: int, duration_s: float, *, num_images: int
) -> MediaItem:
    placed = family.place(
        kind, width_px=width_px, height_px=height_px, num_frames=num_frames, duration_s=duration_s,
        num_images=max(1, num_images),
    )  # fmt: skip
    return MediaItem(
        kind=kind, path="", width_px=width_px, height_px=height_px, num_frames=num_frames, duration_s=duration_s,
        module=placed.module, grid=placed.grid, num_tokens=placed.num_tokens, sum_sq_tokens=placed.sum_sq_tokens,
        num_rows=placed.num_rows,
    )  # fmt: skip


def regret_instances(sizes: Path | None) -> Iterator[Instance]:
    """Twenty small clusters, on which every feasible plan can be simulated."""
    space = SearchSpace(microbatches=(1, 2, 4, 8, 16))
    mixtures = ("main", "heavy", *((REAL,) if sizes else ()))
    for number in range(20):
        num_gpus, case = (8, 16)[number % 2], CASES[number % 3]
        mixture, factor = mixtures[number // 3 % len(mixtures)], (0.5, 1.0, 4.0)[number // 6 % 3]
        yield make_instance(
            case, mixture, num_gpus, H200, 96, sizes=sizes, space=space,
            encoder_factor=factor, seed=number, num_planning=2,
        )  # fmt: skip


def reference_instances(sizes: Path | None) -> Iterator[Instance]:
    """Cases that the reference's planner knows: one encoder and an LLM."""
    mixtures = ("main", "heavy", *((REAL,) if sizes else ()))
    settings = [(0, 8, A100), (0, 32, A100), (1, 16, A100), (2, 64, A100), (4, 64, H200), (3, 64, H200)]
    for number, (case, num_gpus, device) in enumerate(settings):
        batch_size = 256 if num_gpus < 64 else 512
        for mixture in mixtures:
            yield make_instance(
                CASES[case], mixture, num_gpus, device, batch_size, sizes=sizes, space=SearchSpace(), seed=number
            )
