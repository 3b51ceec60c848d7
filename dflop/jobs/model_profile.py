"""Model-profile jobs: time every module on this device over shapes drawn from the data profile, and links."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch.distributed as dist

from dflop.jobs.rank_setup import joined, take_device
from dflop.learn.remeasure import BUDGET_S, DOUBTED, Doubt, read_doubts, samples_of
from dflop.models.ways import WAYS, Way
from dflop.parallel.compiled import EAGER, INDUCTOR
from dflop.profile.hardware import software_name
from dflop.profile.link_probe import profile_links
from dflop.profile.probe import ProbeSettings
from dflop.profile.profiler import profile_model
from dflop.progress import unseen
from dflop.run.batches import profiled_ways
from dflop.run.directory import family_of, open_run, tokenizer_of
from dflop.run.messages import Meter, say
from dflop.store.spool import SpoolWriter, spool_rows


def main(
    run_path: str, profile_key: str, hardware: str, tp: str = "1", module: str = "", attempt: str = "0",
    doubts: Sequence[Doubt | None] = (None,),
) -> dict[str, float]:  # fmt: skip
    """Profile the model of a run, whose healthy shapes are in its directory; `tp` processes, rows with these labels.

    `module` is the only one to profile, in its share of the budget; empty: all. Where what was probed before determines
    no cost table, `attempt` is not 0, and other and smaller groups of samples are probed. Every way of running a module
    is timed, or (`doubts`) only what is doubtful. The first process spools what all of them measure.

    Returns:
        Number of measurements and seconds.
    """
    started_s, num_measured, run = time.perf_counter(), 0, open_run(run_path)
    config, shapes = run.config(), run.shapes()
    producer = "-".join(["model-profile" if None in doubts else "reprofile", f"tp{tp}", *filter(None, [module])])
    tokenizer, settings = tokenizer_of(config), config.model_profile
    family, device = family_of(config, tokenizer.vocab_size), take_device(config)
    budget_s = settings.budget_s if None in doubts else min(settings.budget_s, BUDGET_S / max(1, len(doubts)))
    probes = ProbeSettings(
        profile_key=profile_key,
        hardware=hardware,
        software=software_name(),
        dtype=config.model.dtype,
        num_repeats=settings.num_repeats,
        seed=config.model.seed + int(attempt),
        attention=config.model.attention,
        compiler=INDUCTOR if config.train.compile else EAGER,
        fp8=config.train.fp8,
    )
    with joined(config.cluster.collectives, config.train.timeout_s) if int(tp) > 1 else nullcontext():
        group = dist.group.WORLD if int(tp) > 1 else None
        leads = group is None or dist.get_rank() == 0
        with SpoolWriter(config.store, run.run_id, producer) if leads else nullcontext() as spool:
            for doubt in doubts:
                ways = [WAYS[name] for name in profiled_ways(config)]
                for row in profile_model(
                    family,
                    shapes if doubt is None else samples_of(doubt, shapes),
                    token_config=family.token_ids(tokenizer.special_ids),
                    settings=probes,
                    depths=settings.num_layers,
                    num_probes=settings.num_probes,
                    max_samples=1 if int(attempt) else config.plan.max_probe_samples,
                    budget_s=budget_s,
                    device=device,
                    progress=say if leads else lambda _: None,
                    at=Meter(say) if leads else unseen,
                    ways=ways if doubt is None else [Way(doubt.is_frozen, doubt.recompute)],
                    group=group,
                    only=(module or None) if doubt is None else doubt.module,
                ):
                    if spool is not None:
                        spool.append(row if doubt is None else replace(row, group=DOUBTED))
                    num_measured += 1
    return {"num_measurements": num_measured, "elapsed_s": time.perf_counter() - started_s}


def again(run_path: str, profile_key: str, hardware: str, tp: str, file: str) -> dict[str, float]:
    """As `main`, of what predictions are doubtful about, written by `write_doubts`; some seconds."""
    doubts = [doubt for doubt in read_doubts(file) if doubt.tp == int(tp)]
    return main(run_path, profile_key, hardware, tp, doubts=doubts)


def links(run_path: str, profile_key: str, hardware: str) -> dict[str, float]:
    """Time messages and collectives between the processes of this job; arguments and counts as of `main`."""
    started_s, run = time.perf_counter(), open_run(run_path)
    config = run.config()
    device, budget_s = take_device(config), config.model_profile.links_budget_s
    with joined(config.cluster.collectives, config.train.timeout_s):
        found = profile_links(
            profile_key=profile_key, hardware=hardware, software=software_name(), device=device, budget_s=budget_s
        )
        rows, rank = list(found), dist.get_rank()
    # A node's first rank may lead a group that rank 0 is not in: whoever has rows writes them.
    spool_rows(config.store, run.run_id, f"links-r{rank}", rows)
    return {"num_measurements": len(rows), "elapsed_s": time.perf_counter() - started_s}
