"""A data profile whose shards are jobs of a real Slurm: the rows that one process finds."""

from __future__ import annotations

import asyncio

import pytest

from dflop.config import Config
from dflop.jobs.profiling import profile_dataset
from dflop.launch import Journal
from dflop.records import ProfileRecord
from dflop.store.frames import profile_frame
from tests.jobs.configs import make_config
from tests.launch.helpers import REPO

NAMES = {"annotations": "annotations.jsonl", "media_root": "media", "tokenizer": "tokenizer.json"}


def profiled(config: Config) -> ProfileRecord:
    return asyncio.run(profile_dataset(config, print))


def test_shards_on_slurm_find_what_one_process_finds(cluster, tmp_path):
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    found = {}
    for backend, num_shards in (("inline", 1), ("slurm", 4)):
        folder = tmp_path / backend
        folder.mkdir()
        config = make_config(
            folder,
            "dataset.demo=true",
            "dataset.demo_num_samples=48",
            *(f"dataset.{key}={tmp_path / 'demo' / name}" for key, name in NAMES.items()),
            f"store={folder / 'store'}",
            f"runs={folder / 'runs'}",
            f"cluster.backend={backend}",
            f"cluster.slurm.setup=['export PYTHONPATH={REPO}']",
            "cluster.slurm.poll_interval_s=0.5",
            "cluster.slurm.time_limit_min=5",
            f"data_profile.num_shards={num_shards}",
        )
        record = profiled(config)
        found[backend] = (record.profile_key, record.num_rows, profile_frame(config.store, record.profile_key).rows())
        jobs = {r.job_id for run in (folder / "runs").iterdir() for r in Journal(run, run.name).records()}
        assert len(jobs) == num_shards
    assert found["slurm"] == found["inline"]
    assert found["slurm"][1] == 48
