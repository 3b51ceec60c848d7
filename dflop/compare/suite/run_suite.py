"""Runs a suite by name: a table for people, all numbers for programs, pictures."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from dflop import __version__
from dflop.compare.suite.cases import CASES
from dflop.compare.suite.contest import OURS, RIVALS, Contest, by_mixture
from dflop.compare.suite.suite_figures import save_picture
from dflop.compare.suite.sweeps import SUITES, Point
from dflop.compare.suite.unseen_batches import geometric_mean
from dflop.errors import ConfigError, did_you_mean
from dflop.profile.hardware import hardware_name
from dflop.report.plots import check_suffix
from dflop.run.messages import Say
from dflop.units import percent, ratio, seconds

NOTES = (
    "simulated: every number; no GPU was involved",
    "speedups are over the baseline, as in `dflop compare` on your data: the faster uniform plan, tuned or default, in "
    "arrival order with equal counts, that holds all batches in memory; where neither does, the best of what experts "
    "run. Geometric means over held-out batches, the same for all and paired",
    "tuned: the best Megatron-style plan of all that fit the batches that it is tuned for; default: largest tp, "
    "smallest pp, one sample a microbatch; reference: the literal rule of the released code with our batches; bound: "
    "every GPU busy, best tp",
    "what experts run, each tuned for its batches and within memory. token LPT: uniform, the longest sample packed "
    "first. Megatron expert: layers cut by cost, sequence parallelism, MLPs alone recomputed, as costs, packed alike. "
    "FSDP2: parameters sharded over a node or all GPUs, tokens balanced by Karmarkar-Karp. FSDP2 + SP: that with "
    "tensor parallelism and Ulysses sequence parallelism inside a node. Megatron + CP: ZeRO-1, tensor parallelism and "
    "ring attention inside a node, tokens balanced likewise. `over experts`: our speedup over the fastest of these",
    "`!`: the plan does not fit in memory, or some batch exceeds it: the run would go out of memory",
    "at its tp: step over the bound at the tp and recomputation that memory made our plan choose",
    "published: what two public summaries of the paper say, which contradict each other (secondary; 1.2 to 3.6 over "
    "all models is common to both); its baseline was tuned by hand, ours by simulation",
)
COMPETITORS = {name.removeprefix("uniform "): name for name in (*RIVALS, OURS)}
"""By column."""
COLUMNS = (
    "model", "data", "sweep", "at", "baseline", *COMPETITORS, "95 %", "over experts", "bound",
    "idle baseline", "idle dflop", "step / bound", "at its tp", "samples/s/GPU baseline",
    "samples/s/GPU dflop", "tokens/s/GPU dflop", "MFU baseline", "MFU dflop", "published",
)  # fmt: skip
OF_PAPER = {"default", "length-grouped", "step / bound", "at its tp", "published"}
OF_SWEEPS = {"sweep", "at", "samples/s/GPU baseline", "samples/s/GPU dflop"}


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """What a suite found; every number is simulated."""

    name: str
    points: tuple[Point, ...]

    @property
    def contests(self) -> list[Contest]:
        return [point.found for point in self.points]

    @property
    def columns(self) -> tuple[str, ...]:
        left_out = OF_SWEEPS if self.name == "paper" else OF_PAPER
        return tuple(name for name in COLUMNS if name not in left_out)

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A row per setting; of the paper's models also their geometric means per kind of data."""
        found = [_cells(point) for point in self.points]
        if self.name == "paper":
            found += [_mean_cells(name, of) for name, of in by_mixture(self.contests)]
        return [tuple(cells.get(name, "") for name in self.columns) for cells in found]

    @property
    def notes(self) -> tuple[str, ...]:
        chosen = NOTES if self.name == "paper" else NOTES[:4]
        return (*chosen, f"costs: {self.points[0].found.setting.cost_name}")

    @property
    def numbers(self) -> list[dict[str, object]]:
        """Everything in full, for programs; step times in seconds."""
        return [
            ({"sweep": p.sweep, "x": p.x, "label": p.label} if p.sweep else {}) | _numbers(p.found) for p in self.points
        ]


def run_suite(name: str, say: Say, pictures: Sequence[Path] = (), json_file: Path | None = None) -> SuiteResult:
    """Runs a suite and writes what was asked for.

    Args:
        name: One of `SUITES`.
        say: Receives lines on what happens.
        pictures: .png, .svg or .pdf files to draw into.
        json_file: Gets all numbers, with machine, versions and cost tables.

    Raises:
        ConfigError: unknown suite, or a picture that cannot be drawn.
        InfeasiblePlanError: a case of the paper's on which no plan fits.
        OSError: a file cannot be written.
    """
    if name not in SUITES:
        raise ConfigError(f"unknown suite `{name}`", hint=did_you_mean(name, SUITES))
    for picture in pictures:
        check_suffix(picture)
    started_s = time.process_time()
    found = SuiteResult(name, tuple(SUITES[name](say)))
    if json_file:
        content = {**provenance(found), "cpu_s": time.process_time() - started_s, "cases": found.numbers}
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    for picture in pictures:
        save_picture(found.points, picture)
    return found


def provenance(found: SuiteResult) -> dict[str, object]:
    """Machine, versions and costs behind the numbers."""
    return {
        "suite": found.name,
        "simulated": True,
        "notes": found.notes,
        "costs": sorted({c.setting.cost_name for c in found.contests}),
        "cost_tables": {
            c.setting.name: {
                f"{t.module} tp {t.tp}{' recompute' * t.recompute}, {t.hardware}, {t.source}": t.table_id
                for t in c.setting.problem.cost.tables
            }
            for c in found.contests
        },
        "machine": {"cpu": hardware_name("cpu"), "num_cores": os.cpu_count()},
        "versions": {"dflop": __version__, **{name: version(name) for name in ("numpy", "numba", "cvxpy")}},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def plan_rows(contests: Sequence[Contest]) -> list[tuple[str, ...]]:
    """(model, data, competitor, layout, microbatches) of every plan."""
    return [
        (one.setting.name, one.setting.mixture, name, one.plans.layout(name), str(plan.num_microbatches))
        for one in contests
        for name, plan in one.plans.named.items()
    ]


def _cells(point: Point) -> dict[str, str]:
    """Everything that a suite says of a setting, by column."""
    one, baseline, our_steps = point.found, point.found.baseline, point.found.steps[OURS]
    ours, base = one.speedup(OURS, baseline), one.steps[baseline] if baseline else None
    ours_means = one.setting.workload.throughput(our_steps.mean_s, one.plans.ours)
    published = next((case.published for case in CASES if case.name == one.setting.name), None)
    return {
        "model": one.setting.name,
        "data": one.setting.mixture,
        "sweep": point.sweep,
        "at": point.label,
        "baseline": f"{baseline}, {seconds(base.mean_s)}" if base else "none fits",
        **{column: ratio(value) + _mark(one, COMPETITORS.get(column, "")) for column, value in _ratios(one).items()},
        "95 %": f"{ours.low:.2f}-{ours.high:.2f}" if ours.has_interval else "-",
        "idle baseline": percent(base.mean_idle_frac) if base else "-",
        "idle dflop": percent(our_steps.mean_idle_frac),
        "samples/s/GPU baseline": f"{point.throughput(baseline):.3f}" if baseline else "-",
        "samples/s/GPU dflop": f"{point.throughput(OURS):.3f}",
        "tokens/s/GPU dflop": f"{ours_means.tokens_per_s_per_gpu:,.0f}",
        "MFU baseline": percent(one.setting.workload.throughput(base.mean_s, None).mfu_frac) if base else "-",
        "MFU dflop": percent(ours_means.mfu_frac),
        "published": f"{published[0]}-{published[1]}" if published else "-",
    }


def _mean_cells(mixture: str, contests: Sequence[Contest]) -> dict[str, str]:
    """Geometric means of every ratio where a baseline fits; `-` where one of these contests has none."""
    each = [_ratios(one) for one in contests if one.baseline] or [_ratios(one) for one in contests]
    of = {column: [ratios[column] for ratios in each] for column in each[0]}
    means = {c: "-" if any(map(math.isnan, found)) else ratio(geometric_mean(found)) for c, found in of.items()}
    return {"model": "geometric mean", "data": mixture, **means}


def _ratios(one: Contest) -> dict[str, float]:
    baseline = one.baseline
    return {
        **{column: one.speedup(name, baseline).mean for column, name in COMPETITORS.items()},
        "over experts": one.over_experts.mean,
        "bound": one.bound_over(baseline),
        "step / bound": one.over_bound,
        "at its tp": one.over_bound_of_ours,
    }


def _mark(one: Contest, name: str) -> str:
    return "!" if name in one.steps and one.exceeds_memory(name) else ""


def _numbers(one: Contest) -> dict[str, object]:
    throughput = {name: one.setting.workload.throughput(steps.mean_s, None) for name, steps in one.steps.items()}
    return {
        "model": one.setting.name,
        "data": one.setting.mixture,
        "num_gpus": one.setting.num_gpus,
        "baseline": one.baseline,
        "global_batch_size": one.setting.problem.global_batch_size,
        "step_s": {name: list(steps.step_s) for name, steps in one.steps.items()},
        "idle_frac": {name: steps.mean_idle_frac for name, steps in one.steps.items()},
        "mfu_frac": {name: means.mfu_frac for name, means in throughput.items()},
        "tokens_per_s_per_gpu": {name: means.tokens_per_s_per_gpu for name, means in throughput.items()},
        "num_over_cap": {name: steps.num_over_cap for name, steps in one.steps.items()},
        "bound_s": list(one.bound_s),
        "bound_of_our_tp_s": list(one.bound_of_ours_s),
        "reference_fits": one.plans.reference_fits,
        "plans": {
            name: {
                "layout": one.plans.layout(name),
                "num_microbatches": plan.num_microbatches,
                "peak_bytes": max(peak for m in plan.modules for peak in m.stage_memory_bytes),
                "plan_id": plan.plan_id,
            }
            for name, plan in one.plans.named.items()
        },
    }
