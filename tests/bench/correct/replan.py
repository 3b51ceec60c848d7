"""A run whose mixture changes midway: `python -m tests.bench.correct --part replan`. Real runs of the flow.

Texts first, pictures and clips behind them. Three processes share two cores, so that what a plan decides is who gets
them: with texts the encoder's process idles, with clips everybody waits for it. `act` notices, plans anew, leaves a
checkpoint and goes on under the other plan; `off` trains the same steps under the plan it began with; `short` may act,
too, but has so few steps left that it should stay.
"""

from __future__ import annotations

import asyncio
import itertools
import json
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

from dflop.config import load_config
from dflop.data.demo import make_demo_dataset
from dflop.jobs.profiling import profile_modules
from dflop.jobs.rundir import RunDir
from dflop.jobs.talk import say
from dflop.records import Plan, StepObservation, StepPlan
from dflop.store.console import query
from dflop.store.reader import Reader
from dflop.store.spool import read_spool
from tests.bench.correct import real_runs
from tests.bench.correct.real_runs import NUM_ROWS, Found
from tests.jobs.changing import encoder_heavy_model

BATCH_SIZE, NUM_PICTURES_AMONG_TEXTS = 24, 2
NUM_TEXT_STEPS, NUM_STEPS, NUM_SHORT_STEPS = 40, 120, 43
SKIPPED = 3
"""First steps of a start, and of a part, that are not counted."""
ARMS = {
    "act": ("replan.mode=act", f"train.num_steps={NUM_STEPS}"),
    "off": ("replan.mode=off", f"train.num_steps={NUM_STEPS}"),
    "short": ("replan.mode=act", f"train.num_steps={NUM_SHORT_STEPS}"),
}
LIMIT_S = 3600
MAX_LOSS_ERROR = 1e-5


def main(sizes: Path | None, seeds: Sequence[int]) -> Found:
    """One run each, whatever the seeds: each has parts of many steps of its own."""
    return real_runs.in_a_process_of_its_own(__name__, seeds[:1])


def run() -> dict[str, Any]:
    """Measures and prints."""
    with tempfile.TemporaryDirectory(prefix="dflop-bench-") as folder:
        config = _prepare(Path(folder))
        runs = {arm: _flow(Path(folder), config, arm) for arm in ARMS}
        found = {arm: _figures(of) for arm, of in runs.items()}
        for arm, figures in found.items():
            _tell(arm, figures)
        compared = _compared(runs["act"], runs["off"])
        print(f"act beside off: {compared}", flush=True)
        return {"num_text_steps": NUM_TEXT_STEPS, "runs": found, "act_and_off": compared}


def _prepare(folder: Path) -> dict[str, Any]:
    """A configuration without settings of its own, its data and modules profiled into the store that all begin with."""
    data = folder / "data"
    make_demo_dataset(data, NUM_ROWS)
    rows = [json.loads(line) for line in (data / "annotations.jsonl").read_text().splitlines()]
    texts = [r for r in rows if not {"image", "video", "audio"} & set(r)]
    seen = sorted((r for r in rows if {"image", "video"} & set(r)), key=lambda r: "video" not in r)
    clips, pictures = itertools.cycle(seen), itertools.cycle(r for r in seen if "image" in r)
    words = itertools.cycle(texts)
    mixed = []
    for step in range(NUM_STEPS):
        num_seen = NUM_PICTURES_AMONG_TEXTS if step < NUM_TEXT_STEPS else BATCH_SIZE
        mixed += itertools.islice(pictures if step < NUM_TEXT_STEPS else clips, num_seen)
        mixed += itertools.islice(words, BATCH_SIZE - num_seen)
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
        "train": {"learning_rate": 0.0001, "checkpoint_every": 20},
        "compare": {"num_batches": 0},
        "replan": {"check_every_s": 5, "min_steps": NUM_TEXT_STEPS, "max_replans": 1},
    }  # fmt: skip
    path = folder / "changing.json"
    path.write_text(json.dumps(content))
    asyncio.run(profile_modules(load_config(path, [f"train.num_steps={NUM_STEPS}"]), say))
    return content


def _flow(folder: Path, content: Mapping[str, Any], arm: str) -> RunDir:
    """`dflop run`, to its end.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    own = folder / arm
    own.mkdir()
    shutil.copytree(folder / "store", own / "store", symlinks=True)
    path = own / "changing.json"
    path.write_text(json.dumps({**content, "store": str(own / "store"), "runs": str(own / "runs")}))
    words = [word for setting in ARMS[arm] for word in ("--set", setting)]
    env = {**os.environ, "PREFECT_HOME": str(folder / "prefect")}
    command = [sys.executable, "-m", "dflop.cli", "run", str(path), *words]
    said = own / "run.log"
    say(f"{arm}: {' '.join(command[3:])}")
    with said.open("w") as out:
        ended = subprocess.run(command, env=env, stdout=out, stderr=out, timeout=LIMIT_S, cwd=own)
    if ended.returncode:
        raise SystemExit(said.read_text()[-5000:])
    return RunDir(next((own / "runs").glob("changing-*")))


def _observed(run: RunDir) -> list[StepObservation]:
    """Of rank 0, by step."""
    seen = [o for o in read_spool(run.config().store, StepObservation) if o.rank == 0]
    return sorted(seen, key=lambda o: (o.step, o.attempt))


def _figures(run: RunDir) -> dict[str, Any]:
    store = run.config().store
    seen, plans = _observed(run), {p.plan_id: p for p in read_spool(store, Plan)}
    with Reader(store) as reader:
        decisions = [d for d in reader.decisions(run.run_id) if d.kind != "rescale"]
    parts = {
        "texts": [o for o in seen if o.step < NUM_TEXT_STEPS and o.attempt == 1],
        "pictures, first plan": [o for o in seen if o.step >= NUM_TEXT_STEPS and o.attempt == 1],
        "pictures, second plan": [o for o in seen if o.attempt > 1],
    }
    return {
        "parts": {name: _part(of[SKIPPED:]) for name, of in parts.items() if len(of) > SKIPPED},
        "plans": {i: p.reason for i, p in plans.items() if p.candidate_rank == 0},
        "layouts": {i: _layout(p) for i, p in plans.items() if p.candidate_rank == 0},
        "decisions": [asdict(d) for d in decisions],
        "history": [list(row) for row in query(store, "select * from v_history order by all")[1]],
        "seconds_from_the_change_on": seen[-1].observed_at_s - seen[NUM_TEXT_STEPS].observed_at_s,
    }


def _part(seen: Sequence[StepObservation]) -> dict[str, float]:
    step_s = statistics.median(o.step_s for o in seen)
    return {"num_steps": len(seen), "first_step": seen[0].step, "step_s": step_s, "samples_per_s": BATCH_SIZE / step_s}


def _layout(plan: Plan) -> dict[str, Any]:
    degrees = {m.module: {"dp": m.parallel.dp, "pp": m.parallel.pp} for m in plan.modules}
    return {"layout": plan.layout, "num_microbatches": plan.num_microbatches, "modules": degrees}


def _compared(act: RunDir, off: RunDir) -> dict[str, Any]:
    """Whether anything was lost, and what was gained."""
    losses = [{o.step: o.loss for o in _observed(run)} for run in (act, off)]
    errors = [abs(losses[0][step] / losses[1][step] - 1) for step in range(NUM_STEPS)]
    samples = [{p.step: p.sample_index for p in read_spool(r.config().store, StepPlan)} for r in (act, off)]
    found = {
        "steps_observed_once": [o.step for o in _observed(act)] == list(range(NUM_STEPS)),
        "same_samples_in_every_step": samples[0] == samples[1],
        "largest_relative_difference_of_losses": max(errors),
    }
    if max(errors) > MAX_LOSS_ERROR or not all(list(found.values())[:2]):
        print(f"something was lost: {found}", file=sys.stderr)
    return found


def _tell(arm: str, figures: Mapping[str, Any]) -> None:
    print(f"{arm}: {figures['seconds_from_the_change_on']:.1f} s from the change of the mixture to the end")
    for name, part in figures["parts"].items():
        print(f"  {name:22s} from step {part['first_step']:3d}: step {part['step_s']:.3f} s, "
              f"{part['samples_per_s']:.1f} samples/s")  # fmt: skip
    for plan_id, layout in figures["layouts"].items():
        print(f"  plan {plan_id}: {layout}")
    for d in figures["decisions"]:
        print(f"  step {d['step']}: {d['kind']}, {d['subject']}: {d['verdict']}: {d['detail']}")
    sys.stdout.flush()


if __name__ == "__main__":
    Path(sys.argv[-1]).write_text(json.dumps(run()))
