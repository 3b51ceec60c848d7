"""A run whose mixture changes midway, and is planned anew: `python -m tests.bench.correct --part replan`.

Texts first, pictures and clips behind them. Three processes share two cores, so that what a plan decides is who gets
them: with texts the encoder's process idles, with clips everybody waits for it. `act` may plan anew, once; `off` trains
the same steps under the plan it began with. Everything is measured, in real runs of the flow.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from dflop.config import load_config
from dflop.data.demo import make_demo_dataset
from dflop.jobs.profiling import profile_modules
from dflop.jobs.rundir import RunDir
from dflop.jobs.talk import say
from dflop.records import StepObservation, StepPlan
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from tests.jobs.changing import encoder_heavy_model

NUM_ROWS, BATCH_SIZE, NUM_PICTURES_AMONG_TEXTS, NUM_TEXT_STEPS, NUM_STEPS = 320, 24, 2, 40, 100
NUM_SKIPPED = 3
"""First steps of the second plan, which are not counted."""
MAX_LOSS_ERROR = 1e-5


def paired(slower_s: Sequence[float], faster_s: Sequence[float]) -> dict[str, float]:
    """Geometric mean of the ratios of step times of the same batches, and its relative standard error."""
    logs = np.log(np.array(slower_s) / np.array(faster_s))
    return {"mean": math.exp(logs.mean()), "stderr_frac": float(logs.std(ddof=1)) / math.sqrt(len(logs))}


def replan(seeds: Sequence[int]) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    """One pair of runs, whatever the seeds."""
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as name:
        folder = Path(name)
        content = _changing(folder)
        return _compared({mode: _flow(folder, content, mode) for mode in ("act", "off")})


def _compared(runs: Mapping[str, RunDir]) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    seen = {mode: _observed(run) for mode, run in runs.items()}
    with Reader(runs["act"].config().store) as reader:
        decisions = [asdict(d) for d in reader.decisions(runs["act"].run_id) if d.kind != "rescale"]
    second = [o.step for o in seen["act"] if o.attempt > 1] or [NUM_TEXT_STEPS]
    steps = range(second[0] + NUM_SKIPPED, NUM_STEPS)
    step_s = {mode: [next(o.step_s for o in of if o.step == step) for step in steps] for mode, of in seen.items()}
    losses = [{o.step: o.loss for o in of} for of in seen.values()]
    error = max(abs(losses[0][step] / losses[1][step] - 1) for step in range(NUM_STEPS))
    samples = [{p.step: p.sample_index for p in read_spool(r.config().store, StepPlan)} for r in runs.values()]
    gain = paired(step_s["off"], step_s["act"])
    compared = {
        "paired_steps": [steps[0], steps[-1]], "off_over_act": gain["mean"], "stderr_frac": gain["stderr_frac"],
        "step_s": {mode: statistics.mean(of) for mode, of in step_s.items()},
        "largest_relative_difference_of_losses": error,
    }  # fmt: skip
    print(f"act and off: {compared}", flush=True)
    bounds = [
        ("planned anew once", any(o.attempt > 1 for o in seen["act"])),
        ("every step observed once", [o.step for o in seen["act"]] == list(range(NUM_STEPS))),
        ("same samples in every step", samples[0] == samples[1]),
        (f"losses differ by {error:.1g}", error <= MAX_LOSS_ERROR),
    ]
    return {"runs": {"act": {"decisions": decisions}}, "act_and_off": compared}, bounds


def _changing(folder: Path) -> dict[str, Any]:
    """A configuration, its data and modules profiled into the store that both runs begin with."""
    data = folder / "data"
    make_demo_dataset(data, NUM_ROWS)
    rows = [json.loads(line) for line in (data / "annotations.jsonl").read_text().splitlines()]
    seen = sorted((r for r in rows if {"image", "video"} & set(r)), key=lambda r: "video" not in r)
    clips, pictures = itertools.cycle(seen), itertools.cycle(r for r in seen if "image" in r)
    words = itertools.cycle(r for r in rows if not {"image", "video", "audio"} & set(r))
    mixed: list[dict[str, Any]] = []
    for step in range(NUM_STEPS):
        num_seen, kind = (NUM_PICTURES_AMONG_TEXTS, pictures) if step < NUM_TEXT_STEPS else (BATCH_SIZE, clips)
        mixed += [*itertools.islice(kind, num_seen), *itertools.islice(words, BATCH_SIZE - num_seen)]
    lines = [json.dumps(row | {"id": f"{row['id']}-{i}"}) for i, row in enumerate(mixed)]
    (data / "changing.jsonl").write_text("\n".join(lines) + "\n")
    content = {
        "name": "changing",
        "model": str(encoder_heavy_model(folder, encoder_layers=8, llm_layers=3)),
        "cluster": {"name": "here", "num_processes_per_node": 3, "num_cores_per_node": 2, "memory_per_process_gib": 3},
        "dataset": {
            "annotations": str(data / "changing.jsonl"), "media_root": str(data / "media"),
            "tokenizer": str(data / "tokenizer.json"), "shuffle_window": 2 * BATCH_SIZE,
        },
        "store": str(folder / "store"),
        "runs": str(folder / "runs"),
        "model_profile": {"budget_s": 30},
        "plan": {
            "global_batch_size": BATCH_SIZE, "layouts": ["split"], "microbatch_choices": [3, 6],
            "horizon_steps": NUM_TEXT_STEPS, "top": 12,
        },
        "train": {"learning_rate": 0.0001, "checkpoint_every": 20, "num_steps": NUM_STEPS},
        "compare": {"num_batches": 0},
        "replan": {"check_every_s": 5, "min_steps": NUM_TEXT_STEPS, "max_replans": 1},
    }  # fmt: skip
    path = folder / "changing.json"
    path.write_text(json.dumps(content))
    asyncio.run(profile_modules(load_config(path), say))
    return content


def _flow(folder: Path, content: Mapping[str, Any], mode: str) -> RunDir:
    """`dflop run`, to its end."""
    own = folder / mode
    own.mkdir()
    shutil.copytree(folder / "store", own / "store", symlinks=True)
    path = own / "changing.json"
    path.write_text(json.dumps({**content, "store": str(own / "store"), "runs": str(own / "runs")}))
    command = [sys.executable, "-m", "dflop.cli", "run", str(path), "--set", f"replan.mode={mode}"]
    env = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    with (own / "run.log").open("w") as out:
        ended = subprocess.run(command, env=env, stdout=out, stderr=out, cwd=own)
    if ended.returncode:
        raise SystemExit((own / "run.log").read_text()[-5000:])
    return RunDir(next((own / "runs").glob("changing-*")))


def _observed(run: RunDir) -> list[StepObservation]:
    """Of rank 0, by step."""
    seen = [o for o in read_spool(run.config().store, StepObservation) if o.rank == 0]
    return sorted(seen, key=lambda o: (o.step, o.attempt))
