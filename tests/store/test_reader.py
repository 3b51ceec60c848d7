import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from dflop import records as r
from dflop.errors import StoreError
from dflop.store import console, migrate
from dflop.store.reader import Reader
from tests.builders import make_corrections, make_decision, random_batch
from tests.plan.test_worst import largest_of
from tests.store import asking


@pytest.fixture
def fill(tmp_path: Path) -> Callable[..., Path]:
    return functools.partial(asking.fill, tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    return functools.partial(asking.write, tmp_path)


def test_where_picks_rows_by_value_and_by_list(fill, make) -> None:
    rows = [make.correction(i, module=m) for i, m in enumerate(["llm", "vision", "llm"])]
    with Reader(fill(*rows)) as reader:
        assert reader.records(r.Correction, where={"module": "llm"}) == [rows[0], rows[2]]
        assert reader.records(r.Correction, where={"module": "llm", "effective_step": 2}) == [rows[2]]
        assert reader.records(r.Correction, where={"effective_step": [0, 1]}) == rows[:2]
        assert reader.records(r.Correction, where={"effective_step": []}) == []
        assert reader.records(r.Correction, where={"module": "llm' or 'x' = 'x"}) == []
        with pytest.raises(StoreError, match="did you mean `module`"):
            reader.records(r.Correction, where={"modul": "llm"})


def test_shapes_are_sorted_and_unique_although_a_profile_was_repeated(write, fill, make) -> None:
    write(make.shape(2), make.shape(0), run_id="killed")
    with Reader(fill(make.shape(1), make.shape(0), make.shape(2), make.shape(0, key="other"))) as reader:
        assert reader.shapes("data") == [make.shape(0), make.shape(1), make.shape(2)]
        assert reader.shapes("none") == []


def test_some_shapes_are_spread_over_the_dataset_and_always_the_same(fill, make) -> None:
    root = fill(*(make.shape(i) for i in range(200)))
    with Reader(root) as reader:
        found = [s.sample_index for s in reader.shapes("data", max_samples=20)]
        assert found == sorted(set(found)) == [s.sample_index for s in reader.shapes("data", max_samples=20)]
        assert len(found) == 20
        assert {i // 50 for i in found} == {0, 1, 2, 3}
        assert len(reader.shapes("data", max_samples=900)) == 200


def test_the_largest_samples_are_those_of_the_whole_profile(fill) -> None:
    samples = random_batch(300, seed=3)
    with Reader(fill(*samples)) as reader:
        assert reader.largest_samples("data") == largest_of(samples)
        assert reader.largest_samples("none") == []


def test_a_profile_is_the_newest_of_its_key(fill) -> None:
    profiles = [r.ProfileRecord("model", "model", "run", "{}", 3, 0, at_s, 1.0) for at_s in (20.0, 10.0)]
    with Reader(fill(*profiles)) as reader:
        assert reader.profile("model") == profiles[0]
        assert reader.profile("data") is None


def test_cost_tables_are_the_newest_measured_ones(write, fill, make) -> None:
    def profile(run_id: str, at_s: float) -> r.ProfileRecord:
        return r.ProfileRecord("model", "model", run_id, "{}", 3, 0, at_s, 1.0)

    write(profile("z-first", 10.0), make.cost_table(table_id="old"), run_id="z-first")
    write(profile("a-later", 20.0), make.cost_table(table_id="new"), run_id="a-later")
    write(make.cost_table(table_id="guess", source="analytic"), make.cost_table("vision", 2), run_id="zz")
    with Reader(fill(make.cost_table(profile_key="other"))) as reader:
        assert [t.table_id for t in reader.latest_cost_tables("model")] == ["new", "table-vision"]


def test_the_newest_set_counts_as_a_whole(write, fill, make) -> None:
    old = make_corrections("llm", [1.0, 1.4, 2.0], [100, 900], table_id="t", observed_at_s=10.0)
    new = make_corrections("llm", [1.2, 1.6], [300], table_id="t", observed_at_s=20.0, run_id="later")
    half = make_corrections("llm", [3.0, 3.0], [300], table_id="t", observed_at_s=30.0, run_id="arriving")[:1]
    write(*old, make.cost_table(table_id="t"))
    write(*new, run_id="later")
    root = fill(*half, run_id="arriving")
    with Reader(root) as reader:
        assert reader.corrections_in_force("model") == new, "a set of which a part has yet to come is none"
    with Reader(fill(new[0], run_id="later", producer="again")) as reader:
        assert reader.corrections_in_force("model") == new, "written twice"


def test_corrections_of_a_profile_hold_for_any_way_of_running_it(fill, make) -> None:
    tables = [
        make.cost_table(table_id="tp1"),
        make.cost_table(table_id="tp2", tp=2),
        make.cost_table(table_id="again", recompute=True),
        make.cost_table(table_id="frozen", trains="none"),
        make.cost_table("vision", table_id="eye"),
        make.cost_table(table_id="elsewhere", profile_key="other"),
    ]
    learnt = {
        name: make_corrections(module, [1.0 + at_s / 100, 2.0], [64], table_id=name, observed_at_s=at_s)
        for name, module, at_s in (
            ("tp1", "llm", 10.0), ("tp2", "llm", 30.0), ("again", "llm", 20.0), ("frozen", "llm", 5.0),
            ("eye", "vision", 1.0), ("elsewhere", "llm", 99.0),
        )
    }  # fmt: skip
    with Reader(fill(*tables, *(row for rows in learnt.values() for row in rows))) as reader:
        assert reader.corrections_in_force("model") == [*learnt["tp2"], *learnt["frozen"], *learnt["eye"]]
        assert reader.corrections_in_force("model", is_frozen=True) == learnt["frozen"]
        assert reader.corrections_in_force("other") == learnt["elsewhere"]
        assert reader.corrections_in_force("none") == []


def test_corrections_of_a_table_that_was_fitted_anew_are_in_force_no_more(fill, make) -> None:
    profile = r.ProfileRecord("model", "model", "run", "{}", 3, 0, 10.0, 1.0)
    learnt = make_corrections("llm", [1.5], table_id="first")
    with Reader(fill(profile, make.cost_table(table_id="first"), *learnt)) as reader:
        assert reader.corrections_in_force("model") == learnt
    refit = dataclasses.replace(profile, run_id="later", created_at_s=20.0)
    with Reader(fill(refit, make.cost_table(table_id="second"), run_id="later")) as reader:
        assert reader.corrections_in_force("model") == []
        latest = reader.arrays("v_correction_latest", ["factor"], where={"table_id": "first"})
    assert latest["factor"].tolist() == [1.5]


def test_decisions_of_a_run_come_in_order(write, fill) -> None:
    noticed = make_decision("drift_cost", "noticed", step=4, measured=1.8, expected=1.0)
    acted = make_decision("replan", "done", "plan1", step=6, gain_s=90.0, cost_s=20.0, new_plan_id="plan1")
    write(make_decision("stage", "done", run_id="other"), run_id="other")
    with Reader(fill(acted, noticed)) as reader:
        assert repr(reader.decisions("run")) == repr([noticed, acted])  # repr: NaN equals NaN


def test_columns_come_as_arrays_with_fields_of_structs(fill, make) -> None:
    with Reader(fill(*(make.cost_table(tp=tp, table_id=f"t{tp}") for tp in (1, 2, 4)))) as reader:
        found = reader.arrays("cost_table", ["table_id", "tp", "forward_s.layer_per_token"], where={"tp": [2, 4]})
        with pytest.raises(StoreError, match="cannot read cost_table") as error:
            reader.arrays("cost_table", ["colour"])
        assert error.value.hint == ""
    assert found["tp"].dtype == "int64"
    assert sorted(zip(found["table_id"], found["tp"], found["forward_s.layer_per_token"], strict=True)) == [
        ("t2", 2, 2.0), ("t4", 4, 2.0),
    ]  # fmt: skip


def test_what_a_snapshot_of_another_dflop_lacks_comes_with_an_ingest(fill, make, monkeypatch) -> None:
    root = fill(make.correction())
    monkeypatch.setattr(migrate, "sha256_of", lambda _texts: "of other views")
    with Reader(root) as reader:
        for ask in (
            lambda: reader.arrays("v_colours", ["module"]), lambda: console.query(root, "from v_colours"),
            lambda: console.query(root, "select colour from correction"),
        ):  # fmt: skip
            with pytest.raises(StoreError, match="colour") as error:
                ask()
            assert "another version of dflop published this snapshot" in error.value.hint
            assert "dflop store ingest" in error.value.hint
