"""Does the gain grow with the number of nodes? Strong and weak scaling."""

from __future__ import annotations

from collections.abc import Sequence

from dflop.jobs.suite.cases import GLOBAL_BATCH_SIZE, NUM_NODES
from dflop.jobs.suite.contest import OURS, TUNED
from tests.bench.claims.contests import TUNED_CHARGED, Outcome
from tests.bench.claims.record import Claim, Expectation, Reading, by_seed
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contest_task, contests
from tests.bench.claims.where import SIGLIP_7B, Where

NODES, QUICK_NODES = (1, 2, 4, 8, 16), (1, 8)
EACH = GLOBAL_BATCH_SIZE // NUM_NODES
"""Samples of a node and step in weak scaling."""
SWEEPS = ("strong", "weak")


def place(sweep: str, num_nodes: int, seed: int) -> Where:
    """Strong: one global batch for all; weak: as many samples for every node."""
    size = GLOBAL_BATCH_SIZE if sweep == "strong" else EACH * num_nodes
    return Where(SIGLIP_7B, "main", seed, num_nodes=num_nodes, global_batch_size=size)


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    nodes = NODES if full else QUICK_NODES
    return [contest_task(place(sweep, n, seed)) for n in reversed(nodes) for sweep in SWEEPS for seed in seeds]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    nodes = NODES if full else QUICK_NODES
    gains = {sweep: [contests(found, [place(sweep, n, s) for s in seeds]) for n in nodes] for sweep in SWEEPS}
    growth = {sweep: _growth(sweep, nodes, gains[sweep]) for sweep in SWEEPS}
    ends = [
        Reading(f"{sweep}, {n} nodes", _gain(gains[sweep][i]), "x", "simulated")
        for sweep in SWEEPS
        for i, n in ((0, nodes[0]), (-1, nodes[-1]))
    ]
    return Claim(
        "scaling",
        "The gain grows with the number of nodes.",
        f"SigLIP + Qwen2.5-7B on {nodes[0]} to {nodes[-1]} nodes of 8 A100; strong: {GLOBAL_BATCH_SIZE} samples a step "
        f"everywhere, weak: {EACH} samples per node. Gain over uniform tuned, planned anew at every size.",
        "grows, up to 32 (nodes or GPUs: summaries do not say)",
        (*growth.values(), *ends),
        tuple(Expectation(g, ">=", 1.0, _reason(sweep, nodes, gains[sweep])) for sweep, g in growth.items()),
        tuple(
            f"{sweep}: " + ", ".join(f"{n} nodes {_mean(of):.2f}x" for n, of in zip(nodes, gains[sweep], strict=True))
            for sweep in SWEEPS
        ),
        tuple(
            {
                "sweep": sweep, "num_nodes": o.where.num_nodes, "seed": o.where.seed, "gain": o.gain(TUNED),
                "gain_over_charged": o.gain(TUNED_CHARGED), "bound": o.bound_gain,
                "idle_tuned": o.idle_frac[TUNED], "idle_ours": o.idle_frac[OURS],
                "samples_per_s_and_gpu": o.where.global_batch_size / (o.mean_s(OURS) * 8 * o.where.num_nodes),
                "layout": o.layout.get(OURS, ""),
            }
            for sweep in SWEEPS
            for of in gains[sweep]
            for o in of
        ),
    )  # fmt: skip


def _gain(outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    return by_seed([(o.where.seed, o.gain(TUNED)) for o in outcomes])


def _mean(outcomes: Sequence[Outcome]) -> float:
    values = _gain(outcomes)
    return sum(values) / len(values) if values else float("nan")


def _growth(sweep: str, nodes: Sequence[int], gains: Sequence[Sequence[Outcome]]) -> Reading:
    """Gain on the most nodes over that on the fewest, paired by seed."""
    first = {o.where.seed: o.gain(TUNED) for o in gains[0]}
    values = tuple(o.gain(TUNED) / first[o.where.seed] for o in gains[-1] if o.where.seed in first)
    return Reading(f"{sweep}: gain on {nodes[-1]} nodes / on {nodes[0]}", values, "x", "simulated")


def _reason(sweep: str, nodes: Sequence[int], gains: Sequence[Sequence[Outcome]]) -> str:
    """What changes between the ends: how much the baseline idles."""
    if not gains[0] or not gains[-1]:
        return "no plan fits at one of the ends"
    idle = [sum(o.idle_frac[TUNED] for o in of) / len(of) for of in (gains[0], gains[-1])]
    told = f"uniform tuned idles {idle[0]:.0%} on {nodes[0]} nodes and {idle[1]:.0%} on {nodes[-1]}"
    if idle[1] <= idle[0]:
        return f"{told}: there is no more to gain"
    samples = [of[0].where.global_batch_size / (8 * of[0].where.num_nodes) for of in (gains[0], gains[-1])]
    return f"{told}, but our plan cannot fill it with {samples[1]:g} samples a GPU in place of {samples[0]:g}"
