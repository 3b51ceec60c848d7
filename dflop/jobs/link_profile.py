"""Link-profile job: what messages and collectives between the processes of a cluster cost."""

from __future__ import annotations

import time

import torch.distributed as dist

from dflop.jobs.rank_setup import joined, take_device
from dflop.profile.hardware import software_name
from dflop.profile.link_probe import profile_links
from dflop.run.directory import open_run
from dflop.store.spool import SpoolWriter


def main(run_path: str, profile_key: str, hardware: str) -> dict[str, float]:
    """Time the links between the processes of this job.

    Args:
        run_path: Run directory.
        profile_key: Identity of the model profile the rows belong to.
        hardware: Label of the device in every row.

    Returns:
        Number of measurements and seconds.
    """
    started = time.perf_counter()
    run = open_run(run_path)
    config = run.config()
    device = take_device(config)
    with joined(device, config.train.timeout_s):
        rows = list(
            profile_links(
                profile_key=profile_key,
                hardware=hardware,
                software=software_name(),
                device=device,
                budget_s=config.model_profile.links_budget_s,
            )
        )
        rank = dist.get_rank()
    # A node's first rank may lead a group that rank 0 is not in: whoever has rows writes them.
    if rows:
        with SpoolWriter(config.store, run.run_id, f"links-r{rank}") as spool:
            for row in rows:
                spool.append(row)
    return {"num_measurements": len(rows), "elapsed_s": time.perf_counter() - started}
