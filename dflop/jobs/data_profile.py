"""Data-profile job: one shard of the dataset becomes `SampleShape` and `QuarantinedSample` rows in the spool."""

from __future__ import annotations

import time
from dataclasses import replace

from dflop.data.dataset_profile import DatasetRef, profile_shard, profile_sizes_shard
from dflop.models.media import MediaRules
from dflop.records import LLM, QuarantinedSample, SampleShape
from dflop.run.directory import RunDir, dataset_ref, open_run, rules_of
from dflop.run.messages import say
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
    dataset, media = dataset_ref(config), rules_of(config)
    if dataset.sizes is not None:
        return _profile_sizes(run, dataset, media, profile_key, int(shard), int(num_shards))
    shapes, bad = profile_shard(
        dataset,
        media,
        int(shard),
        int(num_shards),
        say,
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


def _profile_sizes(
    run: RunDir, dataset: DatasetRef, media: MediaRules, key: str, shard: int, num_shards: int
) -> dict[str, float]:
    started = time.perf_counter()
    shapes, bad = profile_sizes_shard(dataset, media, shard, num_shards, key=key, run_id=run.run_id)
    with SpoolWriter(run.config().store, run.run_id, f"data-{shard}-of-{num_shards}") as spool:
        spool.append_table(SampleShape, shapes.to_arrow())
        spool.append_table(QuarantinedSample, bad.to_arrow())
    return {
        "num_samples": len(shapes),
        "num_quarantined": len(bad),
        "num_llm_tokens": int(shapes["num_llm_tokens"].sum()),
        "elapsed_s": time.perf_counter() - started,
    }
