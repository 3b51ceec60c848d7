"""The launcher of a run: its cluster's, with the dialect that the configuration gives its Slurm."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

from dflop.config import Config
from dflop.launch import Container, Launcher, Site, make_launcher
from dflop.run.directory import RunDir


def launcher_of(run: RunDir, config: Config) -> Launcher:
    """The launcher of the run's cluster."""
    cluster = config.cluster
    if cluster.backend == "slurm":
        s = cluster.slurm
        return make_launcher(
            "slurm",
            run_id=run.run_id,
            site=site_of(run, config),
            poll_interval_s=s.poll_interval_s,
            lost_after_s=s.lost_after_s,
        )
    return make_launcher("local", max_jobs=cluster.spec().num_cores_per_node)


def reading_launcher_of(run: RunDir, config: Config, say: Callable[[str], None]) -> Launcher:
    """The launcher for jobs that only read the dataset: where the run's cluster is out of reach, this machine's.

    A plan for a cluster can be made on a laptop that has the dataset.
    """
    if config.cluster.backend != "slurm" or shutil.which("sbatch") is not None:
        return launcher_of(run, config)
    say("no sbatch here: the dataset is profiled on this machine")
    return make_launcher("local", max_jobs=os.cpu_count() or 1)


def site_of(run: RunDir, config: Config) -> Site:
    """The dialect of the cluster's Slurm; a container sees runs, store and dataset where they are."""
    s, d, box = config.cluster.slurm, config.dataset, config.cluster.slurm.container
    container = None
    if box is not None:
        files = [d.annotations, d.tokenizer, *([config.model.weights] if config.model.weights else [])]
        folders = [run.path.parent, config.store, d.media_root, *(file.parent for file in files)]
        mounts = dict.fromkeys([*(str(folder.absolute()) for folder in folders), *box.mounts])
        container = Container(box.image, box.runtime, tuple(mounts), box.args, box.python)
    return Site(
        gpus=s.gpus,
        gpu_type=s.gpu_type,
        ask_for_memory=s.ask_for_memory,
        requeue=s.requeue,
        signal_delay_s=s.signal_delay_s,
        max_jobs_at_once=s.max_jobs_at_once,
        srun_args=s.srun_args,
        container=container,
    )
