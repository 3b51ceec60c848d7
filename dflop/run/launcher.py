"""The launcher of a run: its cluster's, with the dialect that the configuration gives its Slurm."""

from __future__ import annotations

import shutil

from dflop.config import Config, SlurmConfig
from dflop.launch import Launcher
from dflop.run.directory import RunDir
from dflop.run.messages import Say


def launcher_of(run: RunDir, config: Config) -> Launcher:
    """The launcher of the run's cluster."""
    if config.cluster.backend == "slurm":
        from dflop.launch.slurm import SlurmLauncher  # submitit takes a tenth of a second

        return SlurmLauncher(run_id=run.run_id, site=site_of(run, config))
    return _local()


def reading_launcher_of(run: RunDir, config: Config, say: Say) -> Launcher:
    """The launcher for jobs that only read the dataset: where the cluster is out of reach, this machine's."""
    if config.cluster.backend != "slurm" or shutil.which("sbatch") is not None:
        return launcher_of(run, config)
    say("no sbatch on this machine: profiling the dataset locally")
    return _local()


def _local() -> Launcher:
    from dflop.launch.local import LocalLauncher

    return LocalLauncher()


def site_of(run: RunDir, config: Config) -> SlurmConfig:
    """The dialect of the cluster's Slurm; a container sees runs, store and dataset where they are."""
    s, d, box = config.cluster.slurm, config.dataset, config.cluster.slurm.container
    if box is None:
        return s
    files = [d.annotations, d.tokenizer, *([config.model.weights] if config.model.weights else [])]
    folders = [run.path.parent, config.store, d.media_root, *(file.parent for file in files)]
    mounts = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *box.mounts])
    return s.model_copy(update={"container": box.model_copy(update={"mounts": tuple(mounts)})})
