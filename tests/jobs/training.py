"""A planned run that a few processes of this machine train in seconds, without profiling anything for it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dflop.config import dump_config, load_config
from dflop.data.dataset_profile import profile_key
from dflop.data.demo import make_demo_dataset
from dflop.jobs import data_profile
from dflop.launch.kernels import kernel_environment
from dflop.records import LLM, Plan, StepObservation
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir, dataset_ref, family_of
from dflop.steps.planning import bound_family, model_profile_key
from dflop.steps.profiling import note_profile
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter
from tests.builders import make_table
from tests.forked import Program
from tests.jobs.configs import make_config
from tests.jobs.made import run_of
from tests.store.spooled import read_spool
from tests.train.synthetic import make_plan as make_split_plan

ROOT = Path(__file__).parents[2]
NARROW_OMNI = Path(__file__).with_name("narrow_omni.yaml")
MODULES = ("vision", LLM)
TABLES = {
    (module, tp, recompute): make_table(
        module, tp=tp, recompute=recompute, table_id=f"{module}-tp{tp}" + "-recomputed" * recompute
    )
    for module in MODULES
    for tp in (1, 2)
    for recompute in (False, True)
}
"""Cost tables of every way that plans here run a module."""
NUM_SAMPLES, BATCH_SIZE = 48, 8
LIMIT_S = 180


def planned_run(
    folder: Path, *overrides: str, num_rows: int = 96, num_kept: int = NUM_SAMPLES, has_jobs: bool = True
) -> RunDir:
    """The smallest texts and images of the demo dataset, one process for images and one for the LLM."""
    make_demo_dataset(folder / "data", num_rows)
    config = make_config(
        folder,
        f"model={NARROW_OMNI}",
        "cluster.num_processes_per_node=4",
        f"dataset.annotations={folder}/data/annotations.jsonl",
        f"plan.global_batch_size={BATCH_SIZE}",
        "train.learning_rate=0.0001",
        *overrides,
    )
    run = run_of(folder / "runs" / "small-1", config)
    key = profile_key(dataset_ref(config), family_of(config))
    data_profile.main(str(run.path), key, "0", "1")
    with SpoolWriter(config.store, run.run_id, "fit") as spool:
        for table in TABLES.values():
            spool.append(table)
    ingest(config.store)
    with Reader(config.store) as reader:
        shapes = [s for s in reader.shapes(key) if all(item.module == MODULES[0] for item in s.items)]
    small = sorted(shapes, key=lambda s: s.num_llm_tokens)[:num_kept]
    run.write_shapes(sorted(small, key=lambda s: s.sample_index))
    give_plan(run, make_split_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=4, of=bound_family(config)))
    if has_jobs:
        compile_kernels()
    return run


def give_plan(run: RunDir, plan: Plan) -> None:
    """Make this the plan of a run."""
    tables = [TABLES[m.module, mode.tp, mode.recompute] for m in plan.modules for mode in m.modes]
    ids = tuple(t.table_id for t in tables)
    run.write_plan(dataclasses.replace(plan, global_batch_size=BATCH_SIZE, table_ids=ids), tables)


def profiled(run: RunDir) -> RunDir:
    """The same run, whose profiles the store holds to be complete: a driver has only to train it."""
    config = run.config()
    note_profile(run, run.profile_key(), "data", [{"num_samples": NUM_SAMPLES}], 1.0, {})
    key = model_profile_key(config)[0]
    note_profile(run, key, "model", [{"num_measurements": 1}], 1.0, {})
    with SpoolWriter(config.store, run.run_id, "fit") as spool:
        for table in TABLES.values():
            spool.append(dataclasses.replace(table, profile_key=key))
    ingest(config.store)
    return run


def fresh(planned: RunDir, folder: Path) -> RunDir:
    """The run and its store in a folder of their own."""
    old = planned.path.parents[1]
    for name in ("runs", "store"):
        shutil.copytree(old / name, folder / name, symlinks=True)
    run = RunDir(folder / "runs" / planned.run_id)
    text = run.config_file.read_text()
    for name in ("runs", "store"):
        text = text.replace(f"{old}/{name}", f"{folder}/{name}")
    run.config_file.write_text(text)
    return run


def set_config(run: RunDir, *settings: str) -> None:
    """Change a run's configuration; jobs that start from now on read it."""
    run.config_file.write_text(dump_config(load_config(run.config_file, list(settings))))


def losses_of(run: RunDir) -> dict[int, float]:
    """By step, over all starts of the job."""
    return {o.step: o.loss for o in read_spool(run.config().store, StepObservation)}


@functools.cache
def compile_kernels() -> None:
    """Where schedulers look for them: without, they make quick plans for half a minute, and jobs here are shorter."""
    code = "from dflop.schedule.step_scheduler import warm; warm()"
    env = os.environ | {"PYTHONPATH": str(ROOT)} | kernel_environment(os.environ)
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=LIMIT_S)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a job ended."""

    codes: tuple[int, ...]
    stderr: tuple[str, ...]


def free_port() -> int:
    """A port below those that the kernel hands out by itself: nobody's connection takes it until rank 0 listens."""
    while True:
        port = random.randint(20_000, 30_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def environments(num_ranks: int) -> list[dict[str, str]]:
    """Of every rank of a job on this machine."""
    port = free_port()
    of_all = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_all |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    places = [of_all | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(num_ranks)]
    return [os.environ | {name: str(value) for name, value in place.items()} for place in places]


def start_ranks(
    run: RunDir, entry: str, *args: str, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[bytes]]:
    """`python -m entry *args` in every process of the run's plan; their output goes to `log_of`."""
    compile_kernels()
    ranks = []
    for rank, of_rank in enumerate(environments(run.plan().num_processes)):
        with log_of(run, rank).open("w") as out:
            command = [sys.executable, "-m", entry, *args]
            ranks.append(subprocess.Popen(command, env=of_rank | dict(env or {}), stdout=out, stderr=out))
    return ranks


def fork_ranks(run: RunDir, entry: str, *args: str) -> list[Program]:
    """The same, without the seconds that a new process takes to import torch: not where processes are measured."""
    compile_kernels()
    envs = environments(run.plan().num_processes)
    return [Program(entry, args, env, log_of(run, rank)) for rank, env in enumerate(envs)]


def log_of(run: RunDir, rank: int) -> Path:
    return run.path / f"rank-{rank}.log"


def run_ranks(run: RunDir, entry: str, *args: str, limit_s: float = LIMIT_S) -> Ended:
    """Forked ranks, to the end; those that have not ended by then are killed."""
    ranks = fork_ranks(run, entry, *args)
    try:
        codes = tuple(rank.wait(limit_s) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return Ended(codes, tuple(log_of(run, rank).read_text() for rank in range(len(ranks))))


def train(run: RunDir, limit_s: float = LIMIT_S) -> tuple[str, ...]:
    """Train a run to its end; what its ranks say."""
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), TRAIN, limit_s=limit_s)
    assert set(ended.codes) == {0}, "\n".join(ended.stderr)
    return ended.stderr
