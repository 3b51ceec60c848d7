"""What the reference planner believes a module costs: FLOPs, throughput curves and memory lines, on our cost tables.

Source: DFLOP (SIGMOD'26) as released at commit 60e86d8, retold in our own words. It knows two modules, an encoder fed
with B equal tiles per sample and an LLM fed with S tokens per sample, and sees the data through the mean and the
maximum of B and S alone. The released code measures throughput; here the same probe points are asked of `CostModel`.
Faults are kept where they can change a plan:

- Grouped keys and values are counted with heads / kv_heads in place of kv_heads.
- The LLM's throughput is an arithmetic mean of the linear layers' and attention's rates, where times add, and
  attention's rate is frozen at the data's mean. (In our tables that rate is the same for every length.)
- Memory is two-point lines and a factor of 1.25, the same for every stage, without optimizer sharding.

Not kept: a projector that is counted twice under recomputation (`ModuleSpec` does not tell it apart), and probes that
ran without the recomputation that training uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflop.cost.model import CostModel, Floats
from dflop.plan.memory import stage_bytes
from dflop.records import LLM, ModuleSpec, RunMode, SampleShape

ENCODER_PROBE_TILES = (1, 2, 4, 8, 16, 32, 64)
LLM_PROBE_TOKENS = (1024, 2048, 4096, 8192)
ENCODER_MEMORY_LAYERS, ENCODER_MEMORY_TILES = (4, 8), 2
LLM_MEMORY_LAYERS, LLM_MEMORY_TOKENS = (3, 4), 1024
RECOMPUTE_FLOPS = 4 / 3
"""A forward pass more on top of a forward and a backward one."""
TRAINING_PASSES = 3
"""A backward pass counts as two forward ones."""
MEMORY_MARGIN = 1.25
LEAST_RATE_FRAC = 0.01
"""Of the slowest probe: extrapolating a curve must not end below zero."""


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Throughput over input size, piecewise linear; the outer pieces go on beyond the probes."""

    sizes: Floats
    """`[P]` ascending, at least two."""
    flops_per_s: Floats
    """`[P]` of one device."""

    def at(self, sizes: npt.ArrayLike) -> Floats:
        """FLOP/s per device at `sizes`, of any shape."""
        x = np.asarray(sizes, dtype=np.float64)
        piece = np.clip(np.searchsorted(self.sizes, x) - 1, 0, len(self.sizes) - 2)
        slope = np.diff(self.flops_per_s)[piece] / np.diff(self.sizes)[piece]
        rate: Floats = self.flops_per_s[piece] + slope * (x - self.sizes[piece])
        return rate.clip(LEAST_RATE_FRAC * self.flops_per_s.min())


@dataclass(frozen=True, slots=True)
class MemoryLines:
    """Peak bytes of a stage: a line over its layers, and one more per token in flight."""

    fixed_bytes: float
    bytes_per_layer: float
    token_bytes: float
    token_bytes_per_layer: float

    def peak_bytes(self, num_layers: npt.ArrayLike, in_flight: npt.ArrayLike, num_tokens: npt.ArrayLike) -> Floats:
        """With `in_flight` microbatches of `num_tokens` tokens; arrays broadcast."""
        layers = np.asarray(num_layers, dtype=np.float64)
        held = np.asarray(in_flight) * np.asarray(num_tokens) * (self.token_bytes + self.token_bytes_per_layer * layers)
        peak: Floats = MEMORY_MARGIN * (self.fixed_bytes + self.bytes_per_layer * layers + held)
        return peak


@dataclass(frozen=True, slots=True)
class ReferenceModule:
    """One module in the reference's eyes. Sizes are tiles per sample for the encoder, tokens for the LLM."""

    spec: ModuleSpec
    mean_size: float
    max_size: float
    tokens_per_size: float
    """Tokens of a tile; 1 for the LLM."""
    mean_flops: float
    """Of a sample, all layers, forward and backward."""
    rates: Mapping[int, RateCurve]
    """Per tp."""
    memory: Mapping[int, MemoryLines]
    """Per tp."""

    def sample_seconds(self, tp: int, sizes: npt.ArrayLike) -> Floats:
        """Seconds of a mean sample on one tp group inside microbatches of `sizes`, summed over the stages."""
        return self.mean_flops / (self.rates[tp].at(sizes) * tp)


def encoder_flops(spec: ModuleSpec, num_tiles: npt.ArrayLike, tile_tokens: float) -> Floats:
    """FLOPs of training on tiles that attend to themselves alone, with recomputation."""
    (kind,) = spec.kinds
    linear = 2 * tile_tokens * kind.num_params
    attention = 4 * tile_tokens**2 * spec.hidden_size
    edge = 2 * tile_tokens * spec.num_edge_params
    per_tile = RECOMPUTE_FLOPS * TRAINING_PASSES * (spec.num_layers * (linear + attention) + edge)
    return np.asarray(num_tiles, dtype=np.float64) * per_tile


def llm_flops(spec: ModuleSpec, num_tokens: npt.ArrayLike) -> tuple[Floats, Floats]:
    """(linear, attention) FLOPs of training on sequences of `num_tokens`, with recomputation.

    Attention is causal, and an embedding is looked up. Keys and values take
    `2 h^2 * kv_heads / heads` parameters, which the reference counts with heads / kv_heads in place of kv_heads.
    """
    tokens = np.asarray(num_tokens, dtype=np.float64)
    (kind,) = spec.kinds
    miscounted = kind.num_heads / kind.num_kv_heads - kind.num_kv_heads
    layer_params = kind.num_params + 2 * spec.hidden_size**2 * miscounted / kind.num_heads
    linear = 2 * tokens * (spec.num_layers * layer_params + spec.vocab_size * spec.hidden_size)
    attention = 2 * tokens**2 * spec.hidden_size * spec.num_layers
    return RECOMPUTE_FLOPS * TRAINING_PASSES * linear, RECOMPUTE_FLOPS * TRAINING_PASSES * attention


def encoder_module(
    spec: ModuleSpec, cost: CostModel, samples: Sequence[SampleShape], tps: Sequence[int], *, recompute: bool
) -> ReferenceModule:
    """The encoder on `samples`. A tile is as long as the sequences its attention sees on average."""
    loads = [s.load(spec.module) for s in samples]
    tokens = np.array([load.num_tokens for load in loads], dtype=np.float64)
    tile_tokens = sum(load.sum_sq_tokens for load in loads) / max(1.0, float(tokens.sum())) or 1.0
    tiles = tokens / tile_tokens
    probes = np.array(ENCODER_PROBE_TILES, dtype=np.float64)

    def rate_curve(tp: int) -> RateCurve:
        load = (probes, probes * tile_tokens, probes * tile_tokens**2)
        seconds = _seconds(cost, spec, load, tp, recompute)
        return RateCurve(probes, encoder_flops(spec, probes, tile_tokens) / (seconds * tp))

    probe = (ENCODER_MEMORY_TILES, ENCODER_MEMORY_TILES * tile_tokens, ENCODER_MEMORY_TILES * tile_tokens**2)
    return ReferenceModule(
        spec=spec,
        mean_size=float(tiles.mean()),
        max_size=float(tiles.max()),
        tokens_per_size=tile_tokens,
        mean_flops=float(encoder_flops(spec, tiles, tile_tokens).mean()),
        rates={tp: rate_curve(tp) for tp in tps},
        memory={tp: _memory_lines(spec, cost, probe, ENCODER_MEMORY_LAYERS, tp, recompute) for tp in tps},
    )


def llm_module(
    spec: ModuleSpec, cost: CostModel, samples: Sequence[SampleShape], tps: Sequence[int], *, recompute: bool
) -> ReferenceModule:
    """The LLM on `samples`. Probes carry loss on as many of their tokens as the data does."""
    loads = [s.load(LLM) for s in samples]
    tokens = np.array([load.num_tokens for load in loads], dtype=np.float64)
    supervised_frac = sum(load.num_items for load in loads) / max(1.0, float(tokens.sum()))
    linear, attention = llm_flops(spec, tokens)
    attention_frac = float(attention.sum() / (linear.sum() + attention.sum()))
    probes = np.array(LLM_PROBE_TOKENS, dtype=np.float64)

    def rate_curve(tp: int) -> RateCurve:
        linear_curve, attention_curve = _llm_rates(spec, cost, probes, supervised_frac, tp, recompute)
        attention_rate = float(attention_curve.at(tokens).mean())
        mixed = (1 - attention_frac) * linear_curve.flops_per_s + attention_frac * attention_rate
        return RateCurve(probes, mixed)

    probe = (LLM_MEMORY_TOKENS * supervised_frac, LLM_MEMORY_TOKENS, LLM_MEMORY_TOKENS**2)
    return ReferenceModule(
        spec=spec,
        mean_size=float(tokens.mean()),
        max_size=float(tokens.max()),
        tokens_per_size=1.0,
        mean_flops=float((linear + attention).mean()),
        rates={tp: rate_curve(tp) for tp in tps},
        memory={tp: _memory_lines(spec, cost, probe, LLM_MEMORY_LAYERS, tp, recompute) for tp in tps},
    )


def _llm_rates(
    spec: ModuleSpec, cost: CostModel, probes: Floats, supervised_frac: float, tp: int, recompute: bool
) -> tuple[RateCurve, RateCurve]:
    """(linear, attention): each probe once as it is and once with attention skipped. Free attention is as fast."""
    linear, attention = llm_flops(spec, probes)
    linear_s = _seconds(cost, spec, (probes * supervised_frac, probes, 0.0), tp, recompute)
    attention_s = _seconds(cost, spec, (probes * supervised_frac, probes, probes**2), tp, recompute) - linear_s
    linear_rate = linear / (linear_s * tp)
    attention_rate = attention / (np.where(attention_s > 0, attention_s, np.inf) * tp)
    attention_rate = np.where(attention_s > 0, attention_rate, linear_rate)
    return RateCurve(probes, linear_rate), RateCurve(probes, attention_rate)


Load = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]


def _seconds(cost: CostModel, spec: ModuleSpec, load: Load, tp: int, recompute: bool) -> Floats:
    """Forward + backward of the whole module on one tp group."""
    forward_s, backward_s = cost.module_seconds(
        spec.module, load, RunMode(tp, recompute=recompute), num_layers=spec.num_layers, edge=True
    )
    return forward_s + backward_s


def _memory_lines(
    spec: ModuleSpec, cost: CostModel, probe: Load, depths: tuple[int, int], tp: int, recompute: bool
) -> MemoryLines:
    """Lines through two shallow probes. Their own activations stay in the fixed part and are charged once more.

    The edge's activations are charged with the probe alone, not per token in flight: to the reference's advantage.
    """

    def whole_bytes(num_layers: int) -> float:
        layers, load = np.array([[num_layers]]), np.reshape(np.asarray(probe, dtype=np.float64), (3, 1))
        found = stage_bytes(
            spec,
            cost,
            layers,
            load,
            RunMode(tp),
            dp=np.array([1]),
            recompute=recompute,
            shard_optimizer=np.array([False]),
        )
        return float((found.state + found.kept)[0, 0])

    def token_bytes(num_layers: int) -> float:
        kept = cost.activation_bytes(
            spec.module, probe, RunMode(tp, recompute=recompute), num_layers=num_layers, edge=False
        )
        return float(kept) / float(np.asarray(probe[1]))

    fixed_bytes, bytes_per_layer = _line(depths, whole_bytes(depths[0]), whole_bytes(depths[1]))
    token_fixed_bytes, token_bytes_per_layer = _line(depths, token_bytes(depths[0]), token_bytes(depths[1]))
    return MemoryLines(fixed_bytes, bytes_per_layer, token_fixed_bytes, token_bytes_per_layer)


def _line(at: tuple[int, int], first: float, second: float) -> tuple[float, float]:
    """(intercept, slope) through two points."""
    slope = (second - first) / (at[1] - at[0])
    return first - slope * at[0], slope
