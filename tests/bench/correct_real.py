"""Corrections in real jobs: `python -m tests.bench.correct --part real`. Everything is measured on this machine.

The demo's model is profiled as in any run; samples of some lengths take four times their time in the LLM. Two jobs
train the same batches, corrections off and on; the StepPlans of both for the last quarter of the steps, and
those of an oracle who knows what is slow, are then trained in turn in one more job: the step times that are compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dflop.cost.model import CostModel
from dflop.data.demo import make_demo_dataset
from dflop.records import LLM, Correction, ModuleFactors, StepObservation, StepPlan
from dflop.run.batches import GlobalBatches
from dflop.run.directory import RunDir
from dflop.run.messages import say
from dflop.schedule.step_scheduler import schedule_step
from dflop.steps import planning
from tests.bench.jobs import configured, give_steps, profiled_run, train_ranks
from tests.bench.markdown import percent, ratio, table
from tests.jobs.training import compile_kernels
from tests.store.spooled import read_spool
from tests.train.synthetic import make_inline_plan

NUM_ROWS, BATCH_SIZE, NUM_MICROBATCHES, NUM_RANKS = 320, 16, 4, 2
OFF, ON, ORACLE, FIRST_ON = "off", "auto", "oracle", "gate_first_on"
"""As files of results call them, which are older than their names here."""
SETTINGS = {OFF: "correct.enabled=false", ON: "correct.enabled=true"}
SHARES, FACTOR = (0.5, 0.75), 4.0
"""Samples of the sizes that hold these shares of the LLM's predicted seconds take so many times as long."""
NUM_STEPS, NUM_STEPS_OF_ONE_SEED, NUM_WARM_UP_STEPS = 160, 40, 4


async def _profiled(folder: Path) -> RunDir:
    """A run over what the encoder of pictures and clips, or none, has work with; one process holds everything and
    another one the same, so that what is slow somewhere, ranks wait for everywhere."""
    profiled = await profiled_run(
        folder, folder / "data" / "annotations.jsonl", NUM_RANKS, f"plan.global_batch_size={BATCH_SIZE}",
        "model_profile.links_budget_s=0", "train.learning_rate=0.0001",
        is_kept=lambda shape: all(item.module == "vision" for item in shape.items),
    )  # fmt: skip
    run = profiled.run
    family = planning.bound_family(run.config())
    used = [m.module for m in planning.used_modules(family, run.shapes())]
    plan = make_inline_plan(
        [{s.module: s.num_layers for s in family.specs() if s.module in used}], dp=NUM_RANKS,
        num_microbatches=NUM_MICROBATCHES,
    )  # fmt: skip
    names = [m.module for m in plan.modules]
    tables = {t.module: t for t in profiled.cost.tables if t.tp == 1 and not t.recompute}
    of_plan = [tables[name] for name in names]
    ids = tuple(t.table_id for t in of_plan)
    run.write_plan(dataclasses.replace(plan, global_batch_size=BATCH_SIZE, table_ids=ids), of_plan)
    compile_kernels()
    return run


def real(seeds: Sequence[int]) -> dict[str, Any]:
    """Figures; there are no bounds."""
    num_steps = NUM_STEPS if len(seeds) > 1 else NUM_STEPS_OF_ONE_SEED
    first = num_steps - num_steps // 4
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as name:
        folder = Path(name)
        make_demo_dataset(folder / "data", NUM_ROWS)
        profiled = asyncio.run(_profiled(folder))
        bounds = slow_sizes(profiled)
        say(f"items of {bounds[0]} to {bounds[1] - 1} tokens take x{FACTOR:g}")
        found = [_slow_sizes(profiled, folder / str(seed), seed, num_steps, first, bounds) for seed in seeds]
    slow = {"module": LLM, "tokens": bounds, "shares": SHARES, "factor": FACTOR}
    return {"slow": slow, "num_steps": num_steps, "first_counted_step": first, "seeds": found}


def slow_sizes(run: RunDir) -> tuple[int, int]:
    """Sizes of samples (tokens, first included, last not) that hold `SHARES` of the LLM's predicted seconds."""
    num_layers = sum(run.plan().module(LLM).layers_per_stage)
    tokens = np.sort([s.num_llm_tokens for s in run.shapes()])
    cost = CostModel(run.cost_tables(), extrapolate=True)
    seconds = cost.item_seconds(LLM, np.ones(len(tokens)), tokens, tokens**2, num_layers=num_layers, edge=True)
    begun = (np.cumsum(seconds) - seconds) / seconds.sum()
    first, last = (int(tokens[np.searchsorted(begun, share)]) for share in SHARES)
    return first, last


def _slow_sizes(
    profiled: RunDir, folder: Path, seed: int, num_steps: int, first: int, bounds: tuple[int, int]
) -> dict[str, Any]:
    slowness = f"shapes:{LLM}:{bounds[0]}:{bounds[1]}:{FACTOR:g}"
    settings, plans, run = (f"train.seed={seed}", f"train.num_steps={num_steps}"), {}, profiled
    for arm, setting in SETTINGS.items():
        run = configured(profiled, folder / arm, *settings, setting)
        train_ranks(run, "tests.jobs.slowed", str(run.path), slowness)
        plans[arm] = {p.step: p for p in read_spool(run.config().store, StepPlan)}
    corrections = read_spool(run.config().store, Correction)
    cost = CostModel(run.cost_tables(), {LLM: ModuleFactors(LLM, 1.0, bounds, (1.0, FACTOR, 1.0))})
    batches, steps = GlobalBatches(run.config(), run.shapes()), range(first, num_steps)
    plans[ORACLE] = {
        step: schedule_step(run_id=run.run_id, step=step, plan=run.plan(), batch=batches.at(step), cost=cost)
        for step in steps
    }
    # A global batch at a time under all three, no arm always first.
    order = [(first, OFF)] * NUM_WARM_UP_STEPS
    order += [(step, list(plans)[(step + turn) % len(plans)]) for step in steps for turn in range(len(plans))]
    replay = configured(profiled, folder / "replay", *settings)
    give_steps(replay, [dataclasses.replace(plans[arm][step], policy=arm) for step, arm in order])
    seen = train_ranks(replay, "tests.bench.jobs", str(replay.path), slowness)
    number = {pair: n for n, pair in enumerate(order) if n >= NUM_WARM_UP_STEPS}
    step_s = {arm: np.array([_step_s(seen, number[step, arm]) for step in steps]) for arm in plans}
    ratios = {arm: step_s[OFF] / step_s[arm] for arm in (ON, ORACLE)}
    over = {arm: {"mean": float(r.mean()), "sd": float(r.std(ddof=1))} for arm, r in ratios.items()}
    first_on = min((c.effective_step for c in corrections if c.is_in_force), default=None)
    print(f"seed {seed}: factors by size from step {first_on}, off over {over}", flush=True)
    mean_s = {arm: float(s.mean()) for arm, s in step_s.items()}
    return {"seed": seed, FIRST_ON: first_on, "wall": {"step_s": mean_s, "off_over": over}}


def _step_s(seen: Mapping[tuple[int, int], StepObservation], step: int) -> float:
    """Wall seconds of a step, on the rank that took longest."""
    return max(seen[step, rank].step_s for rank in range(NUM_RANKS))


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`correct-measured`: step time without over with, a row per seed."""
    head = ("what is wrong", "step time without / with, paired", "more")
    rows = table(head, _size_rows(content["real"]))
    return {"correct-measured": f"{rows}\n\n± is the standard error over steps."}


def _size_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    slow, num_counted = found["slow"], found["num_steps"] - found["first_counted_step"]
    for one in found["seeds"]:
        gain = one["wall"]["off_over"]
        yield (
            f"items of {percent(slow['shares'][1] - slow['shares'][0])} of the LLM's seconds take "
            f"{slow['factor']:g}x, seed {one['seed']}",
            f"{ratio(gain[ON]['mean'])} ±{gain[ON]['sd'] / num_counted**0.5:.2f}",
            f"an oracle's plans {ratio(gain[ORACLE]['mean'])}; acted on from step {one[FIRST_ON]}",
        )
