"""Published trainings: a row of `published.csv` or `published_2026.csv` is what its authors ran.

What a source does not say is in the column as the source's code has it, or as its name says it was inferred. Columns
with a default (of context and expert parallelism, experts, adapters and a vision tower) may be left out.
"""

import csv
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from dflop.cost.analytic import OPTIMIZER_BYTES_PER_PARAM
from dflop.cost.devices import H100, Device, find_device
from dflop.cost.float8 import RECIPES
from dflop.cost.roofline import COMPILED, EAGER, Program
from dflop.errors import CostError, did_you_mean
from dflop.records import FP8_OFF, LLM, LayerKind, ModuleSpec

TABLE = Path(__file__).with_name("published.csv")
LATER = TABLE.with_name("published_2026.csv")
"""Of 2024 to 2026, by five laboratories."""
IN_FP8 = TABLE.with_name("published_fp8.csv")
"""Trainings in FP8, and one in bfloat16 beside two of them; no constant but `Recipe.kernel_frac` is fitted to them."""
H100_500_W = replace(
    H100, name="H100 SXM, 500 W", peak_bf16_flops=5 / 7 * H100.peak_bf16_flops, memory_bytes_per_s=2.4e12
)
"""Of Grand Teton systems: 500 W of 700, which is taken to slow matmuls as much, and 2.4 TB/s."""


class Recomputed(NamedTuple):
    """Parts of the forward pass that run again."""

    matmul: float
    attention: float
    moved: float


RECOMPUTED: Mapping[str, Recomputed] = {
    "none": Recomputed(0, 0, 0),
    "attention": Recomputed(0, 1, 0),
    "operations": Recomputed(0.5, 0, 1),
    "two-fifths-of-layers": Recomputed(0.4, 0.4, 0.4),
    "half-of-layers": Recomputed(0.5, 0.5, 0.5),
    "full": Recomputed(1, 1, 1),
}
"""`attention`: Megatron-LM's selective recomputation. `operations`: torchtitan's, which keeps every second matmul, all
attention and what ranks have sent."""


class Exchange(NamedTuple):
    """Gathers and scatters of the hidden states per layer and microbatch, an all-reduce being one of each."""

    forward: int
    backward: int
    again: Mapping[str, int]
    """By kind of recomputation; other kinds: none."""
    exposed_frac: float = 1.0
    has_sequence_parallelism: bool = True
    """Else every rank has all tokens between matmuls, and the whole head."""


EXCHANGES: Mapping[str, Exchange] = {
    "none": Exchange(0, 0, {}),
    "block": Exchange(4, 4, {"full": 3, "operations": 2}),
    "block-async": Exchange(4, 4, {"full": 3, "operations": 2}, exposed_frac=0.5),
    "megatron": Exchange(4, 6, {"full": 3}),
    "projection": Exchange(7, 7, {"full": 6}),
    "projection-all-reduce": Exchange(4, 10, {"full": 2}, has_sequence_parallelism=False),
}
"""`block`: one gather before attention and MLP each, one scatter behind (torchtitan). `megatron`: what was gathered is
not kept. `projection`: queries, keys, values and both matrices of the MLP each gather for themselves (KempnerForge's
plan; its profile counts 12 gathers and 8 scatters a layer). Recomputation leaves out the last scatter."""
SHARED_OPTIMIZER = ("zero1", "zero2", "distributed-optimizer")
SHARDED = ("fsdp", "fsdp2", "hsdp", "zero3")
OPTIMIZER_BYTES = {"float32": OPTIMIZER_BYTES_PER_PARAM, "bfloat16": 14}
"""Moved per parameter, by the type of weights and moments."""
MATRICES = {"gelu-2-matrices": 2, "swiglu": 3}
WORDS: dict[str, Collection[str]] = {
    "mlp": MATRICES,
    "recompute": RECOMPUTED,
    "embeddings": ("tied", "untied"),
    "sharding": ("none", "ddp", *SHARED_OPTIMIZER, *SHARDED),
    "compile": ("yes", "no"),
    "tp_exchange": EXCHANGES,
    "scatter": ("microbatch", "step"),
    "optimizer": OPTIMIZER_BYTES,
    "kernels": ("flash-1", "flash-2"),
    "fp8": (FP8_OFF, *RECIPES),
    "vision_mlp": MATRICES,
    "vision_trains": ("yes", "no"),
}
"""Values of the columns that hold words."""


@dataclass(frozen=True, slots=True)
class PublicRun:
    """One row; field names are the columns."""

    source: str
    device: str
    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    mlp: str
    vocab: int
    embeddings: str
    seq_len: int
    gpus: int
    gpus_per_node: int
    micro_batch: int
    grad_accum: int
    sharding: str
    tp: int
    pp: int
    recompute: str
    compile: str
    tp_exchange: str
    scatter: str
    """How often gradients of shards are summed."""
    optimizer: str
    """Type of its states."""
    kernels: str
    """Of attention."""
    tokens_per_s_per_gpu: float
    fp8: str = FP8_OFF
    """Recipe of the Linears in layers."""
    cp: int = 1
    """Ranks that share a sequence."""
    ep: int = 1
    """Of the ranks that share out parameters, those that share experts."""
    experts: int = 0
    """Of a layer, each `intermediate` wide; 0: an MLP in their place."""
    active_experts: int = 0
    lora_rank: int = 0
    """Of adapters of every Linear in the LLM's layers, which train in place of its weights; 0: none."""
    vision_layers: int = 0
    """Of a tower in front of the LLM, whole on every rank of its first stage; 0: none."""
    vision_hidden: int = 0
    vision_heads: int = 0
    vision_intermediate: int = 0
    vision_mlp: str = "gelu-2-matrices"
    vision_tokens: int = 0
    """Of the tower, per sequence of `seq_len` tokens of the LLM, media among them."""
    vision_item_tokens: int = 0
    """Tokens of the tower that see each other: a picture, a tile, a frame."""
    vision_trains: str = "yes"

    @property
    def laboratory(self) -> str:
        """Owner and repository of its source."""
        return re.split(r"[@ ]", self.source)[0]

    @property
    def sheet(self) -> Device:
        """Data sheet of its device."""
        return H100_500_W if "500 W" in self.device else find_device(self.device)

    @property
    def program(self) -> Program:
        """Megatron-LM compiles nothing and has fused kernels."""
        return COMPILED if self.compile == "yes" or self.tp_exchange == "megatron" else EAGER

    @property
    def spec(self) -> ModuleSpec:
        """The model as the planner sees it; norms and biases are noise here."""
        is_tied = self.embeddings == "tied"
        one_mlp = MATRICES[self.mlp] * self.hidden * self.intermediate
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        used = attention + max(self.active_experts, 1) * one_mlp
        kind = replace(
            _kind(self.hidden, self.heads, self.kv_heads, self.head_dim, self.intermediate, self.mlp),
            num_params=attention + max(self.experts, 1) * one_mlp,
            num_active_params=used if self.experts else 0,
            num_experts=self.experts,
            num_active_experts=self.active_experts,
            num_expert_params=self.experts * one_mlp,
        )
        return ModuleSpec(
            module=LLM,
            layers=((kind, self.layers),),
            hidden_size=self.hidden,
            num_edge_params=self.vocab * self.hidden * (1 if is_tied else 2),
            max_pp=self.layers,
            tp_choices=(self.tp,),
            vocab_size=self.vocab,
            is_tied=is_tied,
        )

    @property
    def vision(self) -> ModuleSpec | None:
        """The tower without its patch embedding and projector; None: there is none."""
        if not self.vision_layers:
            return None
        heads, hidden = self.vision_heads, self.vision_hidden
        kind = _kind(hidden, heads, heads, hidden // heads, self.vision_intermediate, self.vision_mlp)
        return ModuleSpec(
            module="vision", layers=((kind, self.vision_layers),), hidden_size=hidden, num_edge_params=0, max_pp=1,
            tp_choices=(1,),
        )  # fmt: skip

    @property
    def num_adapter_params(self) -> int:
        """Of all layers of the LLM."""
        keys, query = self.kv_heads * self.head_dim, self.heads * self.head_dim
        ends = 2 * (self.hidden + query) + 2 * (self.hidden + keys)
        ends += max(self.experts, 1) * MATRICES[self.mlp] * (self.hidden + self.intermediate)
        return self.layers * self.lora_rank * ends


def _kind(hidden: int, heads: int, kv_heads: int, head_dim: int, width: int, mlp: str) -> LayerKind:
    """A layer with one MLP; norms and biases are noise here."""
    matrices = 2 * hidden * (heads + kv_heads) * head_dim + MATRICES[mlp] * hidden * width
    is_gated = mlp == "swiglu"
    return LayerKind(
        "attention", num_params=matrices, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, mlp_width=width,
        num_mlp_tensors=1 + is_gated, is_gated_mlp=is_gated, num_norm_values=4 * hidden,
    )  # fmt: skip


def read_runs(path: Path = TABLE) -> list[PublicRun]:
    """Rows of a table of published runs.

    Raises:
        CostError: a column or a value is missing or not of its kind; the file and the line are named.
        OSError: the file cannot be read.
    """
    kinds = {f.name: f.type for f in fields(PublicRun)}
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        given = set(lines.fieldnames or ())
        missing = sorted({f.name for f in fields(PublicRun) if f.default is MISSING} - given)
        if missing:
            raise CostError(f"no column `{missing[0]}`", where=str(path), hint=f"columns: {', '.join(kinds)}")
        runs = []
        for line in lines:
            try:
                run = PublicRun(**{name: kind(line[name]) for name, kind in kinds.items() if name in given})
            except (TypeError, ValueError) as error:
                raise CostError(str(error), where=f"{path}:{lines.line_num}") from error
            _check(run, f"{path}:{lines.line_num}")
            runs.append(run)
    return runs


def _check(run: PublicRun, where: str) -> None:
    for name, valid in WORDS.items():
        if (word := getattr(run, name)) not in valid:
            raise CostError(f"{name} `{word}`", where=where, hint=did_you_mean(word, valid))
    numbers = {f.name: (getattr(run, f.name), f.default) for f in fields(run) if f.type is not str}
    if wrong := [
        f"{name} {of:g}" for name, (of, default) in numbers.items() if not (0 < of < math.inf or of == default)
    ]:
        raise CostError(f"{', '.join(wrong)}: must be positive", where=where)
    vision = {name: of for name, (of, _) in numbers.items() if name.startswith("vision_")}
    if missing := sorted(name for name, of in vision.items() if not of) if any(vision.values()) else []:
        raise CostError(f"a vision tower without {', '.join(missing)}", where=where)
    if not run.active_experts <= run.experts or bool(run.experts) != bool(run.active_experts) or run.experts % run.ep:
        what = f"{run.active_experts} active of {run.experts} experts on {run.ep} ranks"
        raise CostError(what, where=where, hint="ranks share experts evenly, and a token goes to some of them")
    if run.gpus % (run.tp * run.pp * run.cp) or run.gpus // (run.tp * run.pp) % run.ep:
        what = f"{run.gpus} gpus are not whole replicas of tp {run.tp} pp {run.pp} cp {run.cp} ep {run.ep}"
        raise CostError(what, where=where)
    if (run.tp > 1) != (run.tp_exchange != "none"):
        raise CostError(f"tp {run.tp} with tp_exchange `{run.tp_exchange}`", where=where)
