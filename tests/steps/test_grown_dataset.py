"""A dataset that has grown: known rows come from the store, and the profile is what a whole one would be."""

import asyncio
import dataclasses
import importlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dflop.data.demo_content import train_tokenizer
from dflop.launch import JobHandle, JobSpec, JobState
from dflop.records import ProfileRecord
from dflop.run.directory import RunDir
from dflop.steps.follow import Listener
from dflop.steps.session import profiled_data
from dflop.store import snapshot
from dflop.store.ingest import ingest
from dflop.store.profile_copy import copy_profile
from tests.data.helpers import chat
from tests.jobs.configs import make_config
from tests.jobs.made import run_of
from tests.jobs.played import PlayedLauncher

ROWS = [
    chat("a cat", "b"),
    chat("<image> a", "b", image="cat.png"),
    '{"broken',
    chat("<image> a", "b", image="gone.png"),
]


class Inline(PlayedLauncher):
    """Jobs that have run, in this process, when they are submitted."""

    def __init__(self) -> None:
        super().__init__(JobState.DONE)
        self.counts: dict[str, dict[str, int]] = {}

    def submit(self, spec: JobSpec) -> JobHandle:
        handle = super().submit(spec)
        name, _, function = spec.entry.partition(":")
        self.counts[handle.job_id] = getattr(importlib.import_module(name), function)(*spec.args)
        return handle

    def collect(self, handle: JobHandle) -> list[dict[str, int]]:
        return [self.counts[handle.job_id]]

    @property
    def num_profiled(self) -> int:
        return int(sum(found["num_samples"] + found["num_quarantined"] for found in self.counts.values()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer and one picture."""
    folder = tmp_path_factory.mktemp("grown")
    (folder / "data" / "media").mkdir(parents=True)
    Image.new("RGB", (56, 28)).save(folder / "data" / "media" / "cat.png")
    train_tokenizer(["a picture of a cat\n"], folder / "data" / "tokenizer.json")
    return folder


def profile(run: RunDir) -> tuple[ProfileRecord, int, list[str]]:
    """(record, rows that jobs have profiled, lines)."""
    launcher, lines = Inline(), list[str]()
    found = asyncio.run(profiled_data(run, launcher, Listener(lines.append)))
    ingest(run.config().store)
    return found, launcher.num_profiled, lines


def run_in(folder: Path, store: str, annotations: Path) -> RunDir:
    config = make_config(
        folder, f"store={folder / store}", f"dataset.annotations={annotations}", "data_profile.num_shards=3",
        "data_profile.max_bad_frac=1",
    )  # fmt: skip
    return run_of(folder / "runs" / "run-1", config)


def contents(run: RunDir, key: str) -> list[list[tuple]]:
    """Every row a reader sees of a profile, in order, but for which file it came in."""
    con, _ = snapshot.open_current(run.config().store)
    with con:
        sql = "select * exclude (_run_id, _producer, _seq) from {} where profile_key = ? order by sample_index"
        return [con.execute(sql.format(table), [key]).fetchall() for table in ("v_sample_shape", "quarantined_sample")]


def text_of(rows: list[object]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.mark.parametrize("how", ["rows", "file", "weights"])
def test_a_grown_profile_is_what_a_whole_one_would_be(how, folder, tmp_path):
    numbers = iter(range(1000))

    some_rows = st.lists(st.sampled_from(ROWS), min_size=1, max_size=5)

    @settings(max_examples=2)
    @given(some_rows, some_rows)
    def grows(before, after):
        base = tmp_path / str(next(numbers))
        base.mkdir()
        (base / "data").symlink_to(folder / "data")
        rows = base / "rows-0.jsonl"
        rows.write_text(text_of(before))
        weight = ", weight: 2" if how == "weights" else ""
        given = base / "mixture.yaml"
        given.write_text(f"datasets:\n  - {{path: '{base}/rows-*.jsonl'{weight}}}\n")
        first, num_first, _ = profile(run_in(base, "store", given))
        assert num_first == len(before) == first.num_rows + first.num_quarantined
        if how == "rows":
            rows.write_text(text_of([*before, *after]))
        elif how == "file":
            (base / "rows-1.jsonl").write_text(text_of(after))
        else:
            (base / "other.jsonl").write_text(text_of(after))
            given.write_text(f"{given.read_text()}  - {{path: {base}/other.jsonl, weight: 1}}\n")
        run, fresh = run_in(base, "store", given), run_in(base, "fresh", given)
        whole, num_whole, _ = profile(fresh)
        run = run_in(base, "store", given)
        found, num_new, lines = profile(run)
        assert (num_whole, num_new) == (len(before) + len(after), len(after))
        said = (
            f"{len(before)} of {len(before) + len(after)} rows from profile {first.profile_key}, {len(after)} profiled"
        )
        assert said in lines
        assert (found.profile_key, found.num_rows, found.num_quarantined, found.inputs) == (
            whole.profile_key, whole.num_rows, whole.num_quarantined, whole.inputs,
        )  # fmt: skip
        assert contents(run, found.profile_key) == contents(fresh, found.profile_key)

    grows()


def test_rows_that_have_changed_are_not_taken_and_neither_are_profiles_that_lack_some(folder, tmp_path):
    (tmp_path / "data").symlink_to(folder / "data")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text_of(ROWS[:2]))
    run = run_in(tmp_path, "store", rows)
    first, *_ = profile(run)
    rows.write_text(text_of([*ROWS[1::-1], *ROWS[2:]]))
    assert profile(run)[1] == len(ROWS), "other rows under the same numbers"
    store = run.config().store
    assert not copy_profile(store, dataclasses.replace(first, num_rows=3), "key", "run")
    assert copy_profile(store, first, "key", "run")
    ingest(store)
    assert [row[1:] for row in contents(run, "key")[0]] == [row[1:] for row in contents(run, first.profile_key)[0]]
