"""Real steps of the same global batches under several policies: `python -m tests.bench.schedule.real [--sizes TABLE]`.

Two processes of our engine, a core each, gloo between them. `encoder | llm`: an encoder on one and a language model on
the other. `2 replicas`: the whole model on each, gradients summed once per step. A tiny model is profiled, a few steps
correct the costs that come out, and these schedule what is compared. A global batch is trained under every policy
in turn, in rounds, behind a few uncounted steps; every configuration has processes of its own.

arrival: samples counted into microbatches in their order. bottleneck: all modules balanced, certified. token_lpt: LLM
tokens balanced, longest first. balanced: the search on the simulator, what runs by default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dflop.cost.links import fit_link_costs
from dflop.jobs.talk import say
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.schedule.real_cases import CASES, ENCODER_LAYERS, NUM_CORES, QUICK_CASES, Case, family_of
from tests.bench.schedule.real_compare import Outcome, compare
from tests.bench.schedule.real_costs import Costs
from tests.bench.schedule.real_data import GROUP_SHARES, MAX_TEXT_TOKENS, S_PER_FRAME, SIDE_FRAC, Rows
from tests.bench.schedule.real_ranks import Job, profile, train

NUM_FULL_SEEDS = 5
"""With fewer seeds, which is fewer global batches, there are fewer configurations, too."""
MAX_GRADIENT_ERROR = 1e-5
PROFILE_SEED, CORRECTION_SEED, NUM_CORRECTION_STEPS = 1 << 20, 1 << 21, 10
KINDS = {
    "measured": "wall seconds of real training steps on this machine",
    "simulated": "simulator on cost tables profiled on this machine, corrected from training steps on other samples; "
    "what the steps were scheduled with, nothing of the steps themselves",
    "profiled": "as simulated, without the corrections",
    "replayed": "simulator on the wall seconds each microbatch of a measured step took",
    "replayed_cpu": "simulator on the thread CPU seconds each microbatch of a measured step took",
}


def main(sizes: Path | None, seeds: Sequence[int], json_path: Path | None) -> None:
    """Every configuration, a global batch per seed."""
    become_a_job("tests.bench.schedule", OMP_NUM_THREADS="1")
    run(sizes, seeds, json_path, ())


def run(sizes: Path | None, seeds: Sequence[int], json_path: Path | None, cases: Sequence[Case]) -> None:
    """What `main` does, in this process."""
    keep_to(NUM_CORES)
    started, is_full = time.perf_counter(), len(seeds) >= NUM_FULL_SEEDS
    rows = Rows(sizes, family_of("equal"))
    cases = cases or (CASES if is_full else QUICK_CASES)
    costs = _profiled(rows, budget_s=45.0 if is_full else 20.0)
    costs = {model: _corrected(model, costs[model], rows) for model in dict.fromkeys(c.model for c in cases)}
    num_rounds, outcomes, gradient_errors = 3 if is_full else 2, [], {}
    for case in cases:
        outcome, error = _run_case(case, costs[case.model], rows, seeds, num_rounds)
        outcomes.append(outcome)
        print("\n".join(_lines(outcome)), flush=True)
        if error is not None:
            gradient_errors[case.name] = error
            print(f"    gradients of one global batch under two policies differ by {error:.1e} of the largest")
        say(f"{time.perf_counter() - started:.0f} s")
    print("\n".join(["", *table(outcomes)]), flush=True)
    content = {
        "data": {
            "rows": "drawn from a table of real sizes" if sizes else "generated",
            "max_text_tokens": MAX_TEXT_TOKENS,
            "side_frac": SIDE_FRAC,
            "s_per_frame": S_PER_FRAME,
            "group_shares": GROUP_SHARES,
        },
        "costs": {model: c.figures() for model, c in costs.items()},
        "kinds_of_figures": KINDS,
        "gradient_errors": gradient_errors,
        "cases": [{"name": o.case.name} | asdict(o) for o in outcomes],
    }
    bounds = [(f"gradients of {name}", error <= MAX_GRADIENT_ERROR) for name, error in gradient_errors.items()]
    conclude(content, bounds, json_path, "torch", "transformers", "numba")


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """All ratios, a line each, and what they mean."""
    first = outcomes[0]
    lines = [
        f"Step time under one policy / under another, {first.num_batches} global batches of each configuration, "
        f"{first.num_rounds} counted rounds; above 1 the second one is faster.",
        "measured: real steps, ± over batches.  simulated: beforehand, from profiled and corrected costs.  "
        "replayed: simulated from the steps' own seconds.",
        "idle: measured share of the step's pipeline that each process waits, under the first -> under the second.",
        f"{'configuration':63s} {'policies':22s} {'measured':>12s} {'simulated':>9s} {'replayed':>8s} {'idle, %':>14s}",
    ]
    for outcome in outcomes:
        for i, (name, r) in enumerate(outcome.ratios.items()):
            measured = f"{r.measured:.3f} ±{r.measured_sd:.3f}"
            told = "" if i else outcome.case.name + " *" * outcome.is_disturbed
            idle = " -> ".join(_percents(outcome.policies[p].measured_idle_frac) for p in name.split(" / "))
            lines.append(f"{told:63s} {name:22s} {measured:>12s} {r.simulated:9.3f} {r.replayed:8.3f} {idle:>14s}")
    if any(outcome.is_disturbed for outcome in outcomes):
        lines.append(
            "* disturbed: other processes took the cores for more than 5 % of the time in forward and backward."
        )
    return lines


def _percents(shares: Sequence[float]) -> str:
    return "/".join(f"{100 * share:.0f}" for share in shares)


def _lines(o: Outcome) -> list[str]:
    """One configuration in detail."""
    lines = [
        f"{o.case.name}: on a core {o.cpu_frac:.0%} of the time, predicted / measured compute "
        f"{', '.join(f'{r:.2f}' for r in o.compute_ratio.values())}, replayed / measured step {o.replay_ratio:.3f}"
        + ("" if o.encoder_frac is None else f", encoder {o.encoder_frac:.0%} of compute")
    ]
    for policy, p in o.policies.items():
        idle, simulated = _percents(p.measured_idle_frac), _percents(p.simulated_idle_frac)
        kept = f", {p.num_kept_arrival} batches kept in arrival order" if policy == "balanced" else ""
        lines.append(
            f"    {policy:10s} step {p.measured_step_s:.3f} s (simulated {p.simulated_step_s:.3f}), "
            f"idle {idle} % (simulated {simulated} %){kept}"
        )
    for name, r in o.ratios.items():
        lines.append(
            f"    {name:24s} measured {r.measured:.3f} ±{r.measured_sd:.3f} over batches, noise {r.noise_frac:.1%}; "
            f"simulated {r.simulated:.3f} ({r.profiled:.3f} uncorrected), replayed {r.replayed:.3f}, "
            f"from CPU seconds {r.replayed_cpu:.3f}"
        )
    return lines


def _profiled(rows: Rows, budget_s: float) -> dict[str, Costs]:
    """Costs of every model; the samples they are profiled with are others than those of the steps."""
    shapes = {model: rows.batch(200, [PROFILE_SEED]) for model in ENCODER_LAYERS}
    say(f"profiling {', '.join(ENCODER_LAYERS)} for {budget_s:g} s")
    found = in_ranks(profile, NUM_CORES, shapes, budget_s)
    links = fit_link_costs(found[0].links)
    costs = {m: Costs.fitted(m, p.probes, links) for m, p in zip(ENCODER_LAYERS, found, strict=True)}
    for model, c in costs.items():
        for t in c.cost.tables:
            say(f"  {model}, {t.module}: error {t.median_error_frac:.1%}, noise {t.noise_frac:.1%}")
    return costs


def _corrected(model: str, costs: Costs, rows: Rows) -> Costs:
    """Costs after a few steps in arrival order."""
    case = Case(model, "pipeline", 64, 8)
    batches = [rows.batch(64, [CORRECTION_SEED, i], first_index=i * 64) for i in range(NUM_CORRECTION_STEPS)]
    step_plans = costs.schedule(case, batches, ("arrival",))
    job = Job(case, tuple(step_plans), tuple(s for batch in batches for s in batch), num_rounds=1)
    by_rank = [trained.rounds[0] for trained in in_ranks(train, NUM_CORES, job)]
    found = costs.corrected(case, step_plans, batches, list(zip(*by_rank, strict=True)))
    say(f"  {model}, corrections: {', '.join(f'{m} x{f:.2f}' for m, f in found.cost.corrections.items())}")
    return found


def _run_case(
    case: Case, costs: Costs, rows: Rows, seeds: Sequence[int], num_rounds: int
) -> tuple[Outcome, float | None]:
    """The case, and how far gradients under two policies are apart, where two make different microbatches."""
    n = case.num_samples
    batches = [rows.batch(n, [seed, n], first_index=i * n) for i, seed in enumerate(seeds)]
    step_plans = costs.schedule(case, batches, case.policies)
    job = Job(case, tuple(step_plans), tuple(s for batch in batches for s in batch), num_rounds)
    found = in_ranks(train, NUM_CORES, job)
    rounds = [list(zip(*of_round, strict=True)) for of_round in zip(*(t.rounds for t in found), strict=True)]
    errors = [t.gradient_error for t in found if t.gradient_error is not None]
    return compare(case, costs, step_plans, batches, rounds), max(errors, default=None)


def _command_line() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated rows without")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(3), help=f"{NUM_FULL_SEEDS} for the full bench")
    parser.add_argument("--case", type=int, nargs="*", default=(), help="only these of the full bench")
    args = parser.parse_args()
    become_a_job("tests.bench.schedule.real", OMP_NUM_THREADS="1")
    run(args.sizes, args.seeds, args.json, [CASES[i] for i in args.case])


if __name__ == "__main__":
    _command_line()
