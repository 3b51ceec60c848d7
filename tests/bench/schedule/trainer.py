"""Hugging Face's Trainer with two processes, a core each: the sampler's batches beside what a Trainer does by itself.

The same global batches run under every policy in turn, so that whatever else the machine does hits all of them alike:
`random` (the usual RandomSampler: equal counts in the order drawn), `length_grouped` (equal counts by length, within
the global batch), `batch_rebalance` (the Trainer's own sampler of that name, which reckons with padding) and `dflop`.
Samples are concatenated, not padded. Gradients must be the same for all. Wall time includes waiting for a core that
somebody else uses; the ratio of compute is that of the busier rank's CPU time, which does not.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler

from dflop.sampler import BalancedBatchSampler, SampleCosts, sample_costs
from tests.bench.figures import conclude
from tests.bench.schedule.instances import bench_step
from tests.bench.schedule.trainer_rank import collate, make_dataset, make_model

NUM_RANKS, NUM_MICROBATCHES = 2, 2
NUM_BATCHES, NUM_ROUNDS, NUM_WARM_UP_BATCHES = 4, 4, 1
CASES = (("text", 1, 32, 4), ("text", 1, 64, 4), ("multimodal", 2, 32, 32))
"""(name, modules, global batch size, how many times shorter than real the sequences are: two cores are no GPU)."""
Steps = list[list[list[int]]]
"""`[rank][microbatch]` = positions in the dataset."""


def main(sizes: Path | None, seeds: Sequence[int], json_path: Path | None) -> None:
    """Measures every case."""
    torch.set_num_threads(1)
    per_token_s, fixed_s = calibrated()
    print(f"trainer: a microbatch takes {1e3 * fixed_s:.1f} ms and {1e6 * per_token_s:.0f} us per token")
    rows = [measured(*case, seed, sizes, per_token_s, fixed_s) for case in CASES for seed in seeds]
    for row in rows:
        told = "   ".join(
            f"{name} {row['measured_ratio'][name]:.3f}x, compute {row['compute_ratio'][name]:.3f}x, "
            f"predicted {row['predicted_ratio'][name]:.3f}x"
            for name in row["measured_ratio"]
        )
        print(f"{row['case']:26s} random over {told}   gradients differ by {row['gradient_error']:.1e}")
    content = {"real_sizes": sizes is not None, "cases": rows}
    conclude(content, [], json_path, "torch", "transformers", "accelerate")


def measured(
    name: str, modules: int, size: int, shrink: int, seed: int, sizes: Path | None, per_token_s: float, fixed_s: float
) -> dict[str, Any]:
    """Step times of one case under every policy."""
    num_samples = size * (NUM_BATCHES + NUM_WARM_UP_BATCHES)
    texts = bench_step(modules, "mild", num_samples, num_microbatches=1, num_ranks=1, seed=seed, sizes=sizes).batch
    lengths = [max(4, s.num_llm_tokens // shrink) for s in texts]
    supervised = [
        max(1, min(n - 1, s.num_supervised_tokens * n // s.num_llm_tokens)) for s, n in zip(texts, lengths, strict=True)
    ]
    costs = sample_costs(lengths, cost=lambda i: per_token_s * lengths[i], supervised=supervised, fixed=fixed_s)
    policies = deals(costs, size, seed)
    names = list(policies)
    order = [(b, n) for b in range(NUM_WARM_UP_BATCHES) for n in names]
    order += [
        (b, n)
        for turn in range(NUM_ROUNDS)
        for b in range(NUM_WARM_UP_BATCHES, NUM_WARM_UP_BATCHES + NUM_BATCHES)
        for n in names[turn % len(names) :] + names[: turn % len(names)]
    ]
    job = {
        "lengths": lengths, "supervised": supervised, "num_microbatches": NUM_MICROBATCHES, "num_policies": len(names),
        "steps": [policies[n][b] for b, n in order],
    }  # fmt: skip
    ranks = run(job)
    wall = np.array([[s for s, _ in r["steps"]] for r in ranks]).max(axis=0)
    busy = np.array([[s for _, s in r["steps"]] for r in ranks])
    seconds, compute, idle, predicted = {}, {}, {}, {}
    for policy in names:
        at = [k for k, (b, n) in enumerate(order) if n == policy and b >= NUM_WARM_UP_BATCHES]
        seconds[policy] = wall[at].reshape(NUM_ROUNDS, NUM_BATCHES).mean(axis=0)
        compute[policy] = busy[:, at].max(axis=0).reshape(NUM_ROUNDS, NUM_BATCHES).mean(axis=0)
        idle[policy] = float(1 - busy[:, at].mean() / busy[:, at].max(axis=0).mean())
        predicted[policy] = np.array(
            [max(sum(per_token_s * lengths[i] for m in rank for i in m) for rank in step)
             for step in policies[policy][NUM_WARM_UP_BATCHES:]]
        ) + NUM_MICROBATCHES * fixed_s  # fmt: skip
    case = f"{name}, {size} samples, seed {seed}"
    others = [n for n in names if n != "random"]
    print(f"trainer: {case} done", file=sys.stderr)
    return {
        "case": case,
        "step_s": {n: float(seconds[n].mean()) for n in names},
        "measured_ratio": {n: float((seconds["random"] / seconds[n]).mean()) for n in others},
        "measured_ratio_spread": {n: float((seconds["random"] / seconds[n]).std()) for n in others},
        "compute_ratio": {n: float((compute["random"] / compute[n]).mean()) for n in others},
        "predicted_ratio": {n: float((predicted["random"] / predicted[n]).mean()) for n in others},
        "predicted_over_measured": {n: float(predicted[n].mean() / seconds[n].mean()) for n in names},
        "compute_idle_frac": idle,
        "gradient_error": max(r["gradient_error"] for r in ranks),
    }


def deals(costs: SampleCosts, size: int, seed: int) -> dict[str, list[Steps]]:
    """By policy, every global batch of one epoch; the same samples in each."""
    sampler = BalancedBatchSampler(
        costs, size, num_microbatches=NUM_MICROBATCHES, num_replicas=NUM_RANKS, rank=0, seed=seed
    )
    plans = [sampler.planned(step) for step in range(sampler.steps_per_epoch)]
    drawn = [plan.samples for plan in plans]
    in_order = np.concatenate(drawn)
    tokens = costs.tokens[in_order].tolist()
    rebalanced: list[list[list[int]]] = [
        list(
            BatchRebalanceSampler(
                tokens, size, dp_size=NUM_RANKS, grad_accum=NUM_MICROBATCHES, shuffle=False, rank=rank
            )
        )
        for rank in range(NUM_RANKS)
    ]
    return {
        "random": [_chunks(batch) for batch in drawn],
        "length_grouped": [_chunks(batch[np.argsort(-costs.tokens[batch], kind="stable")]) for batch in drawn],
        "batch_rebalance": [
            [
                [in_order[m].tolist() for m in rank[step * NUM_MICROBATCHES : (step + 1) * NUM_MICROBATCHES]]
                for rank in rebalanced
            ]
            for step in range(len(drawn))
        ],
        "dflop": [[plan.rank(rank) for rank in range(NUM_RANKS)] for plan in plans],
    }


def _chunks(batch: np.ndarray) -> Steps:
    """Equal counts, dealt out to ranks in turn."""
    chunks = np.array_split(batch, NUM_RANKS * NUM_MICROBATCHES)
    return [[chunks[slot * NUM_RANKS + rank].tolist() for slot in range(NUM_MICROBATCHES)] for rank in range(NUM_RANKS)]


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of the two processes has written."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (Path(folder) / "job.json").write_text(json.dumps(job))
        env = {
            **os.environ, "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(probe.getsockname()[1]),
        }  # fmt: skip
        probe.close()
        command = [sys.executable, "-m", "tests.bench.schedule.trainer_rank", folder]
        ranks = [subprocess.Popen(command, env={**env, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(NUM_RANKS)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"a rank of the trainer bench ended with {codes}")
        return [json.loads((Path(folder) / f"rank-{r}.json").read_text()) for r in range(NUM_RANKS)]


def calibrated() -> tuple[float, float]:
    """(seconds per token, seconds of a microbatch beside them) of forward and backward, fitted on a few of them."""
    model, rng = make_model(), np.random.default_rng(0)
    sums, times = [], []
    for total in (100, 200, 400, 800, 1200) * 4:
        lengths = rng.multinomial(total, np.full(max(2, total // 100), 1 / max(2, total // 100))).tolist()
        batch = collate(make_dataset(lengths, [n - 1 for n in lengths]))
        began = time.thread_time()
        model(**batch).loss.backward()
        times.append(time.thread_time() - began)
        sums.append(total)
    kept = slice(5, None)  # the first of each size warm up
    slope, fixed_s = np.polyfit(sums[kept], times[kept], 1)
    return float(slope), max(0.0, float(fixed_s))
