"""Whether real steps take as long as the simulator says: `python -m tests.bench.simulate [--json FILE]`.

Small models are profiled, plans of two processes are scheduled with the costs that come out, and the steps are trained
by the engine over gloo, a core for each process. Predicted and measured are the whole step: pipeline, gradient
synchronisation, optimizer. Steps run in rounds, the first one uncounted; measured is the median over rounds, the error
of a case the median over its global batches, noise half the range over the rounds. Plans of four processes on two cores
follow, without a bound.

A line says, predicted beside measured: step, error, noise, share of the pipeline that is idle, what an error is made of
(`compute`, predicted over measured CPU seconds of forward and backward: the cost model; `cpu`, the share of their wall
seconds on a core: other processes; `replay`, the pipeline simulated with the measured seconds over the measured one:
the simulator), and the `tail` behind the pipeline. A reference probe says whether the machine was as fast in training
as when it was profiled.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.simulate.cases import CASES, CROWDED_CASES, MODELS, Case, family_of
from tests.bench.simulate.compare import NUM_CORES, Outcome, Predictor
from tests.bench.simulate.measure import profile, train

BOUND_FRAC = 0.10


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--budget", type=float, default=90.0, help="seconds of profiling")
    parser.add_argument("--batches", type=int, default=4, help="global batches per case")
    parser.add_argument("--rounds", type=int, default=3, help="how often each of them counts")
    parser.add_argument("--case", type=int, nargs="*", help="only these cases of two processes, none of four")
    args = parser.parse_args()
    become_a_job("tests.bench.simulate")
    keep_to(NUM_CORES)
    started = time.perf_counter()
    profiled = in_ranks(profile, NUM_CORES, _shapes(), args.budget, 5)
    predictor = Predictor(profiled)
    profiled_s = [statistics.median(p.reference_s) for p in profiled]
    cases = CASES if args.case is None else [CASES[i] for i in args.case]
    outcomes = run_cases(predictor, cases, args.batches, args.rounds, profiled_s)
    error_frac = statistics.median(o.error_frac for o in outcomes)
    is_met = error_frac <= BOUND_FRAC
    verdict = f"bound {BOUND_FRAC:.0%}   {'ok' if is_met else 'MISSED'}"
    print(f"median error of {len(outcomes)} cases: {error_frac:.1%}   {verdict}")
    if args.case is None:
        crowded = run_cases(predictor, CROWDED_CASES, args.batches, args.rounds, profiled_s)
        print(f"four processes on two cores: median error {statistics.median(o.error_frac for o in crowded):.1%}")
        outcomes += crowded
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    content = {"median_error_frac": error_frac, "figures": [asdict(o) for o in outcomes]}
    conclude(content, [("median error", is_met)], args.json, "torch", "transformers")


def run_cases(
    predictor: Predictor, cases: Sequence[Case], num_batches: int, num_rounds: int, profiled_s: Sequence[float]
) -> list[Outcome]:
    """Schedule, train and compare cases of the same number of processes; `profiled_s` are the reference's seconds."""
    outcomes, seconds = [], []
    for case in cases:
        # In processes of its own: ten models side by side in one heap are slower than one, and nobody trains ten.
        run = predictor.schedule(case, num_batches)
        trained = in_ranks(train, case.plan.num_processes, [run], 1 + num_rounds)
        seconds += [s for t in trained for s in t.reference_s]
        by_rank = [[of_round[0] for of_round in t.rounds[1:]] for t in trained]
        steps = [list(zip(*of_round, strict=True)) for of_round in zip(*by_rank, strict=True)]
        outcomes.append(predictor.compare(run, steps))
        print(outcomes[-1].line(), flush=True)
    speed = statistics.mean(profiled_s) / statistics.mean(seconds)
    print(f"reference probe: {speed:.2f} times as fast in training as in profiling", flush=True)
    return outcomes


def _shapes() -> dict[str, list[Any]]:
    """Samples to profile each model with: as in its cases, but others."""
    every = [*CASES, *CROWDED_CASES]
    return {
        model: [s for data in dict.fromkeys(c.data for c in every if c.model == model)
                for s in data.shapes(family_of(model), 100, seed=0)]
        for model in MODELS
    }  # fmt: skip


if __name__ == "__main__":
    main()
