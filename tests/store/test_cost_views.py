"""What modules and links cost, asked in SQL: the same numbers as from `dflop/cost`, corrections included."""

import dataclasses
import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflop import records as r
from dflop.cost.curve import from_slopes
from dflop.cost.model import CostModel
from dflop.errors import DataError, StoreError
from dflop.store import console
from dflop.store.ingest import ingest
from dflop.store.profile_frames import profile_of_costs
from dflop.store.reader import Reader
from tests.store.asking import VERSIONS, ask_client, fill, named, rows, write
from tests.test_cli import dflop


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory, make) -> tuple[Path, CostModel]:
    root = tmp_path_factory.mktemp("priced")
    forward, backward = r.CostTerms(1e-3, 2e-6, 3e-9, 4e-3, 5e-6, 6e-3), r.CostTerms(2e-3, 3e-6, 4e-9, 5e-3, 6e-6, 7e-3)
    bent = dataclasses.replace(forward, layer_knots=(200.0, 1000.0), layer_bends=(4e-6, -1e-6))
    table = make.cost_table(
        "vision", forward_s=bent, backward_s=backward, num_layers=7, min_tokens=16, max_tokens=4096,
        max_mean_length=2048.0,
    )  # fmt: skip
    correction = make.correction(3, 1.25, module="vision", table_id=table.table_id)
    fill(root, table, make.cost_table("llm"), correction)
    return root, CostModel([table], {"vision": 1.25}, extrapolate=True)


def test_cost_at_is_the_cost_model(priced: tuple[Path, CostModel]) -> None:
    root, model = priced
    (row,) = rows(root, "from cost_at('table-vision', 3, 700, 200_000)")
    asked, part = ("vision", (3, 700, 200_000)), {"num_layers": 7, "edge": True}
    forward_s, backward_s = model.module_seconds(*asked, **part)
    assert row["forward_s"] == pytest.approx(float(forward_s))
    assert row["backward_s"] == pytest.approx(float(backward_s))
    assert row["activation_bytes"] == pytest.approx(float(model.activation_bytes(*asked, **part)))
    assert (row["module"], row["factor"]) == ("vision", 1.25)


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("select forward_s from cost_at('table-vision', 1, 15, 128)", "15 tokens, 128 squared, lie outside the probes"),
        ("select count(*) from cost_at('table-vision', 1, 4096, 9000000)", "mean length up to 2048"),
        ("select 1 from cost_at('table-llm', 1, 10, 100)", "never probed"),
        ("select tp from cost_at('table-x', 1, 100, 1000)", "no cost table table-x; see"),
    ],
)
def test_cost_at_refuses_to_extrapolate(priced: tuple[Path, CostModel], sql: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        console.query(priced[0], sql)


def random_terms(rng: np.random.Generator) -> r.CostTerms:
    knots = np.unique(rng.integers(1, 20_000, rng.integers(0, 6))).tolist()
    fixed, sq, edge, per_token, per_item = (float(x) for x in rng.uniform(0, 1e-3, 5))
    others = r.CostTerms(fixed, 0.0, 1e-5 * sq, edge, 1e-2 * per_token, per_item)
    return from_slopes(rng.uniform(0, 1e-5, len(knots) + 1).tolist(), knots, others)


def random_table(rng: np.random.Generator, module: str, make: Any) -> r.CostTable:
    low, high = sorted(int(x) for x in rng.integers(1, 20_000, 2))
    forward, backward, kept = (random_terms(rng) for _ in range(3))
    return make.cost_table(
        module, forward_s=forward, backward_s=backward, activation_bytes=kept, num_layers=int(rng.integers(1, 80)),
        min_tokens=low, max_tokens=high, max_mean_length=float(rng.uniform(1, high)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def random_costs(tmp_path_factory: pytest.TempPathFactory, make) -> tuple[Path, list[r.CostTable], CostModel]:
    """Ten tables of random curves, half of them corrected."""
    root, rng = tmp_path_factory.mktemp("random"), np.random.default_rng(0)
    tables = [random_table(rng, f"m{i}", make) for i in range(10)]
    factors = {t.module: float(rng.uniform(0.5, 2)) for t in tables[::2]}
    corrections = [make.correction(1, f, module=m, table_id=f"table-{m}") for m, f in factors.items()]
    fill(root, *tables, *corrections)
    return root, tables, CostModel(tables, factors, extrapolate=True)


def outside_probes(table: r.CostTable, load: np.ndarray) -> np.ndarray:
    """Which loads have fewer or more tokens, or a larger mean length, than any probe of the table.

    Nothing at all is never outside; everything else is where the table does not know its range, as an analytic one.
    """
    tokens, sum_sq = (np.asarray(part, dtype=np.float64) for part in load[1:])
    inside = (tokens >= table.min_tokens) & (tokens <= table.max_tokens)
    inside = inside & (sum_sq <= table.max_mean_length * tokens * (1.0 + 1e-12))
    return (tokens > 0) & ~inside


def test_sql_and_cost_model_agree_on_any_table(random_costs: tuple[Path, list[r.CostTable], CostModel]) -> None:
    root, tables, model = random_costs
    rng = np.random.default_rng(1)
    tokens = [0, *np.exp(rng.uniform(0, 11, 60)).astype(int).tolist()]
    loads = [(int(rng.integers(0, 50)), t, int(t * rng.uniform(0, t))) for t in tokens]
    for table in tables:
        found = rows(
            root,
            "select cost.* from (select unnest($n) as n, unnest($t) as t, unnest($s) as s) as load, "
            f"lateral (from cost_estimate('{table.table_id}', load.n, load.t, load.s)) as cost order by n, t, s",
            **dict(zip("nts", map(list, zip(*sorted(loads), strict=True)), strict=True)),
        )
        load, args = tuple(np.array(sorted(loads)).T), {"num_layers": table.num_layers, "edge": True}
        forward_s, backward_s = model.module_seconds(table.module, load, **args)
        expected = {
            "forward_s": forward_s,
            "backward_s": backward_s,
            "activation_bytes": model.activation_bytes(table.module, load, **args),
            "is_extrapolated": outside_probes(table, load),
        }
        for name, values in expected.items():
            assert [row[name] for row in found] == pytest.approx(values.tolist(), rel=1e-9, abs=1e-12), name


ASK = """
import duckdb, json, sys
con = duckdb.connect(sys.argv[1], read_only=True)
sql = ("select load.t, cost.forward_s from (select unnest([1, 300, 5000, 40000]) as t) as load, "
       "lateral (from cost_estimate('table-m' || $i, 2, load.t, load.t)) as cost order by all")
curves = {i: con.execute(sql, {"i": i}).fetchall() for i in range(4)}
one = lambda sql: con.execute(sql).fetchall()[0][0]
told = {
    "rows": one("select count(*) from correction"),
    "view": one("select count(*) from v_correction_latest"),
    "summary": one("select count(*) from v_run_summary"),
    "comment": one("select comment from duckdb_tables() where table_name = 'plan'") != "",
}
print(json.dumps({"version": duckdb.__version__, "told": told, "curves": curves}))
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_curves_read_alike_in_every_client(
    random_costs: tuple[Path, list[r.CostTable], CostModel], version: str
) -> None:
    """What a person's older shell and a colleague's newer one will do with a snapshot: tables, views and macros."""
    root, tables, model = random_costs
    answer = ask_client(version, ASK, root)
    assert answer["told"] == {"rows": 5, "view": 5, "summary": 0, "comment": True}
    for i, found in answer["curves"].items():
        tokens, seconds = np.array(found).T
        table = tables[int(i)]
        expected, _ = model.module_seconds(table.module, (2, tokens, tokens), num_layers=table.num_layers, edge=True)
        assert seconds == pytest.approx(expected, rel=1e-9)


def test_every_way_of_running_has_its_own_latest_table(tmp_path: Path, make) -> None:
    ways = [("all", False), ("all", True), ("none", False), ("none", True), ("projector", False)]
    tables = [make.cost_table(trains=t, recompute=c, table_id=f"{t} {c:d}") for t, c in ways]
    guesses = [make.cost_table(tp=tp, table_id=f"guess{tp}", source="analytic") for tp in (1, 2)]
    fill(tmp_path, *tables, *guesses, make.cost_table(tp=2, table_id="split", source="derived"))
    with Reader(tmp_path) as reader:
        assert [t.table_id for t in reader.latest_cost_tables("model")] == [*(f"{t} {c:d}" for t, c in ways), "guess2"]
    found = [row for row in named(tmp_path, "cost_tables") if row["tp"] == 1]
    assert [(row["trains"], row["recompute"], row["num_knots"]) for row in found] == [(*way, 0) for way in ways]


def test_link_costs_are_the_newest_measured_ones(tmp_path: Path) -> None:
    def link(op: str, num_ranks: int, rate: float, source: str = "measured") -> r.LinkCost:
        return r.LinkCost("model", "gpu", "torch", op, num_ranks, 1, 1e-5, rate, source, 9, 0.02)

    def profile(run_id: str, at_s: float) -> r.ProfileRecord:
        return r.ProfileRecord("model", "model", run_id, "{}", 1, 0, at_s, 1.0)

    write(tmp_path, profile("z", 10.0), link("all_reduce", 2, 1e9), run_id="z")
    write(tmp_path, profile("a", 20.0), link("all_reduce", 2, 2e9), link("p2p", 2, 3e9), run_id="a")
    fill(tmp_path, link("all_reduce", 2, 9e9, "analytic"), link("all_gather", 4, 8e9, "analytic"), run_id="zz")
    with Reader(tmp_path) as reader:
        found = reader.latest_link_costs("model")
        assert reader.latest_link_costs("other") == []
    assert [(x.op, x.bytes_per_s) for x in found] == [("all_gather", 8e9), ("all_reduce", 2e9), ("p2p", 3e9)]
    told = named(tmp_path, "link_costs")
    assert told[1]["seconds_per_64mib"] == pytest.approx(1e-5 + 2**26 / 2e9)


def hour(number: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(hours=number)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    """One module on an H100, again after a change of software, and on an H200; a link on both; a run that planned."""
    root = tmp_path_factory.mktemp("history")
    base = r.CostTerms(8192e-6, 1e-6, 1e-9, 9.0, 9.0, 9.0)
    bent = dataclasses.replace(base, layer_knots=(4096.0, 99999.0), layer_bends=(2e-6, 1e-6))
    # Per layer and million tokens at the reference load: 1 + 1 + 1.024 s, and the bends 1 + 1 s more.

    def table(name: str, key: str, hardware: str, terms: r.CostTerms, at_s: float, **changes: Any) -> r.CostTable:
        same = {"table_id": name, "profile_key": key, "hardware": hardware, "fitted_at_s": at_s}
        return make.cost_table("llm", forward_s=terms, backward_s=base, **same, **changes)

    def profile(key: str, run_id: str, at_h: float, kind: str = "model", **inputs: Any) -> r.ProfileRecord:
        return r.ProfileRecord(key, kind, run_id, json.dumps(inputs), 12, 0, at_h * 3600.0, 5.0)

    # An old fit, which its profile dates; the same table written twice; a newer one of the profile.
    write(root, table("t1", "key-1", "H100", base, 0.0), profile("key-1", "one", 1, hardware="H100", software="a"),
          run_id="one")  # fmt: skip
    write(root, table("t2", "key-1", "H100", bent, 3 * 3600.0), run_id="two")
    write(root, table("t2", "key-1", "H100", bent, 9 * 3600.0), run_id="later")
    link = r.LinkCost("key-1", "H100", "torch", "all_reduce", 8, 1, 0.25, 67108864.0, "measured", 4, 0.02, 3600.0)
    write(root, table("t3", "key-2", "H200", base, 5 * 3600.0), make.cost_table("audio", profile_key="key-2"), link,
          dataclasses.replace(link, profile_key="key-2", hardware="H200", bytes_per_s=2 * 67108864.0),
          profile("key-2", "three", 5, hardware="H200", software="a", tp=2), run_id="three")  # fmt: skip
    write(root, make.correction(1, 0.5, table_id="t3"), run_id="corrects")
    write(root, dataclasses.replace(make.plan("run-a", 0), table_ids=("t1",)), run_id="run-a")
    ingest(root)
    return root


def test_the_costs_of_a_module_have_a_history_with_changes_and_corrections(history: Path) -> None:
    found = named(history, "cost_history", module="llm")
    assert [(f["hardware"], f["table_id"], f["fitted_at"]) for f in found] == [
        ("H100", "t1", hour(1)), ("H100", "t2", hour(3)), ("H200", "t3", hour(5)),
    ]  # fmt: skip
    assert [f["corrected_s_per_layer_mtoken"] for f in found] == pytest.approx([6.048, 8.048, 3.024])
    assert [f["factor"] for f in found] == [1.0, 1.0, 0.5]
    assert [f["change_ratio"] for f in found] == [None, pytest.approx(8.048 / 6.048), None], "per hardware"
    latest = rows(history, "select table_id from v_cost_history where is_latest and module = 'llm' order by all")
    assert [f["table_id"] for f in latest] == ["t2", "t3"]


def test_two_profiles_are_compared_module_by_module_and_link_by_link(history: Path) -> None:
    found = {f["subject"]: f for f in named(history, "cost_drift", before="key-1", after="key-2")}
    assert list(found) == ["audio tp 1", "llm tp 1", "all_reduce 8 ranks on 1 node"]
    llm, link, audio = found["llm tp 1"], found["all_reduce 8 ranks on 1 node"], found["audio tp 1"]
    assert (llm["hardware_before"], llm["hardware_after"]) == ("H100", "H200")
    assert llm["change_ratio"] == pytest.approx(3.024 / 8.048)
    assert (link["before_s"], link["after_s"], link["change_ratio"]) == pytest.approx((1.25, 0.75, 0.6))
    assert (audio["before_s"], audio["change_ratio"]) == (None, None)


def test_profiles_say_what_changed_since_the_one_before(history: Path) -> None:
    found = [(f["profile_key"], f["first_at"], f["changed"]) for f in named(history, "profile_history")]
    assert found == [("key-1", hour(1), None), ("key-2", hour(5), "hardware: H100 -> H200; tp: none -> 2")]


def test_costs_are_asked_for_by_key_or_by_run(history: Path) -> None:
    assert [profile_of_costs(history, name)["profile_key"] for name in ("key-2", "run-a")] == ["key-2", "key-1"]
    with pytest.raises(DataError, match="no model profile `run-z`"):
        profile_of_costs(history, "run-z")


@pytest.mark.parametrize(("threshold", "code"), [("0.1", 1), ("0.7", 0)])
def test_drift_of_costs_is_an_exit_code(history: Path, threshold: str, code: int) -> None:
    done = dflop("cost", "drift", "key-1", "key-2", "--threshold", threshold, "--json", "--store", history, cwd=history)
    found = {row["subject"]: row["drifted"] for row in map(json.loads, done.stdout.splitlines())}
    is_far = code == 1
    assert (done.returncode, found) == (
        code, {"audio tp 1": False, "llm tp 1": is_far, "all_reduce 8 ranks on 1 node": is_far},
    ), done.stderr  # fmt: skip
