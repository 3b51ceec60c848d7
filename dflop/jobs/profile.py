"""Model-profile job: time every module on this device over shapes drawn from the data profile."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist

from dflop.config import Config
from dflop.jobs.planning import max_probe_samples
from dflop.jobs.ranks import joined, take_device
from dflop.jobs.rundir import RunDir, family_of, open_run, tokenizer_of
from dflop.jobs.steps import profiled_ways
from dflop.models.ways import WAYS
from dflop.profile.hardware import software_name
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.records import Measurement
from dflop.store.spool import SpoolWriter


def main(run_path: str, profile_key: str, hardware: str, tp: str = "1") -> dict[str, float]:
    """Profile the model of a run; its healthy shapes must be in the run directory.

    Args:
        run_path: Run directory.
        profile_key: Identity of the profile.
        hardware: Label of the device in every row.
        tp: Tensor-parallel degree, as many as the job has processes.

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
        with SpoolWriter(config.store, run.run_id, f"model-profile-tp{tp}") if leads else nullcontext() as spool:
            for measurement in _measurements(run, config, profile_key, hardware, device, group, leads):
                if spool is not None:
                    spool.append(measurement)
                num_measured += 1
    return {"num_measurements": num_measured, "elapsed_s": time.perf_counter() - started}


def _measurements(
    run: RunDir,
    config: Config,
    profile_key: str,
    hardware: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    leads: bool,
) -> Iterator[Measurement]:
    tokenizer = tokenizer_of(config)
    family = family_of(config, tokenizer.vocab_size)
    settings = config.model_profile
    return profile_model(
        family,
        run.shapes(),
        token_config=family.token_ids(tokenizer.special_ids),
        vocab_size=tokenizer.vocab_size,
        settings=ProbeSettings(
            profile_key=profile_key,
            hardware=hardware,
            software=software_name(),
            dtype=config.model.dtype,
            num_repeats=settings.num_repeats,
            seed=config.model.seed,
            attention=config.model.attention,
        ),
        depths=settings.num_layers,
        num_probes=settings.num_probes,
        max_samples=max_probe_samples(config),
        budget_s=settings.budget_s,
        device=device,
        progress=_say if leads else lambda _: None,
        ways=[WAYS[name] for name in profiled_ways(config)],
        target_frac=settings.target_frac,
        group=group,
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
