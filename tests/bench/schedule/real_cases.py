"""Models, layouts and policies of the real steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from dflop.models import load_family
from dflop.models.family import Family
from dflop.records import LLM, ClusterSpec, Plan, SampleShape
from tests.bench.profile.cases import VOCAB_SIZE
from tests.bench.simulate.cases import MadeUpSource
from tests.train.synthetic import make_inline_plan, make_plan

TILE_PX = 56
TOKEN_ID = {"<image>": 1, "<video>": 2}
ENCODER_LAYERS = {"equal": 7, "third": 3}
"""Per model. With the LLM below, its seconds are about those of the LLM, and a third of both."""
NUM_CORES = 2


@cache
def family_of(model: str) -> Family:
    """A SigLIP tower over small tiles and a Qwen2 decoder."""
    config = {
        "tie_word_embeddings": False,
        "image_grid_pinpoints": [[TILE_PX * h, TILE_PX * w] for h in range(1, 4) for w in range(1, 4)],
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 112, "intermediate_size": 336,
            "num_hidden_layers": ENCODER_LAYERS[model], "num_attention_heads": 4, "image_size": TILE_PX,
            "patch_size": 14, "vision_use_head": False,
        },
        "text_config": {
            "model_type": "qwen2", "vocab_size": VOCAB_SIZE, "hidden_size": 160, "intermediate_size": 448,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
        },
    }  # fmt: skip
    return load_family("llava_onevision", config, {"video_frames": 16})


class Source(MadeUpSource):
    """Made-up tokens and pixels of given shapes."""

    def __init__(self, model: str, shapes: Sequence[SampleShape]) -> None:
        self._family, self._ids = family_of(model), TOKEN_ID
        self._shapes = {s.sample_index: s for s in shapes}


@dataclass(frozen=True)
class Case:
    """One configuration: a model, a layout of two processes, a size of global batch."""

    model: str
    layout: str
    """`pipeline`: encoder | LLM. `replicas`: the whole model on each process."""
    num_samples: int
    num_microbatches: int
    """Of each process."""

    @property
    def name(self) -> str:
        what = "encoder | llm" if self.layout == "pipeline" else "2 replicas"
        load = "equal loads" if self.model == "equal" else "encoder a third"
        return f"{what}, {load}, {self.num_samples} samples x {self.num_microbatches} microbatches"

    @property
    def plan(self) -> Plan:
        family = family_of(self.model)
        if self.layout == "pipeline":
            return make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=self.num_microbatches, of=family)
        whole = {s.module: s.num_layers for s in family.specs()}
        return make_inline_plan([whole], dp=2, num_microbatches=self.num_microbatches)

    @property
    def policies(self) -> tuple[str, ...]:
        middle = "bottleneck" if self.layout == "pipeline" else "token_lpt"
        return ("arrival", middle, "balanced")


CASES = (
    Case("equal", "pipeline", 64, 8),
    Case("equal", "pipeline", 64, 16),
    Case("equal", "pipeline", 128, 16),
    Case("third", "pipeline", 64, 8),
    Case("third", "pipeline", 128, 16),
    Case("equal", "replicas", 64, 4),
    Case("equal", "replicas", 128, 4),
)
QUICK_CASES = (Case("equal", "pipeline", 64, 16), Case("equal", "replicas", 64, 4))
CLUSTER = ClusterSpec("bench", "local", 1, NUM_CORES, 1 << 30, "cpu", NUM_CORES)
