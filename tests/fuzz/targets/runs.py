"""What a run leaves on disk and what its launcher hears: plans, costs, state, checkpoints, answers of Slurm."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from ruamel.yaml import YAML

from dflop.launch import JobState, Journal
from dflop.launch.watcher import epoch_s, read_rows
from dflop.records import to_dict
from dflop.run import status
from dflop.run.directory import RunDir
from dflop.run.find import find_run
from dflop.run.plan_scope import basis_of
from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.costs_of_samples import SampleCosts, sample_costs_from_tables
from dflop.sampler.rank_plans import warm_up
from dflop.train import manifest
from tests.builders import make_sample, make_table
from tests.fuzz import hostile
from tests.fuzz.target import Strategy, Target, attempt, made
from tests.jobs.made import add_job, make_run, save_step
from tests.report.detailed import SPLIT


def sound_tables() -> list[dict[str, Any]]:
    """Cost tables as `cost_tables.json` has them."""
    return [to_dict(make_table(module)) for module in ("vision", "llm")]


def _tables(folder: Path, example: bytes) -> None:
    path = folder / "cost_tables.json"
    path.write_bytes(example)
    found = attempt(sample_costs_from_tables, path, [make_sample(0, 10, [("vision", 40)]), make_sample(1, 30)])
    assert found is None or len(found) == 2


def _compiled(folder: Path) -> Path:
    for sync in ("step", "microbatch"):
        warm_up(sync)
    return folder


def _costs(folder: Path, example: bytes) -> None:
    path = folder / "costs.npz"
    path.write_bytes(example)
    costs = attempt(SampleCosts.load, path)
    if costs is not None:
        sampler = attempt(BalancedBatchSampler, costs, global_batch_size=2, num_replicas=1, rank=0)
        assert sampler is None or next(iter(sampler))


_BASIS = {"plan_id": SPLIT.plan_id, "from_step": 0, "num_steps": 0, "frozen": [], "factors": []}


def _run(folder: Path) -> RunDir:
    run = make_run(folder, state="running")
    add_job(run, "data-0", JobState.RUNNING, JobState.DONE)
    add_job(run, "train", JobState.RUNNING)
    run.write_shapes([make_sample(0, 10)])
    run.write_plan(SPLIT, [make_table("llm")])
    (run.path / "plan_basis.json").write_bytes(hostile.as_json(_BASIS))
    return run


def _content(path: Path) -> Strategy:
    """A file of a run, broken."""
    data, is_journal = path.read_bytes(), path.suffix == ".jsonl"
    if path.suffix == ".parquet":
        return st.tuples(st.just(path.name), hostile.broken_bytes(data))
    documents = map(YAML(typ="safe", pure=True).load, data.splitlines() if is_journal else [data])
    return st.tuples(st.just(path.name), hostile.broken_json(*documents, end=b"\n" if is_journal else b""))


def _directory(run: RunDir, example: tuple[str, bytes]) -> None:
    """What `dflop runs`, a driver that takes a run up, and a report ask of a directory."""
    shutil.rmtree(run.path)
    shutil.copytree(made(_run) / "runs" / run.path.name, run.path)
    (run.path / example[0]).write_bytes(example[1])
    journal = Journal(run.path, run.run_id)
    for ask, *words in (
        (status.run_rows, [run]), (status.job_rows, run), (status.log_files, run, "", 0),
        (find_run, "small", run.path.parent), (run.config,), (run.plan,), (run.cost_tables,), (run.shapes,),
        (run.profile_key,), (run.state,), (basis_of, run), (journal.records,), (journal.latest,),
    ):  # fmt: skip
        attempt(ask, *words)


def _checkpoints(folder: Path, example: bytes) -> None:
    run = RunDir(folder / "run")
    shutil.rmtree(run.path, ignore_errors=True)
    for step in (10, 20):
        save_step(run, step)
    (run.checkpoints / "step-00000020" / "manifest.json").write_bytes(example)
    for found in (manifest.read_latest(run.checkpoints), manifest.newest_sound(run.checkpoints)[0]):
        assert found is None or int(found["next_step"]) >= 0
    manifest.sweep(run.checkpoints)
    save_step(run, 30)
    newest = manifest.read_latest(run.checkpoints)
    assert newest is not None
    assert newest["next_step"] == 30, "a damaged checkpoint hides a newer one"


_ANSWERS = (
    "0|123|RUNNING|1700000000|1700000100|n1|None|dflop-a\n1|123_[4-6,9%2]|PENDING|1700000000|N/A||Priority|b\n"
    "0|9_3|CONFIGURING|2026-01-01T00:00:00|2026-01-01T00:00:00|n1|(null)|c|d",
    "0|123_0|COMPLETED|1700000000|1|n1|None|allocation\n0|7|CANCELLED by 0|Unknown|N/A||None|x\n"
    "0|8|OUT_OF_MEMORY|1|1|n|a|b",
)
_WORDS = (
    "|", "\n", "123_[0-99999999999]", "1_[0-9:0]", "1_[9-1]", "[", "N/A", "Unknown", "CANCELLED by -1",
    "99999999999999999999", "9999-12-31T23:59:59", "1_[" + "1," * 500 + "1]",
)  # fmt: skip


def _answer(_folder: Path, example: str) -> None:
    for row in read_rows(example, 1.8e9):
        assert 0 < len(row.job_ids) <= 5_000_000, "elements that no array has"
        assert isinstance(row.status.reason, str)
    for line in example.splitlines():
        epoch_s(line)


_COSTS = {"fixed_s": 0.5, "origin": "x", "seconds": [1.0, 2.0, 3.0], "tokens": [3, 4, 5], "index": [0, 1, 2]}
_SAVED = io.BytesIO()
np.savez(_SAVED, **{name: np.array(value) for name, value in _COSTS.items()})
_META = {"next_step": 20, "name": "step-00000020", "plan_id": "p", "state": {"a": [1]}}
_MANIFEST = hostile.broken_json({"meta": _META, "files": {"a.pt": [10, 123]}})
_FILES = st.deferred(
    lambda: st.one_of([_content(path) for path in sorted((made(_run) / "runs/small-1").iterdir()) if path.is_file()])
)
_LINES = [line for answer in _ANSWERS for line in answer.splitlines()]
_LISTS = [f"0|{word}|PENDING|{9:0>20}|9|n|None|a" for word in _WORDS if "[" in word]
TARGETS = (
    Target("cost-tables", "`cost_tables.json` with values of any type", hostile.broken_json(sound_tables()), _tables),
    Target("sample-costs", "bytes of saved sample costs broken", hostile.broken_bytes(_SAVED.getvalue()), _costs,
           _compiled),
    Target("run-directory", "run.json, journal, plan, tables, configuration of a run",
           _FILES, _directory, _run, quick=4),
    Target("checkpoints", "manifests of checkpoints", _MANIFEST, _checkpoints),
    Target("slurm-answers", "answers of squeue and sacct cut up",
           hostile.broken_text((*_ANSWERS, *_LINES, *_LISTS), _WORDS), _answer),
)  # fmt: skip
