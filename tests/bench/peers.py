"""dflop against its peers on the same global batches: `python -m tests.bench.peers [--sizes TABLE]`.

Families x mixtures, on simulated nodes of 8 A100 (two, or four for the largest model) with costs of their data sheet.
Samples come from a table of real sizes, kinds in stated shares, or are generated: the composition of the DFLOP paper,
and a mixture with tails much heavier than any we know of. Batchers keep the global batch and get the same plan, dflop's
and the tuned uniform one; each chooses the number of microbatches that turns out best for it on the very batches it is
judged on. So does dflop on the uniform plan, while it keeps to the number of its plan. Memory's token caps are the same
for all. A ratio is a peer's simulated seconds over dflop's: below 1 the peer is faster.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop import resources
from dflop.compare.suite.cases import analytic_costs, cluster_of, suite_specs
from dflop.compare.suite.mixtures import HEAVY, MAIN, Mixture, Source, draw_batches
from dflop.config import load_model
from dflop.cost.devices import A100
from dflop.models import load_family
from dflop.models.family import Family
from dflop.plan.space import Problem, SearchSpace
from dflop.records import SampleShape
from dflop.run.messages import say
from dflop.schedule.warm import warm
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.instances import real_batch
from tests.bench.markdown import table
from tests.bench.peers_rows import COUNTS, Row, rows_of

GLOBAL_BATCH_SIZE, MAX_LLM_TOKENS = 256, 32_768
NUM_PLANNING, NUM_UNSEEN = 4, 10
"""Global batches that plans are made on, and judged on."""
PLANNING_SEED, UNSEEN_SEED = 0, 1
MODELS = {
    "LLaVA-OneVision 32B": ("llava_onevision_qwen2_5_32b", 4),
    "Qwen2.5-VL 7B": ("qwen2_5_vl_7b", 2),
    "Qwen2.5-Omni 7B": ("qwen2_5_omni_7b", 2),
    "LLaVA-OneVision 7B": ("llava_onevision_qwen2_5_7b", 2),
    "InternVL2.5 8B": ("internvl2_5_8b", 2),
    "Qwen3-VL 8B": ("qwen3_vl_8b", 2),
    "Qwen2-Audio 7B": ("qwen2_audio_7b", 2),
}
"""Name -> file of the model, nodes of 8 GPUs."""
TAILS = Mixture(
    "tails",
    (
        Source(45, "text", 250, 1.7),
        Source(30, "image", 150, 1.2, size_px=(800, 600), size_sigma=0.9),
        Source(15, "image", 150, 1.2, num_items=(1, 24), size_px=(640, 480), size_sigma=0.6),
        Source(
            10, "video", 200, 1.0, size_px=(1280, 720), size_sigma=0.4,
            num_frames=(4, 256), median_frames=24, frames_sigma=1.3,
        ),
    ),
)  # fmt: skip
TABLE_DATA = {
    "table, general": ({"text": 0.35, "image": 0.33, "video": 0.07, "audio": 0.25}, 32),
    "table, video": ({"text": 0.2, "image": 0.2, "video": 0.5, "audio": 0.1}, 64),
    "table, pictures": ({"text": 0.3, "image": 0.7}, 32),
}
"""Shares of kinds, frames of a video at most."""
GENERATED_DATA = {f"generated, {m.name}": (m, m.max_frames) for m in (MAIN, TAILS, HEAVY)}
HEAD = (
    "peer", "by", "decides within", "count", "mean", "least", "faster / equal", "over memory", "decides in s",
    "dflop in s",
)  # fmt: skip
SCOPES = {"batch": "global batch", "epoch": "epoch: other batches are learnt", "plan": "plan"}


@dataclass(frozen=True)
class Cell:
    """One family on one mixture."""

    model: str
    data: str
    sizes: Path | None
    """The table."""

    @property
    def family(self) -> Family:
        max_frames = {**TABLE_DATA, **GENERATED_DATA}[self.data][1]
        loaded = load_model(resources.path("configs") / "models" / f"{MODELS[self.model][0]}.yaml")
        frames = {key: max_frames for key in ("video_frames", "video_max_frames") if key in loaded.media}
        return load_family(loaded.family, loaded.hf_config, {**loaded.media, **frames})

    @property
    def exists(self) -> bool:
        """Whether the family has an encoder for what the data mostly is, and there is a table where it is needed."""
        media = set(self.family.media_tokens)
        if self.data in TABLE_DATA:
            return self.sizes is not None and bool(media & set(TABLE_DATA[self.data][0]))
        return {s.kind for s in GENERATED_DATA[self.data][0].sources} - {"text"} <= media

    def problem(self) -> tuple[Problem, list[tuple[SampleShape, ...]]]:
        """What to plan for, and batches of other samples to judge on."""
        specs, num_nodes = suite_specs(self.family), MODELS[self.model][1]
        problem = Problem(
            run_id="peers", specs=specs, cluster=cluster_of(A100, num_nodes),
            cost=analytic_costs(specs, A100, num_nodes, 1.0),
            batches=tuple(self._batches(NUM_PLANNING, PLANNING_SEED)), global_batch_size=GLOBAL_BATCH_SIZE,
            snapshot_seq=0, space=SearchSpace(microbatches=COUNTS),
        )  # fmt: skip
        return problem, self._batches(NUM_UNSEEN, UNSEEN_SEED)

    def _batches(self, num_batches: int, seed: int) -> list[tuple[SampleShape, ...]]:
        family = self.family
        if self.data in GENERATED_DATA:
            drawn = draw_batches(
                family, GENERATED_DATA[self.data][0], max_llm_tokens=MAX_LLM_TOKENS,
                global_batch_size=GLOBAL_BATCH_SIZE, num_batches=num_batches, seed=seed,
            )  # fmt: skip
            return list(drawn)
        assert self.sizes is not None
        shares = {k: share for k, share in TABLE_DATA[self.data][0].items() if k in {"text", *family.media_tokens}}
        shares = {kind: share / sum(shares.values()) for kind, share in shares.items()}
        return [
            real_batch(family, shares, GLOBAL_BATCH_SIZE, MAX_LLM_TOKENS, (seed, batch), self.sizes)
            for batch in range(num_batches)
        ]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated data alone without")
    args = parser.parse_args()
    cells = [Cell(model, of, args.sizes) for model in MODELS for of in (*TABLE_DATA, *GENERATED_DATA)]
    warm()
    content: dict[str, Any] = {"simulated": True, "real_sizes": args.sizes is not None}
    content["cells"] = [run(cell) for cell in cells if cell.exists]
    print(tables(content)["peers"])
    conclude(content, [], args.json, "numpy", "numba", "torch", "transformers")


def run(cell: Cell) -> dict[str, Any]:
    """Rows of a cell, as the file has them."""
    say(f"{cell.model}; {cell.data}")
    return {"model": cell.model, "data": cell.data, "rows": list(rows_of(*cell.problem()))}


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`peers`: a line per peer over all cells and plans; those that are faster anywhere first, then by their mean.

    Of peers that may choose their number of microbatches, only what they make of that. A row without ratios had no
    result. The older result shown has more peers than are run now.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in (row for cell in content["cells"] for row in cell["rows"]):
        name = row["peer"] + (", own scheduler" if row["kind"] == "plan" and row["on"] == "own" else "")
        groups.setdefault((name, row["origin"], row["kind"], row["count"]), []).append(row)
    choosing = {key[:3] for key in groups if key[3] == "own"}
    lines = []
    for key, rows in groups.items():
        ratios = [r for row in rows for r in row["ratio"]]
        if ratios and (key[3] == "own" or key[:3] not in choosing):
            lines.append((min(ratios) > 1, statistics.geometric_mean(ratios), _line(key, rows, ratios)))
    return {"peers": table(HEAD, [line for _, _, line in sorted(lines)])}


def _line(key: tuple[str, ...], rows: Sequence[Row], ratios: Sequence[float]) -> tuple[str, ...]:
    peer, origin, kind, count = key
    over = sum(row["num_over_memory"] for row in rows)
    return (
        peer, origin, SCOPES[kind], count, f"{statistics.geometric_mean(ratios):.3f}", f"{min(ratios):.3f}",
        f"{sum(r < 1 for r in ratios)} / {sum(r == 1 for r in ratios)} of {len(ratios)}", str(over),
        _seconds(rows, "decide_s"), _seconds(rows, "dflop_decide_s"),
    )  # fmt: skip


def _seconds(rows: Sequence[Row], what: str) -> str:
    found = [row[what] for row in rows if isinstance(row[what], float) and math.isfinite(row[what])]
    return f"{statistics.median(found):.2g}" if found else "-"


if __name__ == "__main__":
    main()
