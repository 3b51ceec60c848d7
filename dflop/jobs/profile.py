"""Model-profile job: time every module on this device over shapes drawn from the data profile."""

from __future__ import annotations

import sys
import time

import torch

from dflop.jobs.rundir import family_of, open_run, tokenizer_of
from dflop.profile.hardware import software_name
from dflop.profile.probe import ProbeSettings
from dflop.profile.run import profile_model
from dflop.store.spool import SpoolWriter


def main(run_path: str, profile_key: str, hardware: str) -> dict[str, float]:
    """Profile the model of a run; its healthy shapes must be in the run directory.

    Args:
        run_path: Run directory.
        profile_key: Identity of the profile.
        hardware: Label of the device in every row.

    Returns:
        Number of measurements and seconds.
    """
    run = open_run(run_path)
    config = run.config()
    device = torch.device("cuda", 0) if config.cluster.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    started = time.perf_counter()
    tokenizer = tokenizer_of(config)
    family = family_of(config, tokenizer.vocab_size)
    settings = ProbeSettings(
        profile_key=profile_key,
        hardware=hardware,
        software=software_name(),
        dtype=config.model.dtype,
        num_repeats=config.model_profile.num_repeats,
        seed=config.model.seed,
    )
    num_measured = 0
    with SpoolWriter(config.store, run.run_id, "model-profile") as spool:
        for measurement in profile_model(
            family,
            run.shapes(),
            token_config=family.token_ids(tokenizer.special_ids),
            vocab_size=tokenizer.vocab_size,
            settings=settings,
            depths=config.model_profile.num_layers,
            num_probes=config.model_profile.num_probes,
            max_samples=max(1, config.plan.global_batch_size // min(config.plan.microbatch_choices)),
            budget_s=config.model_profile.budget_s,
            device=device,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        ):
            spool.append(measurement)
            num_measured += 1
    return {"num_measurements": num_measured, "elapsed_s": time.perf_counter() - started}
