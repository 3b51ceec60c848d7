"""Families x mixtures that peers are compared on: problems for planners, and global batches nobody planned for.

Machines are two nodes of 8 A100 (four for the largest model), costs those of their data sheet. Samples come from a
table of real sizes, kinds in stated shares, or are generated: the composition of the DFLOP paper, and a mixture whose
lengths, pictures and videos have tails much heavier than any we know of. Generated mixtures have no audio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflop import resources
from dflop.config import load_model
from dflop.cost.devices import A100
from dflop.jobs.suite.cases import analytic_costs, cluster_of, suite_specs
from dflop.jobs.suite.mixtures import HEAVY, MAIN, Mixture, Source, draw_batches
from dflop.models import load_family
from dflop.models.family import Family
from dflop.plan.space import Problem, SearchSpace
from dflop.records import SampleShape
from tests.bench.schedule.instances import real_batch

GLOBAL_BATCH_SIZE = 256
MAX_LLM_TOKENS = 32_768
NUM_PLANNING = 4
"""Global batches that plans are made on."""
COUNTS = (2, 4, 8, 16, 32, 64)
"""Numbers of microbatches that all planners, and peers with a count of their own, may choose from."""
PLANNING_SEED, UNSEEN_SEED = 0, 1
MODELS = {
    "LLaVA-OneVision 32B": ("llava_onevision_qwen2_5_32b", 4),
    "Qwen2.5-VL 7B": ("qwen2_5_vl_7b", 2),
    "Qwen2.5-Omni 7B": ("qwen2_5_omni_7b", 2),
}
"""Name -> file of the model, nodes of 8 GPUs."""
MORE_MODELS = {
    "LLaVA-OneVision 7B": ("llava_onevision_qwen2_5_7b", 2),
    "InternVL2.5 8B": ("internvl2_5_8b", 2),
    "Qwen3-VL 8B": ("qwen3_vl_8b", 2),
    "Qwen2-Audio 7B": ("qwen2_audio_7b", 2),
}
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


@dataclass(frozen=True)
class Data:
    """Where samples come from: a table of sizes in given shares of kinds, or a generator."""

    name: str
    shares: Mapping[str, float] | None = None
    max_frames: int = 32
    generated: Mixture | None = None


TABLE_DATA = (
    Data("table, general", {"text": 0.35, "image": 0.33, "video": 0.07, "audio": 0.25}),
    Data("table, video", {"text": 0.2, "image": 0.2, "video": 0.5, "audio": 0.1}, max_frames=64),
)
GENERATED_DATA = tuple(Data(f"generated, {m.name}", max_frames=m.max_frames, generated=m) for m in (MAIN, TAILS))
MORE_TABLE_DATA = (Data("table, pictures", {"text": 0.3, "image": 0.7}),)
_ALL_MODELS = {**MODELS, **MORE_MODELS}
MORE_GENERATED_DATA = (Data("generated, heavy", max_frames=HEAVY.max_frames, generated=HEAVY),)


@dataclass(frozen=True)
class Cell:
    """One family on one mixture."""

    model: str
    data: Data
    sizes: Path | None
    """Table that `data.shares` are drawn from."""

    @property
    def name(self) -> str:
        return f"{self.model}; {self.data.name}"

    def problem(self, num_unseen: int) -> tuple[Problem, list[tuple[SampleShape, ...]]]:
        """What to plan for, and batches of other samples to judge on."""
        family = _family(self.model, self.data.max_frames)
        specs, num_nodes = suite_specs(family), _ALL_MODELS[self.model][1]
        problem = Problem(
            run_id="peers", specs=specs, cluster=cluster_of(A100, num_nodes),
            cost=analytic_costs(specs, A100, num_nodes, 1.0),
            batches=tuple(self._batches(family, NUM_PLANNING, PLANNING_SEED)), global_batch_size=GLOBAL_BATCH_SIZE,
            snapshot_seq=0, space=SearchSpace(microbatches=COUNTS),
        )  # fmt: skip
        return problem, self._batches(family, num_unseen, UNSEEN_SEED)

    def _batches(self, family: Family, num_batches: int, seed: int) -> list[tuple[SampleShape, ...]]:
        if self.data.generated is not None:
            return list(
                draw_batches(
                    family, self.data.generated, max_llm_tokens=MAX_LLM_TOKENS, global_batch_size=GLOBAL_BATCH_SIZE,
                    num_batches=num_batches, seed=seed,
                )
            )  # fmt: skip
        assert self.sizes is not None, f"{self.data.name} needs a table of sizes"
        assert self.data.shares is not None, f"{self.data.name} has neither shares nor a generator"
        kinds = {"text", *family.media_tokens}
        heard = {kind: share for kind, share in self.data.shares.items() if kind in kinds}
        shares = {kind: share / sum(heard.values()) for kind, share in heard.items()}
        return [
            real_batch(family, shares, GLOBAL_BATCH_SIZE, MAX_LLM_TOKENS, (seed, batch), self.sizes)
            for batch in range(num_batches)
        ]


def cells(sizes: Path | None, *, is_full: bool) -> list[Cell]:
    """All that is compared; without a table of sizes only generated data."""
    models = _ALL_MODELS if is_full else MODELS
    data = [*(TABLE_DATA if sizes else ()), *GENERATED_DATA]
    if is_full:
        data += [*(MORE_TABLE_DATA if sizes else ()), *MORE_GENERATED_DATA]
    return [Cell(model, d, sizes) for model in models for d in data if _takes(model, d)]


def _takes(model: str, data: Data) -> bool:
    """Whether the family has an encoder for what the data mostly is."""
    media = set(_family(model, data.max_frames).media_tokens)
    wanted = {s.kind for s in data.generated.sources} if data.generated else set(data.shares or ())
    return bool(media & wanted) if data.generated is None else wanted - {"text"} <= media


def _family(model: str, max_frames: int) -> Family:
    loaded = load_model(resources.path("configs") / "models" / f"{_ALL_MODELS[model][0]}.yaml")
    frames = next((key for key in ("video_frames", "video_max_frames") if key in loaded.media), None)
    media = {**loaded.media, frames: max_frames} if frames else loaded.media
    return load_family(loaded.family, loaded.hf_config, media)
