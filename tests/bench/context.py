"""Do ranks that share samples have the same to do? `python -m tests.bench.context [--sizes TABLE]`.

Two processes of the engine over gloo train the same global batches in three ways: as context-parallel neighbours that
cut every sample, as data-parallel replicas packed by dflop, and as those that balance tokens by Karmarkar and Karp's
method. All share out parameters (FSDP2) and have as many microbatches, so they differ in who has what alone. The ways
take turns, step by step and round by round.

Counted is the processor time of forward and backward passes, the least of all rounds of every rank, step and
microbatch, so that other work on the machine does not matter: a step takes what its slower rank takes. What ranks wait
for messages is not counted: two processes on shared cores say nothing of it. Bytes are those of an uncounted epoch.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.cost.model import CostModel, Floats, stage_kind
from dflop.plan.drafts import cost_growth
from dflop.plan.space import Problem
from dflop.records import LLM, ClusterSpec, ParallelSpec, Plan, SampleShape, StepPlan
from dflop.records.speedup import speedup
from dflop.schedule.assignment import assignment_of
from dflop.schedule.items import module_items
from dflop.schedule.piece_loads import piece_loads, tile_loads
from dflop.schedule.step_scheduler import schedule_step
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.instances import small_media, small_texts
from tests.bench.markdown import ratio, span, table
from tests.bench.ranks import LEARNING_RATE, MAX_GRAD_NORM, EngineRank, costs_of, family_of, take_core
from tests.train.synthetic import ALL, make_inline_plan, sharing

NUM_RANKS, NUM_MICROBATCHES, NUM_SAMPLES, NUM_BATCHES = 2, 2, 16, 8
CLUSTER = ClusterSpec("bench", "local", 1, NUM_RANKS, 1 << 30, "cpu", NUM_RANKS)
PROFILE_SEED, NUM_PROFILED, MAX_SAMPLES, BUDGET_S = 1 << 20, 120, 8, 20.0
MAX_UNEVEN = 1.10
CUT = "samples cut between ranks (cp 2)"
WAYS: Mapping[str, tuple[int, str]] = {
    CUT: (2, "balanced"),
    "packed by dflop (dp 2)": (1, "balanced"),
    "tokens balanced by Karmarkar-Karp (dp 2)": (1, "token_kk"),
}
"""(cp, policy)."""
Batches = Sequence[list[SampleShape]]


@dataclass(frozen=True)
class Kind:
    """Samples, and the model that they train."""

    model: str
    draw: Callable[..., list[SampleShape]]
    modules: tuple[str, ...]

    def batches(self, sizes: Path | None) -> Batches:
        n = NUM_SAMPLES
        return [self.draw(family_of(self.model), n, 1000 + i, sizes, i * n) for i in range(NUM_BATCHES)]

    def plan(self, cp: int, batches: Batches, cost: CostModel) -> Plan:
        """The whole model on every rank, parameters shared out."""
        specs = tuple(s for s in family_of(self.model).specs() if s.module in self.modules)
        layers, dp = {s.module: s.num_layers for s in specs}, NUM_RANKS // cp
        plan = make_inline_plan([layers], dp=dp, cp=cp, num_microbatches=NUM_MICROBATCHES)
        problem = Problem("bench", specs, CLUSTER, cost, tuple(map(tuple, batches)), NUM_SAMPLES, snapshot_seq=0)
        growth = cost_growth(problem, NUM_MICROBATCHES, ParallelSpec(1, 1, dp, cp), 0.0)
        modules = (replace(m, cost_growth=growth if m.module == LLM else 0.0) for m in plan.modules)
        return sharing(replace(plan, modules=tuple(modules)), ALL)


KINDS = {
    "texts with a tail": Kind("third", small_texts, (LLM,)),
    "images and frames of videos": Kind("equal", small_media, ("vision", LLM)),
}
Jobs = Mapping[str, tuple[str, Batches, Mapping[str, tuple[Plan, tuple[StepPlan, ...]]]]]
"""By kind: model, global batches, and by way the plan and its steps."""


def predicted_s(plan: Plan, step_plan: StepPlan, batch: Sequence[SampleShape], cost: CostModel) -> list[float]:
    """Per rank the seconds of its passes, from the loads and costs by which the evaluator knows the slowest rank's."""
    assignment, found = assignment_of(plan, step_plan), np.zeros(NUM_RANKS)
    for m in plan.modules:
        items, kind, dp = module_items(batch, m.module), stage_kind(m, 0), m.parallel.dp
        slot, rank = assignment.places(items)
        cell, num_cells = slot * dp + rank, plan.num_microbatches * dp
        if m.module == LLM:
            loads = piece_loads(items, cell, num_cells, kind.mode.cp, m.cost_growth).loads
        else:
            loads = tile_loads(items, cell, num_cells, kind.mode.cp).loads
        seconds = cost.extrapolating().module_seconds(m.module, loads, **kind.of_one_rank().costs())
        found += sum(seconds).reshape(plan.num_microbatches, NUM_RANKS).sum(axis=0)
    return found.tolist()


class Sent(TorchDispatchMode):
    """Bytes that this rank of two sends: of samples, and of weights and gradients by the least that sums take."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"samples": 0, "weights": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name == "alltoall_base_":
                rows, splits = args[1], args[4]
                self.bytes["samples"] += splits[1 - dist.get_rank()] * rows[:1].nbytes
            elif name in ("_allgather_base_", "_reduce_scatter_base_"):
                self.bytes["weights"] += min(args[0].nbytes, args[1].nbytes)
            else:
                assert name == "allreduce_", name
                self.bytes["weights"] += sum(t.nbytes for t in args[0])
        return func(*args, **(kwargs or {}))


def train(rank: int, folder: Path, jobs: Jobs, num_rounds: int) -> dict[str, dict[str, Any]]:
    """By kind and way: bytes sent in an epoch, and `[step, microbatch, pass]` least processor seconds of this rank."""
    take_core(rank)
    found: dict[str, dict[str, Any]] = {}
    for kind, (model, batches, ways) in jobs.items():
        ranks = {way: EngineRank(rank, model, plan, steps, batches) for way, (plan, steps) in ways.items()}
        found[kind] = {}
        for way, engine in ranks.items():  # first uses are slower
            with Sent() as sent:
                for i in range(len(batches)):
                    _step(engine, i)
            found[kind][way] = {"bytes": sent.bytes, "least_s": np.full((len(batches), NUM_MICROBATCHES, 2), np.inf)}
        for turn, i in itertools.product(range(num_rounds), range(len(batches))):
            first = (turn + i) % len(ranks)
            for way in [*list(ranks)[first:], *list(ranks)[:first]]:
                least_s = found[kind][way]["least_s"]
                least_s[i] = np.minimum(least_s[i], _step(ranks[way], i))
    return found


def _step(engine: EngineRank, index: int) -> Floats:
    """`[microbatch, pass]` processor seconds."""
    trace, taken_s = engine.passes(index), np.zeros((NUM_MICROBATCHES, 2))
    engine.update(trace, LEARNING_RATE, MAX_GRAD_NORM)
    for visit in trace.visits:
        taken_s[visit.microbatch, int(not visit.is_forward)] = visit.compute_s
    return taken_s


def merged(jobs: Jobs, costs: Mapping[str, CostModel], of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By kind and way what was predicted and measured of every step."""
    found: dict[str, Any] = {}
    for kind, (model, batches, ways) in jobs.items():
        found[kind] = {}
        for way, (plan, steps) in ways.items():
            expected = [predicted_s(plan, *of, costs[model]) for of in zip(steps, batches, strict=True)]
            least_s = np.array([of[kind][way]["least_s"] for of in of_ranks])
            mine_s = least_s.sum(axis=(2, 3)).T
            sent = {name: max(of[kind][way]["bytes"][name] for of in of_ranks) for name in ("samples", "weights")}
            found[kind][way] = {
                "step_s": mine_s.max(axis=1).tolist(), "met_step_s": least_s.max(axis=0).sum(axis=(1, 2)).tolist(),
                "uneven": _uneven(mine_s), "predicted_uneven": _uneven(expected), "rank_s": mine_s.tolist(),
                "sent_bytes_per_step": {name: n / len(batches) for name, n in sent.items()},
            }  # fmt: skip
    return found


def _uneven(seconds: Any) -> float:
    """Of `[step, rank]` seconds: the slower rank's over the mean, over an epoch."""
    return float(np.max(seconds, axis=1).sum() / np.mean(seconds, axis=1).sum())


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`context`: who has what, beside what that takes and sends."""
    rows = []
    for kind, ways in content["kinds"].items():
        for way, of in ways.items():
            over = speedup(of["step_s"], ways[CUT]["step_s"])
            met = sum(of["met_step_s"]) / sum(ways[CUT]["met_step_s"])
            times = ("1", "1") if way == CUT else (f"{ratio(over.mean)} ({span((over.low, over.high))})", ratio(met))
            sent = (f"{of['sent_bytes_per_step'][name] / 1e6:.1f} MB" for name in ("samples", "weights"))
            uneven = (f"{of[name]:.3f}" for name in ("predicted_uneven", "uneven"))
            rows.append((kind, way, f"{np.mean(of['step_s']):.3f} s", *times, *uneven, *sent))
    head = ("data", "who has what", "a step", "over cp 2", "where ranks meet in every pass",
            "slower rank over mean, predicted", "measured", "sent of samples", "of weights and gradients")  # fmt: skip
    return {"context": table(head, rows)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated without")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    become_a_job("tests.bench.context", OMP_NUM_THREADS="1")
    keep_to(NUM_RANKS)
    others = {k.model: k.draw(family_of(k.model), NUM_PROFILED, PROFILE_SEED, args.sizes) for k in KINDS.values()}
    costs = costs_of(others, BUDGET_S, MAX_SAMPLES)
    jobs = {}
    for name, kind in KINDS.items():
        batches, cost, ways = kind.batches(args.sizes), costs[kind.model], {}
        for way, (cp, policy) in WAYS.items():
            plan = kind.plan(cp, batches, cost)
            given = {"run_id": "bench", "plan": plan, "cost": cost, "policy": policy}
            ways[way] = plan, tuple(schedule_step(step=i, batch=batch, **given) for i, batch in enumerate(batches))
        jobs[name] = kind.model, batches, ways
    found = {"samples": "drawn from a table of real sizes" if args.sizes else "generated", "num_rounds": args.rounds}
    found["kinds"] = merged(jobs, costs, in_ranks(train, NUM_RANKS, jobs, args.rounds))
    print(tables(found)["context"])
    bounds = [
        (f"{name}: cp 2 is {of[CUT]['uneven']:.3f} of even", of[CUT]["uneven"] <= MAX_UNEVEN)
        for name, of in found["kinds"].items()
    ]
    conclude(found, bounds, args.json, "torch", "transformers", "numba")


if __name__ == "__main__":
    main()
