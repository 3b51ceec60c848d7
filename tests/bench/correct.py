"""What correcting predictions is worth: `python -m tests.bench.correct [--seeds N] [--json FILE]`.

Regret of every way of correcting under truths that are known; all times are simulated. Every contender plans each
global batch with what it learnt from the steps before, under its own plans. A plan's cost is its slowest slot under the
truth; regret is what that exceeds the plan of an oracle by, who knows the truth.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from dflop.cost.model import Floats
from dflop.records import LLM
from dflop.schedule.items import Ints
from tests.bench.command import options
from tests.bench.correct_ways import (
    MODULES,
    NUM_RANKS,
    VISION,
    Batch,
    BucketAverage,
    Estimated,
    ModuleAverage,
    Uncorrected,
    World,
    balanced,
    height_s,
    slot_loads,
)  # fmt: skip
from tests.bench.figures import conclude
from tests.bench.markdown import span, table
from tests.correct.times import StageTime

NUM_STEPS, NOISES = 120, (0.05, 0.15)
EARLY, LAST = slice(5, 21), slice(-40, None)
MIN_RECOVERED, MAX_REGRET_WHEN_RIGHT, MAX_ON_WHEN_LEVEL = 0.85, 0.001, 0.1
Bounds = list[tuple[str, bool]]


CONTENDERS = {
    "none": (Uncorrected, "nothing corrected"),
    "module average": (ModuleAverage, "average per module"),
    "bucket average": (BucketAverage, "average per size"),
    "ours": (Estimated, "**dflop**"),
}
"""With how documents call them."""


Change = Callable[[dict[str, Floats], int, int], None]
"""What items really take, relative to the prediction: factors by module and bucket, the step, a seed."""


def _sizes(module: str, buckets: slice, factor: Callable[[int], float]) -> Change:
    """Items of some buckets take so many times as long, by step."""

    def change(factors: dict[str, Floats], step: int, seed: int) -> None:
        factors[module][buckets] = factor(step)

    return change


def _every_size(factors: dict[str, Floats], step: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for m in MODULES:
        factors[m][:] = rng.lognormal(0.0, 0.25, len(factors[m]))


NOTHING, ONE_SIZE = _sizes(LLM, slice(0), lambda step: 1.0), _sizes(LLM, slice(-4, -3), lambda step: 2.0)
DRIFT = _sizes(LLM, slice(-4, None), lambda step: 1.0 + 0.8 * min(step / 100, 1.0))
CASES: Mapping[str, tuple[str, Change, float]] = {
    "right": ("predictions are right", NOTHING, 1.0),
    "one LLM bucket 2x": ("one size of the LLM 2x", ONE_SIZE, 1.0),
    "encoder top buckets 2x": (
        "the encoder's largest sizes 2x", _sizes(VISION, slice(-3, None), lambda step: 2.0), 1.0
    ),
    "LLM 1.5x": ("all of the LLM 1.5x", _sizes(LLM, slice(None), lambda step: 1.5), 1.0),
    "drift to 1.8x": ("one size drifts to 1.8x", DRIFT, 1.0),
    "sudden 1.6x": (
        "1.6x from step 60 on", _sizes(LLM, slice(-4, None), lambda step: 1.6 if step >= 60 else 1.0), 1.0
    ),
    "all buckets lognormal .25": ("every size off, lognormal 0.25", _every_size, 1.0),
    "slow rank 1.5x": ("one rank of four 1.5x", NOTHING, 1.5),
    "bucket 2x and slow rank 1.5x": ("one size 2x and one rank 1.5x", ONE_SIZE, 1.5),
}  # fmt: skip
"""(in documents, what is wrong, slowness of one rank)."""
COSTLY = ("one LLM bucket 2x", "encoder top buckets 2x", "slow rank 1.5x", "bucket 2x and slow rank 1.5x")
"""Where a misprediction costs much from the first step on."""
RECOVERED = (*COSTLY, "LLM 1.5x", "all buckets lognormal .25")
LEVEL = ("right", "LLM 1.5x")
"""Where no size strays from its module, so that factors by size are of no use."""


def simulate(case: str, noise_frac: float, seed: int) -> Iterator[dict[str, Any]]:
    """All contenders in one case, on the same batches: early and last regret, and how often sizes have factors."""
    world, (_, change, slow_rank) = World(seed), CASES[case]
    slowness = np.array([1.0, slow_rank, *[1.0] * (NUM_RANKS - 2)])
    contenders = {name: make(world) for name, (make, _) in CONTENDERS.items()}
    noise = {name: np.random.default_rng((seed, number)) for number, name in enumerate(CONTENDERS)}
    regret: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    num_on = dict.fromkeys(CONTENDERS, 0)
    for step in range(NUM_STEPS):
        batch, factors = world.batch(step), {m: np.ones(len(e) + 1) for m, e in world.edges.items()}
        change(factors, step, seed)
        weights_s = batch.weights_s(factors)
        best_s = height_s(weights_s, balanced(weights_s, slowness), slowness)
        for name, contender in contenders.items():
            slot = contender.plan(batch)
            loads = slot_loads(weights_s, slot, slowness)
            regret[name].append(float(loads.max()) / best_s - 1)
            num_on[name] += contender.is_on
            loads *= np.maximum(noise[name].normal(1.0, noise_frac, loads.shape), 0.1)
            contender.learn(list(_seen(batch, loads, slot, {m: len(of) for m, of in factors.items()})))
    for name in CONTENDERS:
        yield {
            "case": case, "noise_frac": noise_frac, "contender": name, "seed": seed,
            "early_regret": float(np.mean(regret[name][EARLY])), "last_regret": float(np.mean(regret[name][LAST])),
            "on_frac": num_on[name] / NUM_STEPS,
        }  # fmt: skip


def _seen(batch: Batch, loads: Floats, slot: Ints, num_buckets: Mapping[str, int]) -> Iterator[tuple[int, StageTime]]:
    """What ranks see of a step: the encoder on one rank, the LLM on `NUM_RANKS`."""
    for column, module in enumerate(MODULES):
        expected_s = batch.expected_s(module, slot, num_buckets[module])
        for b in np.flatnonzero(expected_s.sum(axis=1)).tolist():
            node = (module, 0, 0 if module == VISION else b % NUM_RANKS)
            yield b, StageTime(node, float(loads[b, column]), {module: expected_s[b]})


def synthetic(seeds: range) -> tuple[dict[str, Any], Bounds]:
    """Figures, and targets of dflop's estimator with whether each is met."""
    cells, runs, bounds = list(itertools.product(CASES, NOISES)), [], []
    print("regret against an oracle, steps 5-20 / last 40, %")
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (case, noise_frac), of in zip(cells, pool.map(_cell, cells, itertools.repeat(seeds)), strict=True):
            runs += of
            parts = (f"{name} {_regret(of, case, name, noise_frac)}" for name in CONTENDERS)
            print(f"{case:28s} {noise_frac:4.0%}  |  {'  |  '.join(parts)}", flush=True)
            bounds += _targets(of, case, noise_frac)
    return {"simulated": True, "seeds": list(seeds), "num_steps": NUM_STEPS, "runs": runs}, bounds


def _cell(cell: tuple[str, float], seeds: range) -> list[dict[str, Any]]:
    return [run for seed in seeds for run in simulate(*cell, seed)]


def _targets(runs: Sequence[Mapping[str, Any]], case: str, noise_frac: float) -> Iterator[tuple[str, bool]]:
    ours, name = [r for r in runs if r["contender"] == "ours"], f"{case}, noise {noise_frac:.0%}"
    if case == "right":
        worst = max(max(r["early_regret"], r["last_regret"]) for r in ours)
        yield f"{name}: regret {worst:.2%}", worst <= MAX_REGRET_WHEN_RIGHT
    if case in LEVEL:
        on_frac = max(r["on_frac"] for r in ours)
        yield f"{name}: factors by size in {on_frac:.1%} of steps", on_frac <= MAX_ON_WHEN_LEVEL
    if case in RECOVERED and noise_frac == min(NOISES):
        share = _recovered(runs, case, noise_frac)
        yield f"{name}: {share:.0%} recovered", share >= MIN_RECOVERED


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    found, bounds = synthetic(range(args.seeds))
    conclude({"synthetic": found}, bounds, args.json, "numba")


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`correct`: regret of every way of correcting; `correct-short`: how much of it is recovered."""
    found = content["synthetic"]
    runs = found["runs"]
    little, much = (f(run["noise_frac"] for run in runs) for f in (min, max))
    rows = [
        (told, *(_regret(runs, case, name, little) for name in CONTENDERS), _regret(runs, case, "ours", much))
        for case, (told, _, _) in CASES.items()
    ]
    head = ("truth", *(told for _, told in CONTENDERS.values()), f"dflop, {100 * much:.0f} % noise")
    shares = [100 * _recovered(runs, case, little) for case in COSTLY]
    return {
        "correct": table(head, rows),
        "correct-short": f"**Simulated**, {100 * little:.0f} % noise, {len(found['seeds'])} seeds: of what a "
        f"misprediction of sizes or ranks costs, {span(shares, '.0f')} % is recovered in steps 5 to 20; where "
        f"predictions are right, {_regret(runs, 'right', 'ours', little)} % of a step is lost (in "
        f"steps 5 to 20 / in the last 40 of {found['num_steps']}).",
    }  # fmt: skip


def _mean(runs: Sequence[Mapping[str, Any]], case: str, contender: str, noise_frac: float, what: str) -> float:
    wanted = (case, contender, noise_frac)
    return float(np.mean([r[what] for r in runs if (r["case"], r["contender"], r["noise_frac"]) == wanted]))


def _regret(runs: Sequence[Mapping[str, Any]], case: str, contender: str, noise_frac: float) -> str:
    both = (100 * _mean(runs, case, contender, noise_frac, what) for what in ("early_regret", "last_regret"))
    return " / ".join("0" if value < 0.005 else f"{value:.2f}" if value < 1 else f"{value:.1f}" for value in both)


def _recovered(runs: Sequence[Mapping[str, Any]], case: str, noise_frac: float) -> float:
    ours, none = (_mean(runs, case, name, noise_frac, "early_regret") for name in ("ours", "none"))
    return 1 - ours / none


if __name__ == "__main__":
    main()
