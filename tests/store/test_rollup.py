"""Roll-ups are kept run by run as files arrive; at any moment they are what one pass over everything would give."""

import dataclasses
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dflop import records as r
from dflop.store import live, migrate, rollup, schema
from dflop.store.ingest import ingest_pending
from dflop.store.reader import Reader
from tests.store.asking import begin, fill, write

SECONDS = st.floats(0.125, 8, width=16)


@st.composite
def observation(draw: st.DrawFn) -> r.StepObservation:
    spans = tuple(
        r.MicrobatchSpan(i, 1, draw(st.integers(0, 500)), 9, *(draw(SECONDS) for _ in range(2)), 0, 1, 2, 1, *measured)
        for i, measured in enumerate(draw(st.lists(st.sampled_from([(0.0, 0.0), (0.5, 1.0), (1.0, 0.25)]), max_size=2)))
    )
    few = st.integers(0, 1)
    fields = (
        st.sampled_from(["a", "b", "b/compare"]), few, st.integers(0, 2), st.sampled_from(["arrival", "balanced"]),
        st.integers(0, 3), st.sampled_from(["llm", "vision"]), few, few, *(SECONDS for _ in range(7)),
        st.sampled_from([math.nan, 1.0, 2.0]), st.sampled_from([math.nan, 3.0]), st.integers(0, 99), SECONDS,
    )  # fmt: skip
    return r.StepObservation(*map(draw, fields), spans)


@st.composite
def step_plan(draw: st.DrawFn) -> r.StepPlan:
    work = r.ModuleWork("llm", (0, 1), (0, 0), tuple(draw(st.integers(0, 500)) for _ in range(2)), (((0, 1),),))
    run_id, step = draw(st.sampled_from(["a", "b"])), draw(st.integers(0, 2))
    return r.StepPlan(run_id, step, "balanced", (0, 1), 1, (work,), 80, 0.5, 1.0)


SPAN_NAMES = ("forward", "receive_wait", "checkpoint")


@st.composite
def span(draw: st.DrawFn) -> r.RankSpan:
    run_id, attempt, step, rank = draw(st.sampled_from(["a", "b"])), *(draw(st.integers(0, n)) for n in (1, 2, 1))
    name, microbatch = draw(st.sampled_from(SPAN_NAMES)), draw(st.integers(-1, 2))
    return r.RankSpan(run_id, attempt, step, rank, "llm", 0, rank, 0, name, microbatch, 0.0, draw(SECONDS), 8)


def table(con: duckdb.DuckDBPyConnection, name: str) -> list[tuple[Any, ...]]:
    """Rows to twelve digits: the last bit of an average depends on the order in which rows are added up."""
    rows = con.execute(f'select * from "{name}"').fetchall()
    return sorted((tuple(float(f"{v:.12g}") if isinstance(v, float) else v for v in row) for row in rows), key=repr)


def steps_in_python(
    observed: list[r.StepObservation], plans: list[r.StepPlan]
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    groups: dict[tuple[Any, ...], list[r.StepObservation]] = defaultdict(list)
    for o in observed:
        groups[o.run_id, o.attempt, o.step, o.policy].append(o)
    found = {}
    for key, group in groups.items():
        losses = [o.loss for o in group if o.num_supervised_tokens and not math.isnan(o.loss)]
        rows = [sum(w.item_rows) for p in plans if (p.run_id, p.step) == (key[0], key[2]) for w in p.work]
        seconds = max(o.step_s for o in group), sum(o.busy_s for o in group)
        found[key] = len(group), *seconds, max(losses, default=None), max(rows, default=None)
    return found


def times_in_python(observed: list[r.StepObservation], spans: list[r.RankSpan]) -> dict[Any, tuple[Any, ...]]:
    step_s: dict[Any, float] = defaultdict(float)
    for o in observed:
        key = (o.run_id, o.attempt, o.step, o.rank)
        step_s[key] = max(step_s[key], o.step_s)
    groups: dict[Any, list[r.RankSpan]] = defaultdict(list)
    traced: dict[Any, set[Any]] = defaultdict(set)
    for s in spans:
        step = (s.run_id, s.attempt, s.step, s.rank)
        if step in step_s:
            groups[s.run_id, s.rank, s.name].append(s)
            traced[s.run_id, s.rank] |= {step} if s.name != "checkpoint" else set()
    found = {}
    for key, group in groups.items():
        steps = traced[key[:2]]
        found[key] = len(steps), len(group), sum(s.duration_s for s in group), sum(step_s[step] for step in steps)
    return found


PASSES = st.lists(st.lists(observation() | span() | step_plan(), max_size=8), min_size=1, max_size=3)


@pytest.mark.parametrize("num_examples", [4, pytest.param(40, marks=pytest.mark.lane("instances"))])
def test_roll_ups_kept_pass_by_pass_are_those_of_one_pass(
    tmp_path_factory: pytest.TempPathFactory, num_examples: int
) -> None:
    @settings(max_examples=num_examples)
    @given(PASSES)
    def check(passes: list[list[Any]]) -> None:
        check_passes(tmp_path_factory.mktemp("rollup"), passes)

    check()


def check_passes(root: Path, passes: list[list[Any]]) -> None:
    """Roll-ups after every pass are those that one pass makes anew, and those of plain Python."""
    everything = [o for observed in passes for o in observed if isinstance(o, r.StepObservation)]
    plans = [o for observed in passes for o in observed if isinstance(o, r.StepPlan)]
    spans = [o for observed in passes for o in observed if isinstance(o, r.RankSpan)]
    names = [rollup._table(path) for path in migrate.sql_files("rollups")]
    begin(live.live_file(root))
    with live.open_live(root) as (con, lease):
        for observed in passes:
            for o in observed:
                write(root, o, run_id=o.run_id)
            ingest_pending(con, root, live.silent, lease)
        kept = {name: table(con, name) for name in names}
        columns = "run_id, attempt, step, policy, num_ranks, step_s, busy_s, loss, num_llm_tokens"
        steps = {row[:4]: row[4:] for row in con.execute(f"select {columns} from step_rollup").fetchall()}
        columns = "run_id, rank, name, num_steps, num_spans, duration_s, step_s"
        times = {row[:3]: row[3:] for row in con.execute(f"select {columns} from span_rollup").fetchall()}
        with live.transaction(con):
            live.set_meta(con, "rollups_sha256", "as if a file had been edited")
            rollup.refresh(con)
        assert {name: table(con, name) for name in names} == kept
        assert con.execute("select count(*) from dirty_run").fetchone() == (0,)
    assert steps == steps_in_python(everything, plans)  # halves and quarters add exactly
    assert times == times_in_python(everything, spans)


def test_only_runs_with_new_observations_are_computed(tmp_path: Path, make) -> None:
    write(tmp_path, make.observation(0, run_id="a"), run_id="a")
    fill(tmp_path, make.observation(0, run_id="b"), run_id="b")
    with live.open_live(tmp_path) as (con, _):
        con.execute("update step_rollup set step_s = 99")  # whoever computes a run again undoes this
    fill(tmp_path, make.observation(1, run_id="b"), run_id="b")
    with live.open_live(tmp_path) as (con, _):
        found = con.execute("select run_id, step_s from step_rollup order by all").fetchall()
    assert found == [("a", 99.0), ("b", 1.0), ("b", 1.0)]


@st.composite
def nonsense(draw: st.DrawFn, make: Any) -> list[Any]:
    """Extremes in every field but those that say which rows belong together."""
    found = [draw(make.strategy(cls)) for cls in schema.KINDS.values() for _ in range(2)]
    for at, record in enumerate(found):
        if isinstance(record, r.StepObservation):
            tie = {"run_id": draw(st.sampled_from(["a", "a/compare"])), "module": "llm", "stage": 0, "step": 1}
            found[at] = dataclasses.replace(record, policy=draw(st.sampled_from(["arrival", "balanced"])), **tie)
        elif isinstance(record, r.StepPlan):
            found[at] = dataclasses.replace(record, run_id="a/compare", step=1)
    return found


@pytest.mark.parametrize("num_examples", [2, pytest.param(30, marks=pytest.mark.lane("instances"))])
def test_nonsense_comes_back_as_it_was_and_keeps_no_view_from_answering(
    tmp_path_factory: pytest.TempPathFactory, make, num_examples: int
) -> None:
    """Rows of every kind at once, extremes in every field."""
    many = {"parallel": r.ParallelSpec(1, 1, dp=-2, cp=2**63 - 1), "parameter_shards": 2}

    @settings(max_examples=num_examples)
    @given(nonsense(make))
    @example([make.observation(spans=(dataclasses.replace(make.observation().spans[0], num_tokens=2**63 - 1),) * 2)])
    @example([dataclasses.replace(make.plan(), modules=(dataclasses.replace(make.plan().modules[0], **many),))])
    def check(found: list[Any]) -> None:
        root = fill(tmp_path_factory.mktemp("nonsense"), *found)
        with Reader(root) as reader:
            read = repr([row for cls in schema.KINDS.values() for row in reader.records(cls)])
        # DuckDB may store 0.0 and -0.0 of one column as one constant.
        assert read.replace("-0.0", "0.0") == repr(found).replace("-0.0", "0.0")
        with live.open_live(root) as (con, _):
            for (view,) in con.execute("select view_name from duckdb_views() where not internal").fetchall():
                con.execute(f'select * from "{view}"').fetchall()

    check()


def compared(make: Any, first_step: int) -> list[Any]:
    """A step of each policy, with their plans."""
    run_id, found = "run/compare", []
    for step, policy in enumerate(("arrival", "balanced"), start=first_step):
        found.append(make.observation(step, run_id=run_id, policy=policy))
        found.append(make.step_plan(step, run_id=run_id))
    return found


def test_a_comparison_that_arrives_after_its_run_is_in_the_summary(tmp_path: Path, make) -> None:
    fill(tmp_path, make.observation(0))
    for count in (1, 2):  # ingested one by one: a comparison is one row however often it is added to
        fill(tmp_path, *compared(make, 2 * count), run_id="run/compare")
        with live.open_live(tmp_path) as (con, _):
            found = con.execute("select run_id, num_baseline_steps from comparison_rollup").fetchall()
        assert found == [("run", count)]
