"""How well a profile predicts what it did not see, on this machine: `python -m tests.bench.profile [--json FILE]`.

Two small models are timed at 2, 4 and 8 layers on groups of samples. Cost tables are fitted to two depths of the groups
that a profile times. They are compared with what other groups took, drawn as training draws them: at the probed
depths, at 8 layers, and as whole microbatches of mixed media through all modules. All groups of a module are measured
in one random order, twice, so that a machine that changes its speed for a minute changes it for those that are fitted
and those that are predicted alike. Predictions are compared with the mean of the two sweeps; noise is what the two
differ by. One process on one core with the allocator of jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from dflop.cost.curve import evaluate
from dflop.cost.fit import fit_cost_tables
from dflop.profile.groups import ProbeGroup, make_group, probe_groups
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import GroupVisits, ModuleProbe, ProbeSettings
from dflop.records import CostTable, CostTerms, Measurement
from tests.bench.command import become_a_job, keep_to, options
from tests.bench.figures import conclude
from tests.bench.ranks import VOCAB_SIZE, family_of, token_id
from tests.gpu.drawn import make_shapes, random_groups

DEPTHS, DEEP = (2, 4), 8
"""The depths to extrapolate from, the default of profiles, and the depth to predict."""
NUM_GRID = 12
NUM_HELD_OUT, NUM_MIXED, MAX_SAMPLES, NUM_REPEATS = 10, 8, 4, 3
NUM_DRAWN, SCALE = 300, 0.25
"""Samples, and the size of photographs, clips and texts."""
MODELS = {"tiny omni": "omni", "tiny LLaVA-OneVision": "equal"}
Pair = tuple[Measurement, Measurement]
"""One group at one depth in both sweeps."""


@dataclass(frozen=True)
class ErrorFigure:
    """One relative error and what it must not exceed."""

    name: str
    error_frac: float
    bound_frac: float
    noise_frac: float | None = None

    @property
    def is_met(self) -> bool:
        return self.error_frac <= self.bound_frac

    def line(self) -> str:
        noise = "" if self.noise_frac is None else f"   noise {self.noise_frac:.1%}"
        verdict = "ok" if self.is_met else "MISSED"
        return f"{self.name:60s} {self.error_frac:7.2%}   bound {self.bound_frac:.0%}   {verdict}{noise}"


def main() -> None:
    args = options(__doc__).parse_args()
    become_a_job("tests.bench.profile")
    keep_to(1)
    torch.set_num_threads(1)
    found: list[ErrorFigure] = []
    for name, model in MODELS.items():
        for figure in figures_of(name, Bench(model)):
            found.append(figure)
            print(figure.line(), flush=True)
    bounds = [(f.name, f.is_met) for f in found]
    conclude({"figures": [asdict(f) for f in found]}, bounds, args.json, "torch", "transformers")


class Bench:
    """One model with its samples."""

    def __init__(self, model: str) -> None:
        self.family = family_of(model)
        self.token_config = self.family.token_ids(token_id(model))
        self.shapes, self.unseen = (make_shapes(self.family, NUM_DRAWN, seed, SCALE) for seed in (0, 1))
        self.settings = ProbeSettings("bench", hardware_name("cpu"), software_name(), "float32", NUM_REPEATS)
        rng = np.random.default_rng(9)
        self.batches = [[self.unseen[i] for i in rng.choice(len(self.unseen), MAX_SAMPLES)] for _ in range(NUM_MIXED)]

    def measure(self, module: str, groups: Sequence[ProbeGroup]) -> list[dict[int, Pair]]:
        """Per group and depth what both sweeps read."""
        probes = [
            ModuleProbe(self.family, self.token_config, VOCAB_SIZE, module, n, self.settings, torch.device("cpu"))
            for n in (*DEPTHS, DEEP)
        ]
        for probe in probes:
            probe.warm_up(max(groups, key=lambda g: g.load.num_tokens))
        order = np.random.default_rng(0).permutation(len(groups)).tolist()
        sweeps: list[dict[int, list[Measurement]]] = []
        for _ in range(2):
            rows = {}
            for index in order:
                visits = GroupVisits(probes, groups[index])
                visits.visit(self.settings.num_repeats)
                rows[index] = visits.rows()
            sweeps.append(rows)
        first, second = sweeps
        return [{a.num_layers: (a, b) for a, b in zip(first[i], second[i], strict=True)} for i in range(len(groups))]

    def fit(self, module: str, measured: Sequence[dict[int, Pair]]) -> CostTable:
        rows = [mean_of(pairs[n]) for pairs in measured for n in DEPTHS]
        (table,) = fit_cost_tables(rows, [s for s in self.family.specs() if s.module == module])
        return table


def mean_of(pair: Pair) -> Measurement:
    """What a group takes by both sweeps."""
    a, b = pair
    return replace(a, forward_s=(a.forward_s + b.forward_s) / 2, backward_s=(a.backward_s + b.backward_s) / 2)


def predicted(m: Measurement, *curves: CostTerms) -> float:
    """Sum of curves at the load and depth of a measurement."""
    load = (m.num_items, m.num_tokens, m.sum_sq_tokens)
    return sum(float(evaluate(terms, load, m.num_layers, True)) for terms in curves)


def predicted_s(table: CostTable, m: Measurement) -> float:
    return predicted(m, table.forward_s, table.backward_s)


def taken_s(m: Measurement) -> float:
    return m.forward_s + m.backward_s


def errors(table: CostTable, pairs: Sequence[Pair]) -> np.ndarray:
    return np.array([abs(predicted_s(table, pair[0]) / taken_s(mean_of(pair)) - 1) for pair in pairs])


def noise(pairs: Sequence[Pair]) -> float:
    return float(np.median([abs(taken_s(second) / taken_s(first) - 1) for first, second in pairs]))


def figures_of(name: str, bench: Bench) -> Iterator[ErrorFigure]:
    """Everything about one model."""
    totals = np.zeros((3, NUM_MIXED))
    for module in bench.family.modules:
        grid = probe_groups(bench.shapes, module, num_groups=NUM_GRID, max_samples=MAX_SAMPLES, seed=0)
        held_out = random_groups(bench.unseen, module, NUM_HELD_OUT, max_samples=MAX_SAMPLES, seed=5)
        mixed = [(i, make_group("random", batch, module)) for i, batch in enumerate(bench.batches)]
        mixed = [(i, group) for i, group in mixed if group.load.num_tokens]
        measured = bench.measure(module, [*grid, *held_out, *(group for _, group in mixed)])
        table = bench.fit(module, measured[: len(grid)])
        yield from module_figures(f"{name}, {module}", table, measured[len(grid) :][:NUM_HELD_OUT])
        for (i, _), pairs in zip(mixed, measured[-len(mixed) :], strict=True):
            first, second = pairs[DEPTHS[-1]]
            totals[:, i] += (predicted_s(table, first), taken_s(first), taken_s(second))
    error, between = np.abs(2 * totals[0] / (totals[1] + totals[2]) - 1), np.abs(totals[2] / totals[1] - 1)
    yield ErrorFigure(
        f"{name}: whole mixed microbatches, largest error", float(error.max()), 0.10, float(np.median(between))
    )


def module_figures(where: str, table: CostTable, unseen: list[dict[int, Pair]]) -> Iterator[ErrorFigure]:
    """Errors of one module."""
    pairs = [found[n] for n in DEPTHS for found in unseen]
    error = errors(table, pairs)
    yield ErrorFigure(f"{where}: unseen shapes, median", float(np.median(error)), 0.05, noise(pairs))
    yield ErrorFigure(f"{where}: unseen shapes, 95th percentile", float(np.quantile(error, 0.95)), 0.15)
    deep = [found[DEEP] for found in unseen]
    error_frac = float(np.median(errors(table, deep)))
    yield ErrorFigure(f"{where}: {DEEP} layers from {DEPTHS[0]} and {DEPTHS[1]}, median", error_frac, 0.05, noise(deep))
    wrong_bytes = max(abs(predicted(m, table.activation_bytes) / m.activation_bytes - 1) for m, _ in deep)
    yield ErrorFigure(f"{where}: bytes of {DEEP} layers, largest error", wrong_bytes, 0.02)


if __name__ == "__main__":
    main()
