"""What a run leaves on disk: its state, its journal, its plan, its checkpoints, as a crash or an editor leaves them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.jobs import overview
from dflop.jobs.basis import basis_of
from dflop.jobs.find import find_run
from dflop.jobs.rundir import RunDir
from dflop.launch import JobState, Journal
from dflop.records import to_dict
from dflop.train import manifest
from tests.builders import make_table
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt
from tests.jobs.made import add_job, make_run, save_step
from tests.report.detailed import SPLIT

_FILES = (
    "run.json",
    "jobs.jsonl",
    "plan.json",
    "cost_tables.json",
    "plan_basis.json",
    "config.resolved.yaml",
    "shapes.parquet",
)
_META = {"next_step": 20, "name": "step-00000020", "plan_id": "p", "state": {"a": [1]}}


def _run(folder: Path) -> RunDir:
    run = make_run(folder, state="running")
    add_job(run, "data-0", JobState.RUNNING, JobState.DONE)
    add_job(run, "train", JobState.RUNNING)
    run.write_plan(SPLIT, [make_table("llm")])
    (run.path / "plan_basis.json").write_text(
        json.dumps({"plan_id": SPLIT.plan_id, "from_step": 0, "num_steps": 0, "frozen": [], "factors": []})
    )
    return run


def _contents() -> st.SearchStrategy[tuple[str, bytes]]:
    plan, table = to_dict(SPLIT), [to_dict(make_table("llm"))]
    job = {"run_id": "r", "job_name": "r-train", "job_key": "k", "backend": "local", "job_id": "1", "state": "running",
    "reason": "",
           "folder": "/x", "num_tasks": 1, "attempt": 0, "observed_at_s": 1.0}  # fmt: skip
    state = {
        "run_id": "small-1",
        "config_key": "k",
        "num_steps": 40,
        "backend": "local",
        "state": "running",
        "trains": True,
    }
    basis = {"plan_id": SPLIT.plan_id, "from_step": 0, "num_steps": 0, "frozen": [], "factors": []}
    sound = dict(zip(_FILES, (state, job, plan, table, basis, {"name": "x"}, [1]), strict=True))

    def of(name: str) -> st.SearchStrategy[tuple[str, bytes]]:
        text = json.dumps(sound[name]).encode() + b"\n" * (name == "jobs.jsonl")
        end = b"\n" if name == "jobs.jsonl" else b""
        return st.tuples(
            st.just(name),
            st.one_of(
                hostile.broken(sound[name]).map(lambda v: json.dumps(v).encode() + end),
                hostile.broken_bytes([text]),
                hostile.VALUES.map(lambda v: json.dumps(v).encode() + end),
                st.sampled_from((b"", b"[" * 3000 + end, b"9" * 5000 + end, b"\xff\xfe" + end)),
            ),
        )

    return st.sampled_from(_FILES).flatmap(of)


def _directory(folder: Path) -> Callable[[Any], None]:
    whole = _run(folder)

    def check(example: tuple[str, bytes]) -> None:
        name, data = example
        path = whole.path / name
        before = path.read_bytes() if path.is_file() else None
        path.write_bytes(data)
        try:
            _ask(whole)
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)

    return check


def _ask(run: RunDir) -> None:
    """What `dflop runs`, a driver that takes a run up, and a report ask of its directory."""
    attempt(overview.run_rows, run.path.parent)
    attempt(overview.job_rows, run)
    attempt(overview.log_files, run, "", 0)
    attempt(find_run, "small", run.path.parent)
    for ask in (run.config, run.plan, run.cost_tables, run.shapes, run.profile_key, run.state):
        attempt(ask)
    attempt(basis_of, run)
    journal = Journal(run.path, run.run_id)
    attempt(journal.records)
    attempt(journal.live, "small-1/train")
    attempt(journal.ended, "small-1/data-0")


def _checkpoints(folder: Path) -> Callable[[Any], None]:
    def check(example: tuple[Any, Any, bytes]) -> None:
        run = RunDir(folder / "run")
        shutil.rmtree(run.path, ignore_errors=True)
        save_step(run, 10)
        save_step(run, 20)
        for name, content in zip(("manifest.json", "latest.json"), example[:2], strict=True):
            place = run.checkpoints / "step-00000020" if name == "manifest.json" else run.checkpoints
            (place / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        meta = manifest.read_latest(run.checkpoints)
        sound, _ = manifest.newest_sound(run.checkpoints)
        for found in (meta, sound):
            assert found is None or int(found["next_step"]) >= 0
        manifest.sweep(run.checkpoints)
        save_step(run, 30)
        newest = manifest.read_latest(run.checkpoints)
        assert newest is not None
        assert newest["next_step"] == 30, "a damaged checkpoint hides a newer one"

    return check


def _manifests() -> st.SearchStrategy[Any]:
    sound = {"meta": _META, "files": {"a.pt": [10, 123]}}
    text = hostile.broken_bytes([json.dumps(sound).encode()])
    return st.tuples(
        hostile.broken(sound) | text | hostile.VALUES, st.just(_META) | hostile.broken(_META) | hostile.VALUES
    )


TARGETS = (
    Target("run-directory", "run.json, journal, plan, tables, configuration of a run", _contents, _directory, quick=4),
    Target("checkpoints", "manifests of checkpoints and `latest.json`", _manifests, _checkpoints),
)
