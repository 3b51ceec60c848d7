"""How evenly a global batch is dealt out, and how fast: `balance_ranks` beside Karmarkar and Karp's method.

Ranks without pipelines that meet once a step, as under DDP: what counts is the slowest rank over the bound, which is
the mean, or the longest sample where that is longer. Samples are those of the suite's main mixture, seconds those of
Qwen2.5-7B with SigLIP from an A100's data sheet. Karmarkar and Karp's method is the plain Python that trainers have, on
the same seconds and, as trainers do, on tokens alone. Times are processor time, the least of three.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from dflop.compare.contest import Setting
from dflop.cost.model import Floats
from dflop.schedule.data_parallel import balance_ranks
from dflop.schedule.items import Ints, module_items
from dflop.schedule.pack import partition
from dflop.schedule.step_scheduler import warm
from tests.bench.cases import CASES, make_setting
from tests.bench.command import options
from tests.bench.figures import conclude
from tests.bench.markdown import ratio, table
from tests.bench.mixtures import MAIN

SIZES = ((256, 8), (1024, 64), (2048, 256), (8192, 256))
NUM_BATCHES, NUM_TRIALS, UNCAPPED = 4, 3, 1 << 40
MAX_BEYOND_FRAC, UNITS = 0.001, 1e9
"""What `balance_ranks` may be beyond the bound, on average; seconds as whole numbers for the other method."""
WAYS = ("dflop", "Karmarkar-Karp on the same seconds", "Karmarkar-Karp on tokens")
Found = TypeVar("Found")


def seconds_and_tokens(setting: Setting, batch: Any) -> tuple[Floats, Ints]:
    """`[samples]` each: predicted seconds in all modules, and tokens in the LLM."""
    problem, total_s = setting.problem, np.zeros(len(batch))
    tokens = np.zeros(len(batch), dtype=np.int64)
    for spec in problem.specs:
        items = module_items(batch, spec.module)
        each_s = problem.cost.item_seconds(spec.module, items.loads, num_layers=spec.num_layers, edge=True)
        total_s += np.bincount(items.sample_of, each_s, len(batch))
        tokens = np.bincount(items.sample_of, items.num_tokens, len(batch)).astype(np.int64)  # the LLM comes last
    return total_s, tokens


def measured(num_samples: int, num_ranks: int) -> dict[str, Any]:
    """By way: (slowest rank over the bound, seconds), means over batches."""
    setting = make_setting(CASES[0], MAIN, global_batch_size=num_samples, num_unseen=NUM_BATCHES)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for batch in setting.unseen:
        seconds_s, tokens = seconds_and_tokens(setting, batch)
        bound_s = max(float(seconds_s.sum()) / num_ranks, float(seconds_s.max()))
        units = np.rint(seconds_s * UNITS).astype(np.int64)
        ways: Mapping[str, Callable[[], Ints]] = dict(zip(WAYS, (
            lambda s=seconds_s, t=tokens: balance_ranks(s, t, num_ranks, cap_tokens=UNCAPPED, num_microbatches=1).rank,
            lambda u=units: partition(u, num_ranks),
            lambda t=tokens: partition(t, num_ranks),
        ), strict=True))  # fmt: skip
        for way, deal in ways.items():
            rank, took_s = _least(deal)
            found[way].append((float(np.bincount(rank, seconds_s).max()) / bound_s, took_s))
    means = {way: np.mean(pairs, axis=0).tolist() for way, pairs in found.items()}
    return {"num_samples": num_samples, "num_ranks": num_ranks, "ways": means}


def _least(of: Callable[[], Found]) -> tuple[Found, float]:
    least_s = float("inf")
    for _ in range(NUM_TRIALS):
        begun = time.process_time()
        found = of()
        least_s = min(least_s, time.process_time() - begun)
    return found, least_s


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`balance`: a row per size of batch."""
    rows = []
    for size in content["sizes"]:
        ours_s = size["ways"][WAYS[0]][1]
        cells = [f"{size['num_samples']:,} on {size['num_ranks']}"]
        for way in WAYS:
            over, took_s = size["ways"][way]
            more = "" if way == WAYS[0] else f" ({ratio(took_s / ours_s)})"
            cells.append(f"{over:.4f}, {1000 * took_s:.1f} ms{more}")
        rows.append(cells)
    return {"balance": table(("samples on ranks", *WAYS), rows)}


def main() -> None:
    args = options(__doc__).parse_args()
    warm()
    content = {"sizes": [measured(*size) for size in SIZES]}
    print(tables(content)["balance"])
    bounds = []
    for size in content["sizes"]:
        name = f"{size['num_samples']} samples on {size['num_ranks']} ranks: beyond the bound"
        bounds.append((name, size["ways"][WAYS[0]][0] - 1 <= MAX_BEYOND_FRAC))
    conclude(content, bounds, args.json, "numba")


if __name__ == "__main__":
    main()
