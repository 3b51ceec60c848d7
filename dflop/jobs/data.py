"""Data-profile job: one shard of the dataset becomes `SampleShape` and `QuarantinedSample` rows in the spool."""

from __future__ import annotations

import sys
import time
from dataclasses import replace

from dflop.data.profile import profile_shard
from dflop.jobs.rundir import dataset_ref, open_run, rules_of
from dflop.records import LLM
from dflop.store.spool import SpoolWriter


def main(run_path: str, profile_key: str, shard: str, num_shards: str) -> dict[str, float]:
    """Profile one shard.

    Args:
        run_path: Run directory.
        profile_key: Identity of the profile, computed once by whoever submits all shards.
        shard: Index of this shard.
        num_shards: Into how many the dataset is cut.

    Returns:
        Counts and seconds, for the flow's progress and the profile record.
    """
    run = open_run(run_path)
    config = run.config()
    started = time.perf_counter()
    shapes, bad = profile_shard(
        dataset_ref(config),
        rules_of(config),
        int(shard),
        int(num_shards),
        _say,
        key=profile_key,
        num_workers=config.data_profile.num_workers,
        cache=config.store / "cache" / "headers",
    )
    with SpoolWriter(config.store, run.run_id, f"data-{shard}-of-{num_shards}") as spool:
        for record in (*shapes, *(replace(b, run_id=run.run_id) for b in bad)):
            spool.append(record)
    return {
        "num_samples": len(shapes),
        "num_quarantined": len(bad),
        "num_llm_tokens": sum(s.load(LLM).num_tokens for s in shapes),
        "elapsed_s": time.perf_counter() - started,
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
