"""Runs whose data and modules are really profiled on this machine, and whose plan is given.

The flow is left out where a bench needs other entry points of ranks than it starts; everything that ranks and scheduler
do is theirs.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflop.cost.model import CostModel
from dflop.data.demo import make_demo_dataset
from dflop.jobs import planning, profiling, runs, submit
from dflop.jobs.rundir import RunDir
from dflop.jobs.submit import CPU_ENV
from dflop.jobs.talk import say
from dflop.records import LLM, Plan, SampleShape, StepObservation
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from tests.jobs.configs import make_config
from tests.jobs.training import compile_kernels, log_of, start_ranks
from tests.train.synthetic import make_inline_plan

ROOT = Path(__file__).parents[3]
NUM_ROWS, BATCH_SIZE, NUM_MICROBATCHES, NUM_RANKS = 320, 16, 4, 2
LIMIT_S = 1200


Found = tuple[dict[str, Any], list[tuple[str, bool]]]
"""Figures of a part, and its bounds with whether each is met."""


def in_a_process_of_its_own(module: str, seeds: Sequence[int]) -> Found:
    """Run `python -m module SEEDS` as a training job is started: an allocator is set up when a process starts.

    Raises:
        subprocess.CalledProcessError: the bench failed.
    """
    env = os.environ | CPU_ENV | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, seeds)]
    with tempfile.NamedTemporaryFile() as found:
        subprocess.run([*command, found.name], env=env, check=True)
        return json.loads(Path(found.name).read_text()), []


def profiled_run(folder: Path, is_kept: Callable[[SampleShape], bool], *overrides: str) -> RunDir:
    """A run over demo data of which only some samples are kept, its modules profiled, without a plan yet."""
    make_demo_dataset(folder / "data", NUM_ROWS)
    config = make_config(
        folder,
        f"model={ROOT}/configs/models/tiny_omni.yaml",
        f"cluster.num_processes_per_node={NUM_RANKS}",
        "cluster.memory_per_process_gib=3",
        f"dataset.annotations={folder}/data/annotations.jsonl",
        f"plan.global_batch_size={BATCH_SIZE}",
        "model_profile.links_budget_s=0",
        "train.learning_rate=0.0001",
        "train.trace_every_steps=0",
        *overrides,
    )
    run, _ = runs.begin(config)
    asyncio.run(_profile(run, is_kept))
    return run


async def _profile(run: RunDir, is_kept: Callable[[SampleShape], bool]) -> None:
    config = run.config()
    launcher = submit.launcher_of(run, config)
    data = await profiling.data_profile(run, launcher, say)
    with Reader(config.store) as reader:
        run.write_shapes([s for s in reader.shapes(data.profile_key) if is_kept(s)])
    key = await profiling.model_profile(run, launcher, say)
    costs = planning.cost_tables(run, config, key, say)
    # One process holds everything and another one the same: what is slow somewhere, ranks wait for everywhere.
    modules = [m.module for m in planning.used_modules(planning.bound_family(config), run.shapes())]
    depth = {s.module: s.num_layers for s in planning.bound_family(config).specs() if s.module in modules}
    plan = make_inline_plan([depth], dp=NUM_RANKS, num_microbatches=NUM_MICROBATCHES)
    give_plan(run, plan, [t for t in costs.tables if t.tp == 1 and not t.recompute])
    compile_kernels()


def give_plan(run: RunDir, plan: Plan, tables: Sequence[Any]) -> None:
    """Make this the plan of a run, with tables of its modules among those given."""
    names = [m.module for m in plan.modules]
    used = sorted((t for t in tables if t.module in names), key=lambda t: names.index(t.module))
    ids = tuple(t.table_id for t in used)
    run.write_plan(dataclasses.replace(plan, global_batch_size=BATCH_SIZE, table_ids=ids), used)


def seconds_range(run: RunDir, module: str, begin: float, end: float) -> tuple[int, int]:
    """Sizes of items (tokens, first included, last not) that hold these shares of a module's predicted seconds."""
    cost = CostModel(run.cost_tables(), extrapolate=True)
    num_layers = sum(run.plan().module(module).layers_per_stage)
    sizes = sorted(
        (s.num_llm_tokens, s.num_llm_tokens**2) if item is None else (item.num_tokens, item.sum_sq_tokens)
        for s in run.shapes()
        for item in ([None] if module == LLM else [i for i in s.items if i.module == module])
    )
    seconds = [float(cost.item_seconds(module, 1, n, sq, num_layers=num_layers, edge=True)) for n, sq in sizes]
    total_s, bounds, reached_s = sum(seconds), [], 0.0
    for (tokens, _), added_s in zip(sizes, seconds, strict=True):
        while len(bounds) < 2 and reached_s >= (begin, end)[len(bounds)] * total_s:
            bounds.append(tokens)
        reached_s += added_s
    return bounds[0], bounds[1] if len(bounds) == 2 else sizes[-1][0] + 1


def train(run: RunDir, entry: str, *args: str, watch: Callable[[], object] = lambda: None) -> None:
    """Run the ranks of a run to their end, calling `watch` over and over meanwhile.

    Raises:
        RuntimeError: a rank failed.
    """
    ranks = start_ranks(run, entry, *args)
    try:
        while any(rank.poll() is None for rank in ranks):
            watch()
            try:
                ranks[0].wait(1.0)
            except subprocess.TimeoutExpired:
                continue
            for rank in ranks:
                rank.wait(60)
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("\n".join(log_of(run, rank).read_text()[-3000:] for rank in range(len(ranks))))


def observations(run: RunDir) -> dict[tuple[int, int], StepObservation]:
    """By (step, rank)."""
    return {(o.step, o.rank): o for o in read_spool(run.config().store, StepObservation)}


def step_s(seen: dict[tuple[int, int], StepObservation], step: int) -> float:
    """Wall seconds of a step, on the rank that took longest."""
    return max(seen[step, rank].step_s for rank in range(NUM_RANKS))


def compute_s(seen: StepObservation) -> float:
    """CPU seconds of a rank's forward and backward."""
    return sum(s.forward_compute_s + s.backward_compute_s for s in seen.spans)


def slowest_s(seen: dict[tuple[int, int], StepObservation], step: int) -> float:
    """CPU seconds of the rank that computes longest: what others wait for, whoever else uses the cores."""
    return max(compute_s(seen[step, rank]) for rank in range(NUM_RANKS))
