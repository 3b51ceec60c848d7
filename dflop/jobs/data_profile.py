"""Data-profile job: one shard of the dataset becomes `SampleShape` and `QuarantinedSample` rows in the spool."""

from __future__ import annotations

import time
from dataclasses import replace

from dflop.data.dataset_profile import profile_shard
from dflop.records import LLM
from dflop.run.directory import dataset_ref, family_of, open_run
from dflop.run.messages import Meter, say
from dflop.store.spool import spool_rows


def main(run_path: str, profile_key: str, shard: str, num_shards: str, first_row: str = "0") -> dict[str, float]:
    """Profile one of so many shards of the rows from `first_row` on, under a key that the driver has computed.

    Returns:
        Counts and seconds, for the flow's progress and the profile record.
    """
    run = open_run(run_path)
    config, started_s, part = run.config(), time.perf_counter(), (int(shard), int(num_shards))
    dataset, media = dataset_ref(config), family_of(config)
    producer = f"data-{shard}-of-{num_shards}"
    num_workers, cache = config.data_profile.num_workers, config.store / "cache" / "headers"
    shapes, bad = profile_shard(
        dataset, media, *part, say,
        at=Meter(say), key=profile_key, num_workers=num_workers, cache=cache, first_row=int(first_row),
    )  # fmt: skip
    bad = [replace(b, run_id=run.run_id) for b in bad]
    spool_rows(config.store, run.run_id, producer, (*shapes, *bad))
    counts = len(shapes), len(bad), sum(s.load(LLM).num_tokens for s in shapes)
    names = ("num_samples", "num_quarantined", "num_llm_tokens")
    return {**dict(zip(names, counts, strict=True)), "elapsed_s": time.perf_counter() - started_s}
