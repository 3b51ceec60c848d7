"""Real steps of the same global batches under several policies: `python -m tests.bench.schedule [--sizes TABLE]`.

Two processes of the engine, a core each, gloo between them: an encoder on one and a language model on the other, or the
whole model on each. A tiny model is profiled, ten steps on other samples correct the costs, and these schedule what is
compared. A global batch is trained under every policy in turn, in rounds, behind a few uncounted steps.

arrival: samples counted into microbatches in their order. bottleneck: all modules balanced, longest first. token_lpt:
LLM tokens, longest first. balanced: the search on the simulator, what runs by default.

The same steps say whether they take as long as the simulator says: the whole step, with gradient synchronisation and
optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflop.correct.estimate import Estimator
from dflop.cost.model import CostModel, Floats
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s
from dflop.records import LLM, ClusterSpec, Plan, SampleShape, StepObservation, StepPlan
from dflop.run.messages import say
from dflop.schedule.step_scheduler import predicted_spans, schedule_step
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.instances import MAX_SMALL_TOKENS, S_PER_FRAME, SIDE_FRAC, SMALL_SHARES, small_batch
from tests.bench.markdown import ratio, span, table
from tests.bench.ranks import EngineRank, costs_of, family_of, take_core
from tests.correct.times import StageTime, as_arrays
from tests.train.synthetic import make_inline_plan, make_plan

NUM_CORES, MODELS = 2, ("equal", "third")
CLUSTER = ClusterSpec("bench", "local", 1, NUM_CORES, 1 << 30, "cpu", NUM_CORES)
NUM_FULL_SEEDS = 5
"""With fewer seeds, which is fewer global batches, there are fewer configurations, too."""
MAX_SAMPLES = 16
NUM_PROFILED, NUM_CORRECTION_STEPS, NUM_WARM_UP_STEPS = 200, 10, 6
PROFILE_SEED, CORRECTION_SEED = 1 << 20, 1 << 21
MAX_GRADIENT_ERROR, MAX_SIMULATOR_ERROR = 1e-5, 0.10
Batches = Sequence[Sequence[SampleShape]]


@dataclass(frozen=True)
class Case:
    """One configuration: a model, a layout of two processes, a size of global batch."""

    model: str
    layout: str
    """`pipeline`: encoder | LLM. `replicas`: the whole model on each process."""
    num_samples: int
    num_microbatches: int
    """Of each process."""

    @property
    def name(self) -> str:
        what = "encoder | llm" if self.layout == "pipeline" else "2 replicas"
        load = "equal loads" if self.model == "equal" else "encoder a third"
        return f"{what}, {load}, {self.num_samples} samples x {self.num_microbatches} microbatches"

    @property
    def plan(self) -> Plan:
        family = family_of(self.model)
        if self.layout == "pipeline":
            return make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=self.num_microbatches, of=family)
        whole = {s.module: s.num_layers for s in family.specs()}
        return make_inline_plan([whole], dp=NUM_CORES, num_microbatches=self.num_microbatches)

    @property
    def policies(self) -> tuple[str, ...]:
        return ("arrival", "bottleneck" if self.layout == "pipeline" else "token_lpt", "balanced")


CASES = (
    Case("equal", "pipeline", 64, 8),
    Case("equal", "pipeline", 64, 16),
    Case("equal", "pipeline", 128, 16),
    Case("third", "pipeline", 64, 8),
    Case("third", "pipeline", 128, 16),
    Case("equal", "replicas", 64, 4),
    Case("equal", "replicas", 128, 4),
)
QUICK_CASES = (CASES[1], CASES[5])


@dataclass(frozen=True)
class Job:
    """Steps of one case in the order they are trained."""

    case: Case
    step_plans: tuple[StepPlan, ...]
    """The policy that was asked for is the `run_id`; `policy` is what was found best."""
    batches: Batches
    num_rounds: int

    @classmethod
    def of(cls, case: Case, cost: CostModel, batches: Batches, policies: Sequence[str], num_rounds: int) -> Job:
        """Every batch under every policy; no policy always comes first."""
        plans = []
        for i, batch in enumerate(batches):
            for shift in range(len(policies)):
                policy = policies[(i + shift) % len(policies)]
                found = schedule_step(
                    run_id="bench", step=i, plan=case.plan, batch=batch, cost=cost, policy=policy
                )  # fmt: skip
                plans.append(dataclasses.replace(found, run_id=policy))
        return cls(case, tuple(plans), batches, num_rounds)


def train(rank: int, folder: Path, job: Job) -> tuple[list[list[StepObservation]], float]:
    """`[round][step]` of one rank, and how far gradients of one global batch under two assignments differ, relative."""
    take_core(rank)
    engine = EngineRank(rank, job.case.model, job.case.plan, job.step_plans, job.batches)
    same = [i for i, p in enumerate(job.step_plans) if p.sample_index == job.step_plans[0].sample_index]
    first, *others = [engine.gradient(i) for i in same]
    errors = [float((g - first).abs().max() / first.abs().max()) for g in others]
    engine.first_steps(NUM_WARM_UP_STEPS)
    return [engine.first_steps(None) for _ in range(job.num_rounds)], max(errors, default=0.0)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated without")
    parser.add_argument("--seeds", type=int, default=3, help="global batches of a configuration")
    args = parser.parse_args()
    become_a_job("tests.bench.schedule", OMP_NUM_THREADS="1")
    keep_to(NUM_CORES)
    is_full, sizes = args.seeds >= NUM_FULL_SEEDS, args.sizes
    cases = CASES if is_full else QUICK_CASES
    shapes = {m: small_batch(family_of(m), NUM_PROFILED, PROFILE_SEED, sizes) for m in MODELS}  # others than trained
    costs = costs_of(shapes, 45.0 if is_full else 20.0, MAX_SAMPLES)
    costs = {model: _corrected(model, costs[model], sizes) for model in dict.fromkeys(case.model for case in cases)}
    found, bounds = [], []
    for case in cases:
        outcome, error = _run_case(case, costs[case.model], sizes, range(args.seeds), num_rounds=3 if is_full else 2)
        found.append(outcome)
        bounds.append((f"gradients of {case.name}: {error:.1e}", error <= MAX_GRADIENT_ERROR))
        for name, r in outcome["ratios"].items():
            measured = f"{r['measured']:.3f} ±{r['measured_sd']:.3f}"
            print(f"{case.name:63s} {name:22s} measured {measured}, simulated {r['simulated']:.3f}", flush=True)
    error = float(np.median([of["simulator_error_frac"] for case in found for of in case["policies"].values()]))
    bounds.append((f"steps are {error:.1%} off the simulator's, median", error <= MAX_SIMULATOR_ERROR))
    print(bounds[-1][0])
    data = {
        "rows": "drawn from a table of real sizes" if sizes else "generated", "max_text_tokens": MAX_SMALL_TOKENS,
        "side_frac": SIDE_FRAC, "s_per_frame": S_PER_FRAME, "group_shares": SMALL_SHARES,
    }  # fmt: skip
    conclude({"data": data, "cases": found}, bounds, args.json, "torch", "transformers", "numba")


def _corrected(model: str, cost: CostModel, sizes: Path | None) -> CostModel:
    """The costs after a run has seen a few steps in arrival order."""
    case, n = Case(model, "pipeline", 64, 8), 64
    batches = [
        small_batch(family_of(model), n, CORRECTION_SEED + i, sizes, first_index=i * n)
        for i in range(NUM_CORRECTION_STEPS)
    ]
    job = Job.of(case, cost, batches, ("arrival",), num_rounds=1)
    by_rank = [rounds[0] for rounds, _ in in_ranks(train, NUM_CORES, job)]
    estimator = Estimator({t.module: () for t in cost.tables})
    for i in range(1, NUM_CORRECTION_STEPS):  # the first step is slow
        predicted = predicted_spans(case.plan, job.step_plans[i], batches[i], cost)
        estimator.observe(as_arrays(time for steps in by_rank for time in _times(steps[i], predicted)))
    levels = {module: belief.level for module, belief in estimator.beliefs().items()}
    say(f"  {model}, corrections: {', '.join(f'{m} x{level:.2f}' for m, level in levels.items())}")
    return cost.with_corrections(levels)


def _times(seen: StepObservation, predicted: Mapping[Any, Any]) -> Iterator[StageTime]:
    """Compute seconds of a rank's microbatches with their prediction."""
    node = (seen.module, seen.stage, seen.dp_rank)
    for of in seen.spans:
        expected = predicted[node][of.microbatch]
        if (expected_s := expected.forward_s + expected.backward_s) > 0:
            measured_s = of.forward_compute_s + of.backward_compute_s
            yield StageTime(node, measured_s, {seen.module: np.array([expected_s])})


def _run_case(
    case: Case, cost: CostModel, sizes: Path | None, seeds: Sequence[int], num_rounds: int
) -> tuple[dict[str, Any], float]:
    """The case's figures, and how far gradients under two policies are apart."""
    family, n = family_of(case.model), case.num_samples
    batches = [small_batch(family, n, 1000 * seed + n, sizes, first_index=i * n) for i, seed in enumerate(seeds)]
    job = Job.of(case, cost, batches, case.policies, num_rounds)
    found = in_ranks(train, NUM_CORES, job)
    seen = list(zip(*(rounds for rounds, _ in found), strict=True))
    return compare(job, cost, [list(zip(*of_round, strict=True)) for of_round in seen]), max(e for _, e in found)


def compare(job: Job, cost: CostModel, rounds: Sequence[Sequence[Sequence[StepObservation]]]) -> dict[str, Any]:
    """What `[round][step][rank]` observations say, and what was simulated before."""
    case, specs = job.case, family_of(job.case.model).specs()
    n = case.num_samples
    problem = Problem("bench", specs, CLUSTER, cost, (tuple(job.batches[0]),), n, snapshot_seq=0)
    tail_s = plan_sync_s(problem, case.plan.modules, case.num_microbatches)  # gradients summed over replicas, optimizer
    measured_s = np.array([[max(o.step_s for o in ranks) for ranks in of_round] for of_round in rounds])
    simulated_s = np.array([[p.predicted_step_s + tail_s for p in job.step_plans]])
    idle_frac = np.array([[_idle_frac(ranks) for ranks in of_round] for of_round in rounds])
    steps_of = {name: [i for i, p in enumerate(job.step_plans) if p.run_id == name] for name in case.policies}

    def ratios(seconds: Floats, one: str, other: str) -> Floats:
        """`[round, batch]`; above 1 the other is faster."""
        return seconds[:, steps_of[one]] / seconds[:, steps_of[other]]

    blind, middle, ours = case.policies
    found = {}
    for one, other in ((blind, ours), (blind, middle)):
        of_batch = np.median(ratios(measured_s, one, other), axis=0)
        found[f"{one} / {other}"] = {
            "measured": of_batch.mean(), "measured_sd": of_batch.std(ddof=1) if len(of_batch) > 1 else 0.0,
            "simulated": ratios(simulated_s, one, other).mean(),
        }  # fmt: skip
    policies = {
        name: {
            "measured_step_s": np.median(measured_s[:, steps], axis=0).mean(),
            "measured_idle_frac": np.median(idle_frac[:, steps], axis=0).mean(axis=0).tolist(),
            "simulator_error_frac": np.median(np.abs(simulated_s / np.median(measured_s, axis=0) - 1)[:, steps]),
        }
        for name, steps in steps_of.items()
    }
    sizes = {"num_batches": len(job.batches), "num_rounds": job.num_rounds}
    return {"name": case.name, **sizes, "policies": policies, "ratios": found}


def _idle_frac(ranks: Sequence[StepObservation]) -> list[float]:
    """Of the pipeline, or of the slower replica's forward and backward, per process."""
    pipeline_s = max(o.step_s - o.reduce_s - o.optimizer_s for o in ranks)
    return [1 - o.busy_s / pipeline_s for o in ranks]


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`packing`: the ratio, idle time, and what other policies do."""
    cases = content["cases"]
    head = ("step time, arrival order / dflop", "measured", "simulated beforehand", "idle by process")
    rows = []
    for case in cases:
        r, policies = case["ratios"]["arrival / balanced"], case["policies"]
        shares = (policies[name]["measured_idle_frac"] for name in ("arrival", "balanced"))
        idle = " -> ".join("/".join(f"{100 * f:.0f}" for f in of) + " %" for of in shares)
        rows.append((case["name"], f"{ratio(r['measured'])} ±{r['measured_sd']:.2f}", ratio(r["simulated"]), idle))
    others = []
    for policy, name in (("token_lpt", "LPT on tokens"), ("bottleneck", "balance of all modules alone")):
        of = [c["ratios"][f"arrival / {policy}"]["measured"] for c in cases if policy in c["policies"]]
        others += [f"{name} {span(of)}x"] if of else []
    return {
        "packing": f"{table(head, rows)}\n\n± is the standard deviation over {cases[0]['num_batches']} global batches; "
        f"samples are {content['data']['rows']}, scaled down to a tiny model. Data-blind over other policies: "
        f"{'; '.join(others)}."
    }  # fmt: skip


if __name__ == "__main__":
    main()
