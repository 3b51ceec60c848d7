"""What profiling and planning take before the first step, beside a training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dflop import resources
from dflop.config import load_config
from dflop.config.sections import ModelProfileConfig
from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.devices import A100
from dflop.jobs.planning import FEWEST_LIKELY
from dflop.jobs.suite.cases import GLOBAL_BATCH_SIZE, suite_family, suite_specs
from dflop.jobs.suite.contest import OURS
from dflop.models.ways import WAYS
from dflop.profile.forecast import PlannedProbe, plan_probes
from tests.bench.claims.contests import Outcome
from tests.bench.claims.record import Claim, Expectation, Reading
from tests.bench.claims.tasks import Found, Task
from tests.bench.claims.throughput import contest_task
from tests.bench.claims.where import (
    INTERNVIT_72B,
    LLAMA_8B,
    MIXTURES,
    SIGLIP_7B,
    SIGLIP_32B,
    SIGLIP_72B,
    Where,
)

MODELS, QUICK_MODELS = (SIGLIP_7B, LLAMA_8B, SIGLIP_32B, SIGLIP_72B, INTERNVIT_72B), (SIGLIP_7B, INTERNVIT_72B)
DEFAULT, EXAMPLE = "default profile", "examples' profile"
EXAMPLE_FILE = "examples/llava_onevision_7b_a100.yaml"
PAPER = 0.021
PAPER_INIT_S = (7 * 60.0, 10 * 60.0)
EPOCH_SAMPLES = 65_000 + 60_000 + 60_000
"""The paper's data, by public summaries."""


def paper_training_s() -> float:
    """Of the shortest training of which the paper's shortest initialisation is its largest share."""
    return PAPER_INIT_S[0] / PAPER


@dataclass(frozen=True, slots=True)
class Forecast:
    """Probes of all modules of a model on its data."""

    kind: str
    where: Where
    num_probes: int
    probing_s: float
    """With a device for each module: the slowest module of every tp, one tp after the other, links last."""
    budget_s: float
    """The same if every job spent its share of the budget."""
    probed: tuple[str, ...]
    """`module tp`, those with a group that fits into the memory."""
    left_out: tuple[str, ...]
    """Other modules and degrees, and why."""


def profile_settings(kind: str) -> ModelProfileConfig:
    """What a new configuration has, or what the examples have."""
    if kind == DEFAULT:
        return ModelProfileConfig()
    return load_config(resources.path("configs") / EXAMPLE_FILE).model_profile


def run_forecast(where: Where, kind: str) -> Forecast:
    """The forecast by the data sheet of an A100."""
    settings, setting = profile_settings(kind), where.setting()
    family = suite_family(where.case, MIXTURES[where.mixture])
    tables = analytic_cost_tables(suite_specs(family), A100, profile_key="")
    modules = [spec.module for spec in setting.problem.specs]
    probing_s, num_probes = settings.links_budget_s, 0
    probed, left_out = list[str](), list[str]()
    for tp in settings.tp:
        probes = plan_probes(
            family,
            [sample for batch in setting.problem.batches for sample in batch],
            depths=settings.num_layers,
            num_probes=settings.num_probes,
            max_samples=max(1, where.global_batch_size // FEWEST_LIKELY),
            num_repeats=settings.num_repeats,
            budget_s=settings.budget_s,
            seed=where.seed,
            ways=[WAYS[name] for name in settings.ways],
            tp=tp,
            tables=tables,
            memory_bytes=A100.memory_bytes,
        )
        seconds = {module: _seconds([p for p in probes if p.module == module]) for module in modules}
        for module in modules:
            if seconds[module]:
                probed.append(f"{module} tp {tp}")
            else:
                cannot = any(p.module == module for p in probes)  # probes nobody has costs of
                left_out.append(f"{module} tp {tp} ({'heads do not divide' if cannot else 'no group fits'})")
        probing_s += max(seconds.values())
        num_probes += len(probes)
    budget_s = settings.budget_s / len(modules) * len(settings.tp) + settings.links_budget_s
    return Forecast(kind, where, num_probes, probing_s, budget_s, tuple(probed), tuple(left_out))


def _seconds(probes: Sequence[PlannedProbe]) -> float:
    return sum(p.seconds or 0.0 for p in probes)


def tasks(seeds: Sequence[int], full: bool) -> list[Task]:
    wanted = _places(seeds, full)
    return [contest_task(w) for w in wanted] + [_task(w, kind) for w in wanted for kind in (DEFAULT, EXAMPLE)]


def claim(found: Found, seeds: Sequence[int], full: bool) -> Claim:
    outcomes = {w: found[contest_task(w)] for w in _places(seeds, full) if found[contest_task(w)] is not None}
    rows = [(outcomes[w], found[_task(w, kind)]) for w in outcomes for kind in (DEFAULT, EXAMPLE)]
    epoch = {kind: _worst(f"{kind}, of one epoch", rows, kind, epoch_s) for kind in (DEFAULT, EXAMPLE)}
    hours = f"of a training of {paper_training_s() / 3600:.1f} h"
    paper = {k: _worst(f"{k}, {hours}", rows, k, lambda _: paper_training_s()) for k in (DEFAULT, EXAMPLE)}
    over = [f for _, f in rows if f.probing_s > f.budget_s]
    return Claim(
        "initialisation",
        "Profiling and planning take at most 2.1 % of the training.",
        "Probes as the profiler would take them on A100s, timed by the data sheet, a job per module, one tp after the "
        "other; planning with all baselines by this machine's clock. Queues, start-up of jobs, building of modules and "
        "reading the dataset's headers are not in it. Worst model of each seed, beside one epoch of the paper's "
        f"{EPOCH_SAMPLES:,} samples at our simulated step, and beside the shortest training its figures allow.",
        "7 to 10 min, at most 2.1 % (secondary)",
        (*epoch.values(), *paper.values()),
        tuple(
            Expectation(reading, "<=", PAPER, reason(rows, kind, is_epoch))
            for readings, is_epoch in ((epoch, True), (paper, False))
            for kind, reading in readings.items()
        ),
        (
            f"{len(over)} of {len(rows)} forecasts are beyond their budget" + _beyond(over),
            *_left_out(rows),
        ),
        tuple(_row(o, f) for o, f in rows),
    )  # fmt: skip


def init_s(outcome: Outcome, forecast: Forecast) -> float:
    """Seconds of probing and planning."""
    return forecast.probing_s + outcome.planning_cpu_s


def epoch_s(outcome: Outcome) -> float:
    """Simulated seconds of one pass over the paper's data."""
    return EPOCH_SAMPLES / GLOBAL_BATCH_SIZE * outcome.mean_s(OURS)


def reason(rows: Sequence[tuple[Outcome, Forecast]], kind: str, is_epoch: bool) -> str:
    """What makes it long, or the epoch short."""
    mine = [(o, f) for o, f in rows if f.kind == kind]
    o, f = max(mine, key=lambda row: init_s(*row) / (epoch_s(row[0]) if is_epoch else 1.0))
    told = f"{init_s(o, f) / 60:.1f} min for {o.where.case.name}"
    if is_epoch:
        told += f", whose epoch is {epoch_s(o) / 60:.0f} min on 64 GPUs by simulation"
    num_tps = len({name.partition(" tp ")[2] for name in f.probed})
    if num_tps > 1:
        return (
            f"{told}: {num_tps} tensor-parallel degrees are probed one after the other, up to {f.budget_s:.0f} s in all"
        )
    return f"{told}: {f.probing_s:.0f} s of it probes, planning and baselines {o.planning_cpu_s:.0f} s on this machine"


def _worst(what: str, rows: Sequence[tuple[Outcome, Forecast]], kind: str, of_s: Callable[[Outcome], float]) -> Reading:
    seeds = sorted({o.where.seed for o, _ in rows})
    shares = [max(init_s(o, f) / of_s(o) for o, f in rows if f.kind == kind and o.where.seed == seed) for seed in seeds]
    return Reading(what, tuple(shares), "%", "forecast")


def _beyond(over: Sequence[Forecast]) -> str:
    if not over:
        return ""
    return f", by at most {max(f.probing_s / f.budget_s for f in over):.2f}x, for a fit needs so many probes"


def _left_out(rows: Sequence[tuple[Outcome, Forecast]]) -> tuple[str, ...]:
    """Modules that cannot be probed at some tp."""
    names = dict.fromkeys(f"{o.where.case.name}: {name}" for o, f in rows for name in f.left_out)
    return (f"not probed: {', '.join(names)}",) if names else ()


def _row(o: Outcome, f: Forecast) -> dict[str, object]:
    return {
        "model": o.where.case.name, "profile": f.kind, "seed": o.where.seed, "num_probes": f.num_probes,
        "probing_s": f.probing_s, "budget_s": f.budget_s, "planning_cpu_s": o.planning_cpu_s,
        "step_s": o.mean_s(OURS), "of_epoch": init_s(o, f) / epoch_s(o),
        "of_paper_training": init_s(o, f) / paper_training_s(), "left_out": list(f.left_out),
    }  # fmt: skip


def _places(seeds: Sequence[int], full: bool) -> list[Where]:
    return [Where(model, "main", seed) for model in (MODELS if full else QUICK_MODELS) for seed in seeds]


def _task(where: Where, kind: str) -> Task:
    return Task(run_forecast, (where, kind), f"{where.case.name}, {kind}, seed {where.seed}")
