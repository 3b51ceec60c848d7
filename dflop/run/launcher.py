"""The launcher of a run: its cluster's, with the dialect that the configuration gives its Slurm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from dflop.config import Config, SlurmConfig
from dflop.launch import Launcher, make_launcher
from dflop.run.directory import RunDir


def launcher_of(run: RunDir, config: Config) -> Launcher:
    """The launcher of the run's cluster."""
    if config.cluster.backend == "slurm":
        return make_launcher("slurm", run_id=run.run_id, site=site_of(run, config))
    return make_launcher("local", max_jobs=config.cluster.spec().num_cores_per_node)


def reading_launcher_of(run: RunDir, config: Config, say: Callable[[str], None]) -> Launcher:
    """The launcher for jobs that only read the dataset: where the cluster is out of reach, this machine's."""
    if config.cluster.backend != "slurm" or shutil.which("sbatch") is not None:
        return launcher_of(run, config)
    say("no sbatch here: the dataset is profiled on this machine")
    return make_launcher("local", max_jobs=os.cpu_count() or 1)


def site_of(run: RunDir, config: Config) -> SlurmConfig:
    """The dialect of the cluster's Slurm; a container sees runs, store and dataset where they are."""
    s, d, box = config.cluster.slurm, config.dataset, config.cluster.slurm.container
    if box is None:
        return s
    files = [d.annotations, d.tokenizer, *([config.model.weights] if config.model.weights else [])]
    folders = [run.path.parent, config.store, d.media_root, *(file.parent for file in files)]
    mounts = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *box.mounts])
    return s.model_copy(update={"container": box.model_copy(update={"mounts": tuple(mounts)})})
