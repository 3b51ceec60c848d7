"""Random shapes, cost tables and plans, for the tests of the pure rooms. Everything is a function of its seed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dflop.cost.curve import from_slopes
from dflop.cost.model import CostModel
from dflop.records import (
    ALL_TOKENS,
    LLM,
    ClusterSpec,
    Correction,
    CostTable,
    CostTerms,
    Decision,
    LayerKind,
    LinkCost,
    Measurement,
    MediaItem,
    ModulePlan,
    ModuleSpec,
    ParallelSpec,
    Plan,
    RankFactor,
    SampleShape,
)  # fmt: skip

KINDS = {"vision": "image", "audio": "audio"}


def make_sample(
    index: int, num_text_tokens: int, media: Sequence[tuple[str, int]] = (), num_supervised_tokens: int = 10
) -> SampleShape:
    """Sample with `media` = (module, tokens) per item; an item hands a quarter of its tokens to the LLM."""
    items = tuple(
        MediaItem(
            KINDS.get(module, "image"), f"{index}-{i}", 1, 1, 1, 0.0, module, (1, 1, tokens),
            num_tokens=tokens, sum_sq_tokens=tokens**2, num_rows=max(1, tokens // 4),
        )
        for i, (module, tokens) in enumerate(media)
    )  # fmt: skip
    rows = sum(item.num_rows for item in items)
    return SampleShape(
        "data", index, f"s{index}", num_text_tokens, num_supervised_tokens, num_text_tokens + rows, items
    )


def random_batch(
    num_samples: int, *, encoders: Sequence[str] = ("vision", "audio"), seed: int = 0
) -> tuple[SampleShape, ...]:
    """Lognormal texts; each sample has 0-2 items of each encoder, of lognormal size."""
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num_samples):
        media = [
            (module, int(np.clip(rng.lognormal(4.5, 0.8), 8, 2000)))
            for module in encoders
            for _ in range(rng.choice(3, p=[0.5, 0.35, 0.15]))
        ]
        text = int(np.clip(rng.lognormal(4.5, 0.8), 4, 4000))
        samples.append(make_sample(index, text, media, int(rng.integers(1, text + 1))))
    return tuple(samples)


def curves(max_knots: int = 4) -> st.SearchStrategy[CostTerms]:
    """Cost terms of any non-negative slopes, with up to `max_knots` knots between 1 and 50,000 tokens."""
    knots = st.sets(st.integers(1, 50_000), max_size=max_knots).map(sorted)
    return knots.flatmap(
        lambda at: st.builds(
            from_slopes,
            slopes=st.lists(st.floats(0, 1e-4), min_size=len(at) + 1, max_size=len(at) + 1),
            knots=st.just(at),
            others=st.builds(CostTerms, *(st.floats(0, most) for most in (1e-2, 0, 1e-8, 1e-2, 1e-4, 1e-3))),
        )
    )


def make_table(
    module: str, *, tp: int = 1, fixed_s: float = 1e-3, per_token_s: float = 1e-5, per_sq_token_s: float = 1e-9,
    edge_per_token_s: float = 1e-5, activation_bytes_per_token: float = 1e4, **changes: Any,
) -> CostTable:  # fmt: skip
    """Table whose backward costs twice its forward; `changes` replace fields of it."""
    forward, backward = (
        CostTerms(*(factor * s for s in (fixed_s, per_token_s, per_sq_token_s, fixed_s, edge_per_token_s)), 0.0)
        for factor in (1.0, 2.0)
    )
    kept = CostTerms(0.0, activation_bytes_per_token, 0.0, 0.0, activation_bytes_per_token, 0.0)
    table = CostTable(
        f"{module}-tp{tp}", "model", module, "test", "test", "float32", tp, "analytic", 4, forward, backward, kept,
        layer_param_bytes=4_000_000, edge_param_bytes=8_000_000, num_measurements=12, median_error_frac=0.01,
        p95_error_frac=0.03,
    )  # fmt: skip
    return dataclasses.replace(table, **changes)


def make_link(op: str, num_ranks: int, num_nodes: int, latency_s: float, bytes_per_s: float) -> LinkCost:
    """A measured link cost."""
    return LinkCost("model", "test", "test", op, num_ranks, num_nodes, latency_s, bytes_per_s, "measured", 5, 0.02)


def make_probe(
    truth: CostTable, num_layers: int, items: int, tokens: int, sum_sq: int, *, noise: float = 1.0
) -> Measurement:
    """What a probe of a module that costs exactly `truth` reads; `noise` multiplies its seconds."""
    model = CostModel([truth], extrapolate=True)
    asked, part = (truth.module, (items, tokens, sum_sq), truth.mode), {"num_layers": num_layers, "edge": True}
    forward_s, backward_s = model.module_seconds(*asked, **part)
    return Measurement(
        truth.profile_key, truth.module, truth.hardware, "sw", truth.dtype, truth.tp, num_layers, "random",
        items, tokens, sum_sq, float(forward_s) * noise, float(backward_s) * noise, 0.0, 0.0, num_repeats=3,
        param_bytes=num_layers * truth.layer_param_bytes + truth.edge_param_bytes,
        activation_bytes=int(model.activation_bytes(*asked, **part)),
        is_frozen=truth.is_frozen, recompute=truth.recompute,
    )  # fmt: skip


def make_corrections(
    module: str, factors: Sequence[float], edges: Sequence[int] = (), *, level: float | None = None, **changes: Any
) -> list[Correction]:
    """A set: one row per bucket of sizes; `edges` are where the next bucket begins, `changes` replace fields of all.

    Without `level` the mean of the factors is taken.
    """
    mean = sum(factors) / len(factors)
    base = Correction(
        "run", 1, module, f"{module}-tp1", 1.0, 0.1, 8, 1000.0, sd_frac=0.02, level=mean if level is None else level
    )
    bounds = zip((0, *edges), (*edges, ALL_TOKENS), factors, strict=True)
    return [
        dataclasses.replace(base, min_tokens=low, max_tokens=high, factor=factor, **changes)
        for low, high, factor in bounds
    ]


def make_rank_factor(rank: int, factor: float, **changes: Any) -> RankFactor:
    """Factor of a rank of the LLM's first stage that holds data-parallel rank `rank`, in force."""
    seat = ("run", 0, 1, rank, LLM, 0, rank, f"host{rank // 2}")
    base = RankFactor(*seat, factor, sd_frac=0.01, is_in_force=True, observed_at_s=1000.0)
    return dataclasses.replace(base, **changes)


def make_decision(kind: str, verdict: str, subject: str = LLM, *, step: int = 10, **changes: Any) -> Decision:
    """A decision with nothing reckoned; `changes` replace fields of it."""
    seconds = (float("nan"),) * 4
    base = Decision(
        "run", 0, step, kind, subject, verdict, *seconds, num_steps_left=0, plan_id="plan0", new_plan_id="",
        detail=f"{subject}: {kind}", observed_at_s=1000.0 + step,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def random_loads(num_loads: int, *, seed: int = 0, max_tokens: int = 16_000) -> list[tuple[int, int, int]]:
    """(items, tokens, sum of squares), tokens uniform in their logarithm from 64 to `max_tokens`."""
    rng = np.random.default_rng(seed)
    found = []
    for tokens in np.exp(rng.uniform(np.log(64), np.log(max_tokens), num_loads)).astype(int).tolist():
        items = int(rng.integers(1, 20))
        found.append((items, tokens, int(tokens**2 / items * rng.uniform(1, min(2, items)))))
    return found


def make_cost(*modules: str, scale: dict[str, float] | None = None) -> CostModel:
    """Cost model of `modules`, the LLM added; `scale` multiplies a module's per-token seconds."""
    return CostModel(make_table(m, per_token_s=1e-5 * (scale or {}).get(m, 1.0)) for m in (*modules, LLM))


def make_specs(*encoders: str, num_layers: int = 4, max_pp: int = 4) -> tuple[ModuleSpec, ...]:
    """Specs of `encoders` (pp 1 only) and the LLM."""
    kind = LayerKind("attention", 1_000_000, 4, 4, 16, mlp_width=256, num_norm_values=512)
    return tuple(
        ModuleSpec(
            module, ((kind, num_layers),), hidden_size=64, num_edge_params=2_000_000,
            max_pp=max_pp if module == LLM else 1, tp_choices=(1,), vocab_size=15_625 if module == LLM else 0,
            num_entry_params=1_000_000,
        )
        for module in (*encoders, LLM)
    )  # fmt: skip


def with_layers(spec: ModuleSpec, num_layers: int = 0, **changes: Any) -> ModuleSpec:
    """The spec with so many layers, 0: as many as before, of its first kind with other fields."""
    kind, num = spec.layers[0]
    return dataclasses.replace(spec, layers=((dataclasses.replace(kind, **changes), num_layers or num),))


def make_cluster(num_processes: int = 4, *, num_cores: int = 2, memory_bytes: int = 2**34) -> ClusterSpec:
    """One CPU node."""
    return ClusterSpec("test", "local", 1, num_processes, memory_bytes, "cpu", num_cores)


STAGES = {1: (4,), 2: (2, 2), 3: (1, 2, 1), 4: (1, 1, 1, 1)}
"""Four layers on so many stages."""


def make_plan(
    dp: dict[str, int], *, llm_pp: int = 1, encoder_pp: int = 1, num_microbatches: int = 4, global_batch_size: int = 16
) -> Plan:
    """Split layout with the given data-parallel degrees, encoders first."""
    modules, first_rank = [], 0
    for module in sorted(dp, key=lambda name: name == LLM):
        pp = llm_pp if module == LLM else encoder_pp
        parallel = ParallelSpec(1, pp, dp[module])
        layers = STAGES[pp]
        modules.append(ModulePlan(module, parallel, first_rank, layers, (0,) * pp))
        first_rank += parallel.num_processes
    return _plan(modules, num_microbatches, global_batch_size)


def make_inline_plan(
    dp: int, *, pp: int = 1, tp: int = 1, cp: int = 1, modules: Sequence[str] = ("vision", LLM),
    num_microbatches: int = 4, global_batch_size: int = 16,
) -> Plan:  # fmt: skip
    """Inline layout of `modules` (LLM last), 4 layers each, the chain cut evenly by count, the rest on the first."""
    chain = np.repeat(np.arange(len(modules)), 4)
    stages = np.array_split(chain, pp)
    places = [
        ModulePlan(module, ParallelSpec(tp, pp, dp, cp), 0, tuple(int(np.sum(s == i)) for s in stages), (0,) * pp)
        for i, module in enumerate(modules)
    ]
    return _plan(places, num_microbatches, global_batch_size)


def _plan(modules: Sequence[ModulePlan], num_microbatches: int, global_batch_size: int) -> Plan:
    seconds = (0.0,) * 5
    return Plan(
        "plan",
        "run",
        0,
        tuple(modules),
        num_microbatches,
        global_batch_size,
        *seconds,
        (),
        0,
        reason="",
    )
