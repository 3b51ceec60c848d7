"""Model-profile job: time every module on this device over shapes drawn from the data profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.jobs.rank_setup import joined, take_device
from dflop.learn.remeasure import BUDGET_S, DOUBTED, Doubt, read_doubts, samples_of
from dflop.models.ways import WAYS, Way
from dflop.profile.hardware import software_name
from dflop.profile.probe import ProbeSettings
from dflop.profile.profiler import profile_model, used_modules
from dflop.records import Measurement
from dflop.run.batches import profiled_ways
from dflop.run.directory import RunDir, family_of, open_run, tokenizer_of
from dflop.run.messages import say
from dflop.store.spool import SpoolWriter


def main(
    run_path: str, profile_key: str, hardware: str, tp: str = "1", module: str = "", attempt: str = "0"
) -> dict[str, float]:
    """Profile the model of a run; its healthy shapes must be in the run directory.

    Args:
        run_path: Run directory.
        profile_key: Identity of the profile.
        hardware: Label of the device in every row.
        tp: Tensor-parallel degree, as many as the job has processes.
        module: The only one to profile, in its share of the budget; other jobs profile the others. Empty: all.
        attempt: Not 0: what was probed before determines no cost table, so other and smaller groups of samples are.

    Returns:
        Number of measurements and seconds.
    """
    started = time.perf_counter()
    run = open_run(run_path)
    config = run.config()
    device = take_device(config)
    with joined(device, config.train.timeout_s) if int(tp) > 1 else nullcontext():
        group = dist.group.WORLD if int(tp) > 1 else None
        leads = group is None or dist.get_rank() == 0
        num_measured = 0
        producer = f"model-profile-tp{tp}{f'-{module}' if module else ''}"
        with SpoolWriter(config.store, run.run_id, producer) if leads else nullcontext() as spool:
            for measurement in _profile(
                run, config, profile_key, hardware, device, group, only=module or None, attempt=int(attempt)
            ):
                if spool is not None:
                    spool.append(measurement)
                num_measured += 1
    return {"num_measurements": num_measured, "elapsed_s": time.perf_counter() - started}


def again(run_path: str, profile_key: str, hardware: str, tp: str, file: str) -> dict[str, float]:
    """Time only what predictions are doubtful about, on samples of those sizes; some seconds.

    Args:
        run_path: Run directory.
        profile_key: Identity of the profile that the measurements are added to.
        hardware: Label of the device in every row.
        tp: Tensor-parallel degree, as many as the job has processes.
        file: What `write_doubts` wrote.

    Returns:
        Number of measurements and seconds.
    """
    started = time.perf_counter()
    run = open_run(run_path)
    config, doubts = run.config(), [d for d in read_doubts(file) if d.tp == int(tp)]
    device = take_device(config)
    with joined(device, config.train.timeout_s) if int(tp) > 1 else nullcontext():
        group = dist.group.WORLD if int(tp) > 1 else None
        leads = group is None or dist.get_rank() == 0
        num_measured = 0
        with SpoolWriter(config.store, run.run_id, f"reprofile-tp{tp}") if leads else nullcontext() as spool:
            for doubt in doubts:
                for row in _profile(run, config, profile_key, hardware, device, group, doubt, BUDGET_S / len(doubts)):
                    if spool is not None:
                        spool.append(replace(row, group=DOUBTED))
                    num_measured += 1
    return {"num_measurements": num_measured, "elapsed_s": time.perf_counter() - started}


def _profile(
    run: RunDir,
    config: Config,
    profile_key: str,
    hardware: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    doubt: Doubt | None = None,
    budget_s: float | None = None,
    only: str | None = None,
    attempt: int = 0,
) -> Iterator[Measurement]:
    """Of all modules in every way of running them, of one of them, or of what is doubtful."""
    tokenizer = tokenizer_of(config)
    family = family_of(config, tokenizer.vocab_size)
    settings, shapes = config.model_profile, run.shapes()
    if only is not None:
        budget_s = settings.budget_s / len(used_modules(family, shapes))
    leads = group is None or dist.get_rank() == 0
    return profile_model(
        family,
        shapes if doubt is None else samples_of(doubt, shapes),
        token_config=family.token_ids(tokenizer.special_ids),
        vocab_size=tokenizer.vocab_size,
        settings=ProbeSettings(
            profile_key=profile_key,
            hardware=hardware,
            software=software_name(),
            dtype=config.model.dtype,
            num_repeats=settings.num_repeats,
            seed=config.model.seed + attempt,
            attention=config.model.attention,
        ),
        depths=settings.num_layers,
        num_probes=settings.num_probes,
        max_samples=1 if attempt else config.plan.max_probe_samples,
        budget_s=min(budget_s or settings.budget_s, settings.budget_s),
        device=device,
        progress=say if leads else lambda _: None,
        ways=[WAYS[name] for name in profiled_ways(config)]
        if doubt is None
        else [Way(doubt.is_frozen, doubt.recompute)],
        target_frac=settings.target_frac,
        group=group,
        only=only if doubt is None else doubt.module,
    )
