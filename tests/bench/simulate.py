"""Whether real steps take as long as the simulator says: `python -m tests.bench.simulate [--json FILE]`.

Small models are profiled, plans of two processes are scheduled with the costs that come out, and the engine trains the
steps over gloo, a core for each process. Predicted and measured are the whole step: pipeline, gradient synchronisation,
optimizer. Steps run in rounds, the first one uncounted; measured is the median over rounds, the error of a case the
median over its global batches, noise half the range over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dflop.cost.model import CostModel
from dflop.plan.space import Problem
from dflop.plan.sync import plan_sync_s
from dflop.records import LLM, ClusterSpec, Plan, SampleShape, StepPlan
from dflop.schedule.scheduler import schedule_step
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.profile import Data
from tests.bench.simulate_ranks import EngineRank, costs_of, family_of, take_core
from tests.train.synthetic import make_plan

BOUND_FRAC, NUM_CORES, BATCH_SIZE = 0.10, 2, 12
MAX_SAMPLES = 6


@dataclass(frozen=True)
class Case:
    """One plan with its data."""

    name: str
    model: str
    data: Data
    layout: Mapping[str, tuple[int, int]]
    """(pp, dp) per module; processes in this order."""
    num_microbatches: int
    policy: str

    @property
    def plan(self) -> Plan:
        return make_plan(dict(self.layout), num_microbatches=self.num_microbatches, of=family_of(self.model))

    def batches(self, count: int) -> list[list[SampleShape]]:
        shapes = self.data.shapes(family_of(self.model), count * BATCH_SIZE, seed=11)
        return [shapes[i * BATCH_SIZE : (i + 1) * BATCH_SIZE] for i in range(count)]


PHOTOS, TEXT = Data(("image",), (0, 1, 1, 2)), Data((), text_tokens=280.0)
CLIPS = Data(("image", "video"), (1, 2), side_px=220.0, text_tokens=40.0)
TEXT_AND_SOME_PHOTOS = Data(("image",), (0, 0, 1), text_tokens=260.0)
VISION_LLM = {"vision": (1, 1), LLM: (1, 1)}
LLM_PP2, LLM_DP2 = {LLM: (2, 1)}, {LLM: (1, 2)}
CASES = (
    Case("vision | llm, images", "omni", PHOTOS, VISION_LLM, 4, "arrival"),
    Case("vision | llm, images", "omni", PHOTOS, VISION_LLM, 4, "balanced"),
    Case("vision | llm, much video", "omni", CLIPS, VISION_LLM, 6, "balanced"),
    Case("vision | llm, long text", "omni", TEXT_AND_SOME_PHOTOS, VISION_LLM, 2, "balanced"),
    Case("audio | llm, speech", "omni", Data(("audio",), (1, 1, 2)), {"audio": (1, 1), LLM: (1, 1)}, 6, "arrival"),
    Case("llm pp 2, text", "omni", TEXT, LLM_PP2, 4, "arrival"),
    Case("llm pp 2, text", "omni", TEXT, LLM_PP2, 12, "balanced"),
    Case("llm dp 2, text", "omni", TEXT, LLM_DP2, 3, "balanced"),
    Case("vision | llm, tiles", "llava", PHOTOS, VISION_LLM, 4, "arrival"),
    Case("llm pp 2, text", "llava", TEXT, LLM_PP2, 6, "balanced"),
)
"""Two processes, a core each."""


@dataclass(frozen=True)
class Outcome:
    """One case, predicted and measured; seconds are means over its global batches."""

    name: str
    predicted_step_s: float
    measured_step_s: float
    error_frac: float
    noise_frac: float
    """Half the range over the rounds, relative; median over the batches."""

    def line(self) -> str:
        return (
            f"{self.name:57s} {1e3 * self.predicted_step_s:5.0f} {1e3 * self.measured_step_s:5.0f} ms"
            f"  {self.error_frac:5.1%}  {self.noise_frac:5.1%}"
        )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of profiling")
    parser.add_argument("--batches", type=int, default=4, help="global batches per case")
    parser.add_argument("--rounds", type=int, default=3, help="how often each of them counts")
    parser.add_argument("--case", type=int, nargs="*", help="only these cases")
    args = parser.parse_args()
    become_a_job("tests.bench.simulate")
    keep_to(NUM_CORES)
    costs = costs_of(shapes_to_profile(), args.budget, MAX_SAMPLES)
    cases = CASES if args.case is None else [CASES[i] for i in args.case]
    outcomes = [run_case(case, costs[case.model], args.batches, args.rounds) for case in cases]
    error_frac = statistics.median(o.error_frac for o in outcomes)
    is_met = error_frac <= BOUND_FRAC
    verdict = f"bound {BOUND_FRAC:.0%}   {'ok' if is_met else 'MISSED'}"
    print(f"median error of {len(outcomes)} cases: {error_frac:.1%}   {verdict}")
    content = {"median_error_frac": error_frac, "figures": [asdict(o) for o in outcomes]}
    conclude(content, [("median error", is_met)], args.json, "torch", "transformers")


def shapes_to_profile() -> dict[str, list[SampleShape]]:
    """Per model samples of the same kinds as in its cases, but others."""
    found: dict[str, list[SampleShape]] = {}
    for model in dict.fromkeys(c.model for c in CASES):
        kinds = dict.fromkeys(c.data for c in CASES if c.model == model)
        found[model] = [shape for data in kinds for shape in data.shapes(family_of(model), 100, seed=0)]
    return found


def run_case(case: Case, cost: CostModel, num_batches: int, num_rounds: int) -> Outcome:
    """Schedules, trains and compares; in processes of the case's, for nobody trains ten models in one."""
    plan, batches = case.plan, case.batches(num_batches)
    step_plans = tuple(
        schedule_step(run_id="bench", step=step, plan=plan, batch=batch, cost=cost, policy=case.policy)
        for step, batch in enumerate(batches)
    )
    by_rank = in_ranks(train, plan.num_processes, case.model, plan, step_plans, batches, 1 + num_rounds)
    predicted_s = np.array([p.predicted_step_s for p in step_plans]) + sync_s(case, cost)
    measured_s = np.max(by_rank, axis=0)[1:]  # [round, batch]
    median_s = np.median(measured_s, axis=0)
    outcome = Outcome(
        name=f"{case.model}, {case.name}, {plan.num_microbatches} microbatches, {case.policy}",
        predicted_step_s=float(predicted_s.mean()),
        measured_step_s=float(median_s.mean()),
        error_frac=float(np.median(np.abs(predicted_s / median_s - 1))),
        noise_frac=float(np.median(np.ptp(measured_s, axis=0) / 2 / median_s)),
    )
    print(outcome.line(), flush=True)
    return outcome


def train(
    rank: int, folder: Path, model: str, plan: Plan, step_plans: Sequence[StepPlan],
    batches: Sequence[Sequence[SampleShape]], num_rounds: int,
) -> list[list[float]]:  # fmt: skip
    """`[round][step]` seconds of one rank: all steps, again in every round, so that a slow minute hits all of them."""
    take_core(rank)
    engine = EngineRank(rank, model, plan, step_plans, batches)
    return [[seen.step_s for seen in engine.first_steps(None)] for _ in range(num_rounds)]


def sync_s(case: Case, cost: CostModel) -> float:
    """Predicted seconds after the pipeline."""
    modules = case.plan.modules
    specs = tuple(s for s in family_of(case.model).specs() if s.module in {m.module for m in modules})
    cluster = ClusterSpec("bench", "local", 1, case.plan.num_processes, 1 << 30, "cpu", NUM_CORES)
    problem = Problem("bench", specs, cluster, cost, tuple(case.batches(1)), BATCH_SIZE, snapshot_seq=0)
    return plan_sync_s(problem, modules)


if __name__ == "__main__":
    main()
