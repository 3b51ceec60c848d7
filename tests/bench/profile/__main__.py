"""How well a profile predicts what it did not see, on this machine: `python -m tests.bench.profile [--json FILE]`.

Two small models are profiled at 1 and 2 layers, once over a grid of groups and once with two fifths of the probes,
chosen. Predictions are compared with other groups, drawn as training draws them: at the probed depths, at 8 layers, and
whole microbatches of mixed media through all modules. Everything is measured twice, some time apart: predictions are
compared with the mean, and noise is what the two differ by, half of it what no prediction can be better than. One
process on one core with the allocator settings that jobs have; beside other work the noise says how far to trust the
rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from dflop.cost.curve import evaluate
from dflop.cost.fit import fit_cost_tables
from dflop.jobs.submit import CPU_ENV
from dflop.models.family import Family
from dflop.profile.groups import ProbeGroup, make_group, random_groups
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import CostTable, CostTerms, Measurement
from tests.bench.figures import machine
from tests.bench.profile.cases import MODELS, VOCAB_SIZE, make_shapes

DEPTHS, DEEP = (1, 2), 8
NUM_GROUPS, NUM_CHOSEN = 18, 7
NUM_HELD_OUT, NUM_MIXED, MAX_SAMPLES = 10, 8, 4


@dataclass(frozen=True)
class ErrorFigure:
    """One relative error and what it must not exceed."""

    name: str
    error_frac: float
    bound_frac: float | None
    noise_frac: float | None = None

    @property
    def is_met(self) -> bool:
        return self.bound_frac is None or self.error_frac <= self.bound_frac

    def line(self) -> str:
        bound = "" if self.bound_frac is None else f"bound {self.bound_frac:.0%}   {'ok' if self.is_met else 'MISSED'}"
        noise = "" if self.noise_frac is None else f"   noise {self.noise_frac:.1%}"
        return f"{self.name:60s} {self.error_frac:7.2%}   {bound:20s}{noise}"


class Bench:
    """One model with its samples."""

    def __init__(self, family: Family, token_config: dict[str, int], kinds: tuple[str, ...], num_repeats: int) -> None:
        self.family, self.token_config = family, token_config
        self.shapes = make_shapes(family, kinds, 300, seed=0)
        self.unseen = make_shapes(family, kinds, 300, seed=1)
        self.settings = ProbeSettings("bench", hardware_name("cpu"), software_name(), "float32", num_repeats)
        self.depth = {s.module: s.num_layers for s in family.specs()}

    def probe(self, module: str, num_layers: int) -> ModuleProbe:
        cpu = torch.device("cpu")
        return ModuleProbe(self.family, self.token_config, VOCAB_SIZE, module, num_layers, self.settings, cpu)

    def tables(self, num_probes: int, target_frac: float | None) -> tuple[dict[str, CostTable], int]:
        """(table per module, number of probes)."""
        rows = list(
            profile_model(
                self.family, self.shapes, token_config=self.token_config, vocab_size=VOCAB_SIZE,
                settings=self.settings, depths=DEPTHS, num_probes=num_probes, max_samples=MAX_SAMPLES, budget_s=1e9,
                device=torch.device("cpu"), progress=lambda line: print(f"  {line}", file=sys.stderr),
                target_frac=target_frac,
            )
        )  # fmt: skip
        return {t.module: t for t in fit_cost_tables(rows, self.family.specs())}, len(rows)

    def measure_twice(self, probe: ModuleProbe, groups: Sequence[ProbeGroup]) -> list[tuple[Measurement, Measurement]]:
        """Every group in two passes, so that the second is not right behind the first."""
        probe.warm_up(max(groups, key=lambda g: g.load.num_tokens))
        first, second = ([probe.measure(g) for g in groups] for _ in "12")
        return list(zip(first, second, strict=True))


def predicted(m: Measurement, *curves: CostTerms) -> float:
    """Sum of curves at the load and depth of a measurement."""
    load = (m.num_items, m.num_tokens, m.sum_sq_tokens)
    return sum(float(evaluate(terms, load, m.num_layers, True)) for terms in curves)


def predicted_s(table: CostTable, m: Measurement) -> float:
    return predicted(m, table.forward_s, table.backward_s)


def taken_s(m: Measurement) -> float:
    return m.forward_s + m.backward_s


def errors(table: CostTable, pairs: Sequence[tuple[Measurement, Measurement]]) -> np.ndarray:
    return np.array([abs(2 * predicted_s(table, a) / (taken_s(a) + taken_s(b)) - 1) for a, b in pairs])


def noise(pairs: Sequence[tuple[Measurement, Measurement]]) -> float:
    return float(np.median([abs(taken_s(second) / taken_s(first) - 1) for first, second in pairs]))


def figures_of(name: str, bench: Bench) -> Iterator[ErrorFigure]:
    """Everything about one model."""
    grid, num_grid = bench.tables(NUM_GROUPS, None)
    chosen, num_chosen = bench.tables(NUM_CHOSEN, 1e-9)
    yield ErrorFigure(f"{name}: probes chosen, of those of the grid", num_chosen / num_grid, 0.40)
    for module, table in grid.items():
        yield from module_figures(f"{name}, {module}", bench, table, chosen[module])
    yield mixed_figure(name, bench, grid)


def module_figures(where: str, bench: Bench, table: CostTable, chosen: CostTable) -> Iterator[ErrorFigure]:
    """Errors of one module, by the table of the grid and by that of the chosen probes."""
    module = table.module
    held_out = random_groups(bench.unseen, module, NUM_HELD_OUT, max_samples=MAX_SAMPLES, seed=5)
    pairs = [pair for n in DEPTHS for pair in bench.measure_twice(bench.probe(module, n), held_out)]
    deep = bench.measure_twice(bench.probe(module, DEEP), held_out)
    for how, given in (("", table), (", chosen probes", chosen)):
        error, deep_error = errors(given, pairs), errors(given, deep)
        yield ErrorFigure(f"{where}: unseen shapes, median{how}", float(np.median(error)), 0.05, noise(pairs))
        yield ErrorFigure(f"{where}: unseen shapes, 95th percentile{how}", float(np.quantile(error, 0.95)), 0.15)
        yield ErrorFigure(f"{where}: {DEEP} layers, median{how}", float(np.median(deep_error)), 0.05, noise(deep))
    wrong_bytes = [abs(predicted(m, table.activation_bytes) / m.activation_bytes - 1) for m, _ in deep]
    yield ErrorFigure(f"{where}: bytes of {DEEP} layers, largest error", max(wrong_bytes), 0.02)


def mixed_figure(name: str, bench: Bench, tables: dict[str, CostTable]) -> ErrorFigure:
    """Whole packed microbatches, every module 2 layers deep."""
    rng = np.random.default_rng(9)
    batches = [[bench.unseen[i] for i in rng.choice(len(bench.unseen), MAX_SAMPLES)] for _ in range(NUM_MIXED)]
    totals = np.zeros((3, NUM_MIXED))
    for module, table in tables.items():
        groups = [(i, make_group("random", batch, module)) for i, batch in enumerate(batches)]
        used = [(i, g) for i, g in groups if g.load.num_tokens]
        pairs = bench.measure_twice(bench.probe(module, 2), [g for _, g in used])
        for (i, _), (first, second) in zip(used, pairs, strict=True):
            totals[:, i] += (predicted_s(table, first), taken_s(first), taken_s(second))
    error, between = np.abs(2 * totals[0] / (totals[1] + totals[2]) - 1), np.abs(totals[2] / totals[1] - 1)
    return ErrorFigure(
        f"{name}: whole mixed microbatches, largest error", float(error.max()), 0.10, float(np.median(between))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if CPU_ENV.items() - os.environ.items():  # glibc reads them when a process starts
        os.execve(sys.executable, [sys.executable, "-m", "tests.bench.profile", *sys.argv[1:]], os.environ | CPU_ENV)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    found: list[ErrorFigure] = []
    for name, make in MODELS.items():
        started = time.perf_counter()
        for figure in figures_of(name, Bench(*make(), args.repeats)):
            found.append(figure)
            print(figure.line(), flush=True)
        print(f"{name}: {time.perf_counter() - started:.0f} s", flush=True)
    if args.json:
        content = {"machine": machine("torch", "transformers"), "figures": [asdict(f) for f in found]}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    if missed := [f.name for f in found if not f.is_met]:
        sys.exit("bound missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
