"""A rank that is really slow: `python -m tests.bench.correct --part slow_rank`. Everything is measured on this machine.

Two replicas of a profiled tiny model, a core each. From a step on one of them takes longer for everything: in one case
because it computes more (a slow clock), in another because it is stopped for a share of the time (a throttled or
crowded machine), which its own CPU clock does not see. One job has corrections off, one has them on `auto`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflop.jobs.rundir import RunDir
from dflop.records import LLM, Correction, Decision, RankFactor, StepPlan
from dflop.store.spool import read_spool
from tests.bench.correct import real_runs
from tests.bench.correct.real import configured, is_seen
from tests.bench.correct.real_runs import NUM_RANKS, Found, observations, slowest_s, step_s

NUM_STEPS, SLOW_FROM, LAST = 60, 15, 15
FIRST_PAIRED = 25
"""By then the rank is to have less."""
SLOW_RANK = 1
CASES = {"computes 1.6x": f"rank:{SLOW_RANK}:1.6:{SLOW_FROM}", "stopped 40 %": f"stopped:{SLOW_RANK}:0.4:{SLOW_FROM}"}
SETTINGS = {"off": "correct.enabled=false", "auto": "correct.gate=auto"}


def main(sizes: Path | None, seeds: Sequence[int]) -> Found:
    """Every seed orders the same samples otherwise."""
    return real_runs.in_a_process_of_its_own(__name__, seeds)


def run(seeds: Sequence[int]) -> dict[str, Any]:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        profiled = real_runs.profiled_run(Path(folder), is_seen, f"train.num_steps={NUM_STEPS}")
        rows = []
        for case, slowness in CASES.items():
            for seed in seeds:
                jobs = {}
                for arm, setting in SETTINGS.items():
                    to = Path(folder) / f"{slowness.split(':')[0]}-{seed}-{arm}"
                    of = configured(profiled, to, f"train.seed={seed}", setting)
                    real_runs.train(of, "tests.jobs.slowed", str(of.path), slowness)
                    jobs[arm] = observations(of)
                    rows.append({"case": case, "seed": seed, "corrections": arm, **_figures(of)})
                    _tell(rows[-1])
                rows[-1]["off_over_auto"] = paired(jobs["off"], jobs["auto"])
                print(f"    off / auto, step by step: {rows[-1]['off_over_auto']}", flush=True)
        return {"slow_rank": SLOW_RANK, "slow_from_step": SLOW_FROM, "num_steps": NUM_STEPS, "jobs": rows}


def paired(off: Mapping[tuple[int, int], Any], auto: Mapping[tuple[int, int], Any]) -> dict[str, dict[str, float]]:
    """What step times of the same batches have to do with one another, once the slow rank has been named."""
    found = {}
    for name, seconds in (("wall", step_s), ("cpu_of_slowest_rank", slowest_s)):
        logs = [math.log(seconds(off, step) / seconds(auto, step)) for step in range(FIRST_PAIRED, NUM_STEPS)]
        mean, stderr = statistics.mean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
        found[name] = {"mean": math.exp(mean), "stderr_frac": stderr, "num_steps": len(logs)}
    return found


def _figures(run: RunDir) -> dict[str, Any]:
    seen, store = observations(run), run.config().store
    parts = {"before": range(4, SLOW_FROM), "at_first": range(SLOW_FROM, SLOW_FROM + 4)}
    parts["at_last"] = range(NUM_STEPS - LAST, NUM_STEPS)
    named = [d for d in read_spool(store, Decision) if d.kind == "slow_rank"]
    factors = sorted(read_spool(store, RankFactor), key=lambda f: f.observed_at_s)
    newest = {f.rank: {"factor": f.factor, "sd_frac": f.sd_frac, "is_in_force": f.is_in_force} for f in factors}
    return {
        "step_s": {name: statistics.median(step_s(seen, step) for step in steps) for name, steps in parts.items()},
        "token_share_of_slow_rank": {name: _token_share(run, steps) for name, steps in parts.items()},
        "named": [{"step": d.step, "subject": d.subject, "verdict": d.verdict, "detail": d.detail} for d in named],
        "rank_factors": newest,
        "most_a_size_in_force_strays": _most_stray(list(read_spool(store, Correction))),
        "cost_drifts": [d.detail for d in read_spool(store, Decision) if d.kind == "drift_cost"],
    }


def _token_share(run: RunDir, steps: range) -> float:
    """Of the LLM's tokens, what the slow rank gets."""
    tokens, shares = {s.sample_index: s.num_llm_tokens for s in run.shapes()}, []
    for plan in read_spool(run.config().store, StepPlan):
        work = plan.of(LLM)
        of = [
            sum(tokens[plan.sample_index[work.item_sample[i]]] for slot in work.owner for i in slot[rank])
            for rank in range(NUM_RANKS)
        ]
        if plan.step in steps:
            shares.append(of[SLOW_RANK] / sum(of))
    return statistics.mean(shares)


def _most_stray(corrections: Sequence[Correction]) -> float:
    """Of all factors by size that plans were made with, the largest distance from the module's level."""
    return max((abs(c.factor / c.level - 1) for c in corrections if c.is_in_force), default=0.0)


def _tell(row: dict[str, Any]) -> None:
    steps = " -> ".join(f"{s:.3f} s" for s in row["step_s"].values())
    shares = " -> ".join(f"{s:.0%}" for s in row["token_share_of_slow_rank"].values())
    named = "; ".join(f"step {d['step']}: {d['detail']}" for d in row["named"]) or "nobody named"
    print(f"{row['case']}, seed {row['seed']}, {row['corrections']}: step {steps}, its tokens {shares}; {named}")
    print(f"    factors {row['rank_factors']}, sizes stray {row['most_a_size_in_force_strays']:.1%}", flush=True)


if __name__ == "__main__":
    Path(sys.argv[-1]).write_text(json.dumps(run([int(seed) for seed in sys.argv[1:-1]])))
