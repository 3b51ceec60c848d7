"""Step time of the engine beside plain Hugging Face training: same global batches, same processes, taking turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.profile.hardware import hardware_name, software_name
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import LLM, Measurement, Plan, StepPlan
from dflop.schedule.scheduler import schedule_step
from tests.bench.engine.contenders import CPU, Contender, EngineRank, PlainReplica
from tests.bench.engine.samples import Workload
from tests.bench.schedule.real_ranks import prepare_process
from tests.train.synthetic import make_inline_plan, make_plan

NUM_RANKS = 2
PADDED, ONE_BY_ONE = "plain, 4 padded samples at a time", "plain, one sample at a time"
NUM_SIDE_BY_SIDE = {PADDED: 4, ONE_BY_ONE: 1}
LAYOUTS = ("inline dp2", "vision | llm")
POLICIES = ("arrival", "balanced")
MAX_LOSS_ERROR = 1e-4
DEPTHS, NUM_PROBES, MAX_SAMPLES, NUM_REPEATS = (2, 4), 24, 6, 3


def plan_of(layout: str, workload: Workload, num_microbatches: int) -> Plan:
    """A layout of two processes; each replica of an inline one has half of the microbatches' samples."""
    if layout == "vision | llm":
        return make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=num_microbatches, of=workload.family)
    depth = {s.module: s.num_layers for s in workload.family.specs() if s.module in ("vision", LLM)}
    return make_inline_plan([depth], dp=NUM_RANKS, num_microbatches=num_microbatches // NUM_RANKS)


@dataclass(frozen=True)
class Job:
    """What the processes train."""

    workload: Workload
    plans: Mapping[str, tuple[Plan, tuple[StepPlan, ...]]]
    """Of the engine, by name of the contender."""
    num_rounds: int


@dataclass(frozen=True)
class Seen:
    """One step of one process."""

    wall_s: float
    """Until all processes are done."""
    cpu_s: float
    """Of all threads of the process."""
    loss: float


def probe(rank: int, folder: Path, workload: Workload, budget_s: float) -> list[Measurement]:
    """What the scheduler's costs come from; every process probes, as every process trains."""
    prepare_process(rank)
    settings = ProbeSettings("engine", hardware_name("cpu"), software_name(), "float32", NUM_REPEATS)
    return list(
        profile_model(
            workload.family, workload.shapes, token_config=workload.token_config, vocab_size=workload.vocab_size,
            settings=settings, depths=DEPTHS, num_probes=NUM_PROBES, max_samples=MAX_SAMPLES, budget_s=budget_s,
            device=CPU, progress=lambda line: None,
        )
    )  # fmt: skip


def make_job(workload: Workload, probes: Sequence[Measurement], num_microbatches: int, num_rounds: int) -> Job:
    """Every layout of the engine under every policy."""
    specs = tuple(s for s in workload.family.specs() if s.module in ("vision", LLM))
    cost = CostModel(fit_cost_tables(probes, specs), specs=specs, extrapolate=True)
    plans = {}
    for layout in LAYOUTS:
        plan = plan_of(layout, workload, num_microbatches)
        for policy in POLICIES:
            step_plans = tuple(
                schedule_step(run_id="bench", step=n, plan=plan, batch=batch, cost=cost, policy=policy)
                for n, batch in enumerate(workload.batches)
            )
            plans[f"engine, {layout}, {policy}"] = plan, step_plans
    return Job(workload, plans, num_rounds)


def race(rank: int, folder: Path, job: Job) -> list[list[dict[str, Seen]]]:
    """`[round][batch]` steps of every contender; round 0 is an uncounted one."""
    prepare_process(rank)
    contenders: dict[str, Contender] = {n: PlainReplica(job.workload, k) for n, k in NUM_SIDE_BY_SIDE.items()}
    contenders |= {n: EngineRank(job.workload, plan, steps) for n, (plan, steps) in job.plans.items()}
    names = list(contenders)
    rounds = []
    for round_number in range(job.num_rounds + 1):
        batches = []
        for batch in range(len(job.workload.batches)):
            first = (round_number + batch) % len(names)
            batches.append({n: _timed(contenders[n], batch) for n in (*names[first:], *names[:first])})
        rounds.append(batches)
    return rounds


def _timed(contender: Contender, batch: int) -> Seen:
    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    loss = contender.step(batch)
    cpu_s = time.process_time() - cpu_s
    dist.barrier()
    return Seen(time.perf_counter() - wall_s, cpu_s, loss)


@dataclass(frozen=True)
class Ratio:
    """Seconds of a step in one way over those in another; above 1 the latter is faster."""

    slower: str
    faster: str
    wall: float
    """Geometric mean over global batches of the median over rounds."""
    wall_spread: float
    """Standard deviation over global batches, as a factor."""
    wall_of_batch: tuple[float, ...]
    noise_frac: float
    """Half the range over rounds of a batch's ratio, relative; median over batches."""
    cpu: float
    """As `wall`, of the CPU seconds of all processes: what others on the machine hardly disturb."""


def ratio(rounds: Sequence[Sequence[Mapping[str, Sequence[Seen]]]], one: str, other: str) -> Ratio:
    """Of `[round][batch][contender][rank]`.

    Raises:
        ValueError: the two do not compute the same loss from the same weights.
    """
    for of_batch in rounds[0][:1]:
        losses = [sum(s.loss for s in of_batch[name]) for name in (one, other)]
        if abs(losses[0] - losses[1]) > MAX_LOSS_ERROR * abs(losses[0]):
            raise ValueError(f"`{one}` has loss {losses[0]:.6f}, `{other}` {losses[1]:.6f}")
    wall = [[_wall_s(b[one]) / _wall_s(b[other]) for b in of_round] for of_round in rounds[1:]]
    cpu = [[_cpu_s(b[one]) / _cpu_s(b[other]) for b in of_round] for of_round in rounds[1:]]
    of_batch = [statistics.median(x) for x in zip(*wall, strict=True)]
    noise = [(max(x) - min(x)) / 2 / statistics.median(x) for x in zip(*wall, strict=True)]
    logs = [math.log(x) for x in of_batch]
    return Ratio(
        one, other, wall=statistics.geometric_mean(of_batch),
        wall_spread=math.exp(statistics.stdev(logs)) if len(logs) > 1 else 1.0,
        wall_of_batch=tuple(of_batch), noise_frac=statistics.median(noise),
        cpu=statistics.geometric_mean([statistics.median(x) for x in zip(*cpu, strict=True)]),
    )  # fmt: skip


def mean_step_s(rounds: Sequence[Sequence[Mapping[str, Sequence[Seen]]]], name: str) -> float:
    """Wall seconds of a counted step: mean over batches of the median over rounds."""
    per_batch = zip(*([_wall_s(b[name]) for b in of_round] for of_round in rounds[1:]), strict=True)
    return statistics.mean(statistics.median(x) for x in per_batch)


def _wall_s(ranks: Sequence[Seen]) -> float:
    return max(s.wall_s for s in ranks)


def _cpu_s(ranks: Sequence[Seen]) -> float:
    return sum(s.cpu_s for s in ranks)
