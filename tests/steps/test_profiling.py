"""A model profile is done when it determines every cost table that the run needs, and not before."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dflop.cost.identity import with_table_id
from dflop.errors import LaunchError
from dflop.launch import JobHandle, JobSpec, JobState, JobStatus, Journal, wait
from dflop.profile.groups import used_modules
from dflop.records import Measurement, ProfileRecord
from dflop.run.directory import RunDir
from dflop.steps import planning, profiling, session
from dflop.steps.follow import Listener
from dflop.store.reader import Reader
from tests.builders import make_probe, make_specs, make_table, random_batch
from tests.jobs.configs import make_config
from tests.jobs.made import run_of
from tests.jobs.played import PlayedLauncher
from tests.store.asking import write

ENOUGH, ONE_SIZE, TOO_LARGE = "enough", "one size", "too large"
Rows = Callable[[str], str]


def rows_of(module: str, what: str) -> list[Measurement]:
    """Of four groups at two depths."""
    table = dataclasses.replace(make_table(module), profile_key="key", hardware="cpu")
    sizes = [64] * 4 if what == ONE_SIZE else [64, 128, 256, 512]
    found = [make_probe(table, depth, 1, size, size**2) for size in sizes for depth in (1, 2)]
    is_lost = what == TOO_LARGE
    return [dataclasses.replace(m, forward_s=0.0, status="oom") if is_lost and m.num_tokens > 64 else m for m in found]


class Prober(PlayedLauncher):
    """Jobs that are done at once and leave the rows that a test wants of each."""

    def __init__(self, run: RunDir, rows: Rows) -> None:
        super().__init__(JobState.DONE)
        self.run, self.rows, self.jobs = run, rows, list[tuple[str, ...]]()
        self.values = [{"num_measurements": 8}]

    def submit(self, spec: JobSpec) -> JobHandle:
        tp, *which = spec.args[3:]
        self.jobs.append((tp, *which[:1], *(["other groups"] if which[1:] not in ([], ["0"]) else [])))
        of = spec.args[4:5] or [s.module for s in used_modules(planning.bound_family(None), self.run.shapes())]
        rows = (row for module in of for row in rows_of(module, self.rows(module)))
        write(self.run.config().store, *rows, run_id=self.run.run_id, producer=spec.name)
        return super().submit(spec)


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Begins a run on a dataset with work for some encoders."""
    specs = make_specs("vision", "audio")
    monkeypatch.setattr(planning, "bound_family", lambda config: SimpleNamespace(specs=lambda: specs))
    monkeypatch.setattr(planning, "model_profile_key", lambda config: ("key", "cpu", {}))

    def make(name: str, *encoders: str) -> RunDir:
        run = run_of(tmp_path / "runs" / name, make_config(tmp_path, "model_profile.links_budget_s=0"))
        run.write_shapes(random_batch(8, encoders=encoders, seed=0))
        return run

    return make


def profile(run: RunDir, rows: Rows) -> tuple[list[tuple[str, ...]], list[str]]:
    """(jobs, lines) of profiling for a run."""
    prober, lines = Prober(run, rows), list[str]()
    data = ProfileRecord("data", "data", run.run_id, "{}", 8, 0, 1.0, 1.0)
    found = asyncio.run(profiling.profile_model(run, prober, Listener(lines.append), data))
    assert found.profile_key == "key"
    return prober.jobs, lines


def fit(run: RunDir) -> set[str]:
    return set(tables_of(run))


def tables_of(run: RunDir) -> dict[str, str]:
    """Module to table id."""
    found = planning.cost_tables(run.run_id, run.config(), "key", profiling.specs_of(run), lambda line: None)
    return {t.module: t.table_id for t in found.tables}


@pytest.mark.parametrize("lacking", [ONE_SIZE, TOO_LARGE])
def test_probes_that_determine_no_table_are_added_to_in_the_same_run_and_in_the_next(begin, lacking):
    run = begin("first-1", "vision")
    jobs, lines = profile(run, lambda module: lacking if module == "llm" else ENOUGH)
    assert jobs == [("1",), ("1", "llm", "other groups")]
    assert any(
        "determines no cost table of `llm`, tp 1; needed: two token counts (have [64])" in line for line in lines
    )
    # It was of no use; another run does not take the profile for done.
    again = begin("second-1", "vision")
    jobs, _ = profile(again, lambda module: ENOUGH)
    assert jobs == [("1", "llm", "other groups")]
    assert fit(again) == {"llm", "vision"}
    assert profile(begin("third-1", "vision"), lambda module: ENOUGH)[0] == []


def test_a_module_that_earlier_data_had_nothing_for_is_probed_when_data_has(begin):
    first, second = begin("first-1", "vision"), begin("second-1", "vision", "audio")
    assert profile(first, lambda module: ENOUGH)[0] == [("1",)]
    assert fit(first) == {"llm", "vision"}
    jobs, lines = profile(second, lambda module: ENOUGH)
    assert jobs == [("1", "audio")]
    assert any("of `audio`, tp 1; it was not probed" in line for line in lines)
    before = tables_of(first)
    assert fit(second) == {"llm", "vision", "audio"}
    with Reader(second.config().store) as reader:
        after = {t.module: t.table_id for t in reader.latest_cost_tables("key")}
    assert before.items() <= after.items(), "tables that were there stay"


def test_tables_without_their_probes_are_good_enough(begin):
    run = begin("first-1")
    table = with_table_id(dataclasses.replace(make_table("llm"), profile_key="key"))
    record = ProfileRecord("key", "model", run.run_id, "{}", 8, 0, 1.0, 1.0)
    write(run.config().store, table, record, run_id=run.run_id)
    assert profile(run, lambda module: ENOUGH)[0] == []


class Queue(PlayedLauncher):
    """Jobs that wait until all of their wave are in the queue, and end then: one fails, one waits for ever."""

    def __init__(self, *waves: set[str], failing: str = "", waiting: str = "") -> None:
        super().__init__(JobState.QUEUED)
        self.waves, self.failing, self.waiting, self.names = waves, failing, waiting, dict[str, str]()

    def collect(self, handle: JobHandle) -> list[dict[str, int]]:
        super().collect(handle)
        return [{"num_samples": 2} if self.names[handle.job_id] in DATA else {"num_measurements": 3}]

    def submit(self, spec: JobSpec) -> JobHandle:
        handle = super().submit(spec)
        self.names[handle.job_id] = spec.name.removeprefix("queued-")
        return handle

    def poll(self, handle: JobHandle) -> JobStatus:
        name, job = self.names[handle.job_id], handle.job_id
        (wave,) = (wave for wave in self.waves if name in wave)
        if wave <= set(self.names.values()) and name != self.waiting and self.state[job] is JobState.QUEUED:
            self.state[job] = JobState.FAILED if name == self.failing else JobState.DONE
        return super().poll(handle)

    def ended(self) -> dict[str, JobState]:
        return {name: self.state[job] for job, name in self.names.items()}


DATA = {"data-0", "data-1"}
PROBES = {f"profile-tp{tp}-{module}" for tp in (1, 2) for module in ("vision", "llm")} | {"profile-links"}


@pytest.fixture
def profile_on(begin, monkeypatch):
    """Profiles a run on Slurm, with jobs of a queue."""
    run = begin("queued", "vision")
    cluster = run.config().cluster
    slurm = cluster.slurm.model_copy(update={"poll_interval_s": 0.01})
    there = {"backend": "slurm", "num_processes_per_node": 2, "slurm": slurm}
    config = run.config().model_copy(
        update={
            "cluster": cluster.model_copy(update=there),
            "model_profile": run.config().model_profile.model_copy(update={"tp": (1, 2), "links_budget_s": 1.0}),
            "data_profile": run.config().data_profile.model_copy(update={"num_shards": 2}),
        }
    )
    monkeypatch.setattr(RunDir, "config", lambda self: config)
    monkeypatch.setattr(profiling, "data_profile_key", lambda *_: profiling.DataKey("data", {}))
    monkeypatch.setattr(profiling, "take_samples", lambda *_: None)
    monkeypatch.setattr(planning, "profile_gaps", lambda *_: [])
    monkeypatch.setattr(wait, "has_all_results", lambda _: True)

    def go(queue: Queue) -> tuple[ProfileRecord, RunDir]:
        monkeypatch.setattr(session, "launcher_of", lambda *_: queue)
        return asyncio.run(session.profiled(run, Listener(str))), run

    return go


def test_whatever_can_wait_in_the_queue_waits_at_once(profile_on):
    """Two waits in all: of shards, and of the modules of every degree with the messages."""
    queue = Queue(DATA, PROBES)
    found, _ = profile_on(queue)
    assert found.num_rows == 5 * 3, "of four modules and of the messages"
    assert set(queue.ended()) == DATA | PROBES


def test_a_failing_degree_is_the_error_and_what_the_others_measured_is_kept(profile_on):
    queue = Queue(DATA, PROBES, failing="profile-tp2-llm")
    with pytest.raises(LaunchError, match="1 of 5 jobs failed, the others keep running: the job is failed"):
        profile_on(queue)
    again = Queue({"profile-tp2-llm"})
    again.state, again.names = queue.state, queue.names
    found, _ = profile_on(again)
    assert found.num_rows == 5 * 3
    assert len(again.names) == len(DATA | PROBES) + 1, "one job more"


def test_the_next_driver_adopts_what_waits_in_the_queue(profile_on, monkeypatch):
    """The first dies while all wait; the second submits nothing of the first wave again."""
    queue = Queue({*DATA, "never"}, PROBES)
    polled = queue.poll

    def killed(handle: JobHandle) -> JobStatus:
        if len(queue.names) == len(DATA):
            raise MemoryError("the driver was killed")
        return polled(handle)

    def no_cancel(*handles: JobHandle) -> None:
        if handles:
            raise LaunchError("one that is killed cancels nothing")

    monkeypatch.setattr(queue, "poll", killed)
    monkeypatch.setattr(queue, "cancel", no_cancel)
    with contextlib.suppress(MemoryError):
        profile_on(queue)
    assert set(queue.names.values()) == DATA
    second = Queue(DATA, PROBES)
    second.state, second.names = queue.state, queue.names
    found, run = profile_on(second)
    assert (found.num_rows, len(second.names)) == (5 * 3, 2 + 5)
    assert len(Journal(run.path, run.run_id).jobs()) == 2 + 5
