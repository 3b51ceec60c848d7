import dataclasses
import math
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dflop import records as r
from dflop import resources
from dflop.report.tables import layout_text
from dflop.store.ingest import ingest
from tests.store.asking import fill, named, rows, write


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, make) -> Path:
    root = tmp_path_factory.mktemp("filled")
    write(root, *_a_run(make))
    (root / "spool/correction/run/bad-000000.parquet").write_bytes(b"")
    ingest(root)
    return root


COMPARED = [
    ((5, 6), "warmup", 99.0, 1.0),
    ((5, 6), "arrival", 3.0, 2.0),
    ((5, 6), "balanced", 2.0, 1.6),
    ((8, 7), "balanced", 2.0, 1.0),
    ((8, 7), "arrival", 4.0, 1.0),
]


def _a_run(make) -> list[Any]:
    """Two ranks train steps 0 and 1 (step 1 again after a restart), then compare two batches in both orders."""
    other = {"rank": 1, "stage": 1, "loss": math.nan, "grad_norm": math.nan, "busy_s": 0.25}
    steps = [
        make.observation(0, loss=3.0, step_s=1.0),
        make.observation(0, **{**other, "loss": 3.0}, step_s=0.5),
        make.observation(1, loss=9.0, step_s=9.0),
        make.observation(1, attempt=1, loss=1.0, step_s=2.0),
        make.observation(1, attempt=1, **other, step_s=2.0),
        make.step_plan(0),
        make.step_plan(0),  # written twice: by rank 0, which could not know that the scheduler would live to
    ]
    compared = []
    for step, (batch, policy, step_s, predicted_s) in enumerate(COMPARED):
        compared += [
            make.observation(step, run_id="run/compare", policy=policy, step_s=step_s, predicted_step_s=predicted_s),
            make.step_plan(step, run_id="run/compare", sample_index=batch),
        ]
    seat = {"module": "llm", "stage": 1, "dp_rank": 0, "tp_rank": 0, "observed_at_s": 0.0}
    peaks = ((0, 2, "allocated", 900), (1, 2, "allocated", 100), (1, 3, "allocated", 150), (1, 3, "process", 700))
    bad = r.QuarantinedSample("data", 3, "id3", "profile", "3.png", "truncated")
    return [
        make.run("running", 1000.0), make.run("done", 1060.0),
        r.JobRecord("run", "train", "key", "local", "17", "running", "", "/runs/run", 2, 0, 1010.0),
        r.JobRecord("run", "train", "key", "local", "17", "done", "", "/runs/run", 2, 0, 1050.0), make.plan(rank=0),
        make.plan(rank=1), make.shape(0, tokens=4, num_images=2), make.shape(0, tokens=4, num_images=2),
        make.shape(1, tokens=6, num_images=0), bad, dataclasses.replace(bad, phase="train", run_id="run", step=1),
        make.cost_table("llm"), make.cost_table("vision"), make.correction(1, factor=1.5),
        make.correction(2, factor=2.0),
        *(r.RankMemory("run", attempt, 1, rank, kind=kind, peak_bytes=n, **seat) for attempt, rank, kind, n in peaks),
        r.ProfileRecord("data", "data", "run", "{}", 90, 1, 1.0, 2.0), *steps, *compared,
    ]  # fmt: skip


def at(num_seconds: float) -> datetime:
    return datetime(1970, 1, 1) + timedelta(seconds=num_seconds)


def one(root: Path, view: str, **where: Any) -> dict[str, Any]:
    condition = " and ".join(f"{key} = ${key}" for key in where) or "true"
    (row,) = rows(root, f"select * from {view} where {condition}", **where)
    return row


def test_views_run_on_an_empty_store(tmp_path: Path) -> None:
    ingest(tmp_path)
    views = [path.stem.split("_", 1)[1] for path in (resources.path("sql") / "views").glob("*_v_*.sql")]
    found = {view: len(rows(tmp_path, f"from {view}")) for view in views}
    assert {view for view, num_rows in found.items() if num_rows} == {"v_snapshot"}, "publishing nothing is a publish"


def test_a_run_and_a_job_show_their_latest_state(filled: Path) -> None:
    run, job = one(filled, "v_run"), one(filled, "v_job")
    assert (run["state"], run["started_at"], run["observed_at"]) == ("done", at(1000), at(1060))
    assert (job["state"], job["submitted_at"], job["observed_at"]) == ("done", at(1010), at(1050))


def test_of_samples_written_several_times_the_newest_is_one_row_and_only_those_are_sorted(tmp_path: Path, make) -> None:
    wanted = {}
    for producer, indices in (("b", (0, 1, 2)), ("c", (1,)), ("a", (0, 1, 5)), ("c", (5, 2))):
        for key in ("one", "two"):
            path = write(tmp_path, *(make.shape(i, key=key) for i in indices), producer=producer)
            seq = int(path.stem.rpartition("-")[2])
            wanted |= {(key, i): max((producer, seq), wanted.get((key, i), ("", 0))) for i in indices}
    ingest(tmp_path)
    found = rows(tmp_path, "select profile_key, sample_index, _producer, _seq from v_sample_shape")
    assert len(found) == len(wanted) == 8
    assert {(f["profile_key"], f["sample_index"]): (f["_producer"], f["_seq"]) for f in found} == wanted
    (plan,) = rows(tmp_path, "explain select sum(num_llm_tokens) from v_sample_shape")
    assert "WINDOW" not in plan["explain_value"]


def test_sample_load_counts_every_sample_once_and_agrees_with_the_record(filled: Path, make) -> None:
    loads = rows(filled, "from v_sample_load")
    assert len(loads) == 3
    for row in loads:
        shape = make.shape(0, 4, 2) if row["sample_index"] == 0 else make.shape(1, 6, 0)
        load = shape.load(row["module"])
        assert (row["num_items"], row["num_tokens"], row["sum_sq_tokens"]) == dataclasses.astuple(load)


def test_a_step_is_as_slow_as_its_slowest_rank(filled: Path) -> None:
    step = one(filled, "v_step", run_id="run", step=0)
    assert (step["num_ranks"], step["step_s"], step["loss"]) == (2, 1.0, 3.0)
    assert step["idle_frac"] == pytest.approx(1 - (0.5 + 0.25) / 2)
    assert step["num_llm_tokens"] == 100  # two samples of 50; step 1 has no plan
    assert one(filled, "v_step", run_id="run", step=1, attempt=1)["num_llm_tokens"] is None
    assert one(filled, "v_step", run_id="run", step=1, attempt=1)["loss"] == 1.0  # NaN of the other rank is no loss


@pytest.mark.parametrize("lost", [0.0, math.nan])
def test_a_step_whose_samples_were_all_lost_has_no_loss(tmp_path: Path, make, lost: float) -> None:
    none = {"loss": lost, "num_supervised_tokens": 0}
    rows = [make.observation(0, **none), make.observation(1, loss=3.0), make.observation(2, loss=0.0)]
    write(tmp_path, *rows, make.observation(3, **none))
    ingest(tmp_path)
    assert [one(tmp_path, "v_step", run_id="run", step=t)["loss"] for t in range(4)] == [None, 3.0, 0.0, None]
    row = one(tmp_path, "run_rollup", run_id="run")
    assert (row["first_loss"], row["last_loss"]) == (3.0, 0.0)


def test_utilisation_is_known_where_the_peak_is(tmp_path: Path, make) -> None:
    peaks = (80.0, math.nan)
    flops = (r.StepFlops("run", 0, step, 40.0, peak) for step, peak in enumerate(peaks))
    fill(tmp_path, *(make.observation(step, step_s=2.0) for step in range(3)), *flops)
    found = rows(tmp_path, "from v_throughput where run_id = 'run' order by step")
    assert [row["mfu_frac"] for row in found] == [0.25, None, None]
    by_step = {row["step"]: row["model_flops"] for row in rows(tmp_path, "from v_step")}
    assert by_step == {0: 40.0, 1: 40.0, 2: None}


def test_time_of_a_rank_adds_up_to_its_steps(tmp_path: Path, make) -> None:
    seat = (3, "llm", 1, 0, 0)
    spans = [("data_wait", -1, -0.5, 0.5), ("receive_wait", 0, 0.0, 0.25), ("forward", 0, 0.25, 0.5)]
    fill(
        tmp_path,
        *(make.observation(step, rank=3, step_s=2.0) for step in (0, 1)),
        *(r.RankSpan("run", 0, 0, *seat, *span, 7) for span in spans),
        r.RankSpan("run", 0, 1, *seat, "checkpoint", -1, 2.0, 9.0, 0),
    )
    found = {row["name"]: row for row in rows(tmp_path, "from v_rank_time where run_id = 'run' and rank = 3")}
    shares = {"receive_wait": 0.125, "forward": 0.25, "other": 0.625, "data_wait": None, "checkpoint": None}
    assert {name: row["step_frac"] for name, row in found.items()} == shares
    assert {row["num_steps"] for row in found.values()} == {1}, "step 1 was not traced"
    assert found["checkpoint"]["duration_s"] == 9.0
    line = named(tmp_path, "timeline", run_id="run", step=0)
    assert [row["name"] for row in line] == ["data_wait", "receive_wait", "forward"]


def test_stage_time_is_split_without_remainder(filled: Path) -> None:
    row = one(filled, "v_stage_idle", run_id="run/compare", policy="arrival")
    assert row["busy_frac"] == pytest.approx(2 * 0.5 / (3 + 4))
    parts = ("reduce_frac", "optimizer_frac", "bubble_frac")
    assert sum(row[part] for part in parts) == pytest.approx(row["idle_frac"]) == pytest.approx(1 - row["busy_frac"])


def test_the_latest_correction_scales_seconds_and_leaves_bytes(filled: Path) -> None:
    assert one(filled, "v_correction_latest")["factor"] == 2.0
    llm, vision = (one(filled, "v_cost_effective", module=module) for module in ("llm", "vision"))
    assert (llm["factor"], llm["forward_s"]["edge_per_item"], llm["backward_s"]["layer_fixed"]) == (2.0, 12.0, 2.0)
    assert (llm["activation_bytes"]["edge_per_item"], llm["corrected_by_run_id"]) == (6.0, "run")
    assert (vision["factor"], vision["forward_s"]["edge_per_item"], vision["corrected_by_run_id"]) == (1.0, 6.0, None)


def test_a_plan_is_readable(filled: Path) -> None:
    plan = one(filled, "v_plan", candidate_rank=0)
    assert plan["layout_text"] == "vision tp1 pp1 dp2 | llm tp1 pp2 dp1"
    assert (plan["num_processes"], plan["peak_memory_bytes"], plan["planned_speedup"]) == (4, 300, 1.5)
    assert (plan["uniform_step_s"], plan["planned_speedup_over_uniform"], plan["sync_s"]) == (2.0, 2.0, 0.1)


def test_an_inline_plan_is_one_chain_on_the_same_processes(tmp_path: Path, make) -> None:
    parallel = r.ParallelSpec(2, 4, 8)
    modules = (
        r.ModulePlan("vision", parallel, 0, (4, 0, 0, 0), (0,) * 4, recompute=True),
        r.ModulePlan("llm", parallel, 0, (0, 2, 2, 2), (5, 6, 7, 8), recompute=True, shard_optimizer=True),
    )
    inline = dataclasses.replace(make.plan(), modules=modules, uniform_step_s=math.nan)
    found = one(fill(tmp_path, inline), "v_plan")
    assert found["layout_text"] == "colocated tp2 pp4 dp8 recompute ZeRO-1"
    assert (found["num_processes"], found["peak_memory_bytes"]) == (inline.num_processes, 8) == (64, 8)
    limits = (*modules[:1], dataclasses.replace(modules[1], recompute_tokens=((), (5, 9), (7,), ())))
    limited = dataclasses.replace(inline, modules=limits, run_id="limited")
    text = one(fill(tmp_path / "limited", limited), "v_plan")["layout_text"]
    assert text == f"colocated tp2 pp4 dp8 {limits[1].recomputation} ZeRO-1" == layout_text(limited)
    assert limits[1].recomputation == "recompute up to 3/6"
    assert (found["uniform_step_s"], found["planned_speedup_over_uniform"]) == (None, None)


def test_everything_left_out_is_listed_with_its_reason(filled: Path) -> None:
    found = {(row["what"], row["subject"], row["path"], row["reason"]) for row in rows(filled, "from v_quarantine")}
    (file,) = (row for row in found if row[0] == "file")
    assert file[1:3] == ("bad-000000.parquet", "correction/run/bad-000000.parquet")
    assert found - {file} == {
        ("sample", "data#3", "3.png", "profile: truncated"),
        ("sample", "data#3", "3.png", "train: truncated"),
    }


def test_the_summary_has_one_row_per_run(filled: Path) -> None:
    row = one(filled, "v_run_summary")
    assert (row["run_id"], row["state"], row["elapsed_s"]) == ("run", "done", 60.0)
    assert (row["plan_layout"], row["num_microbatches"]) == ("vision tp1 pp1 dp2 | llm tp1 pp2 dp1", 4)
    assert (row["num_steps"], row["first_loss"], row["last_loss"], row["median_step_s"]) == (2, 3.0, 1.0, 1.5)
    assert (row["arrival_step_s"], row["balanced_step_s"]) == pytest.approx((math.sqrt(3.0 * 4.0), 2.0))
    assert row["measured_speedup"] == pytest.approx(row["arrival_step_s"] / row["balanced_step_s"])
    assert row["predicted_speedup"] == pytest.approx(math.sqrt(1.25 * 1.0))
    assert (row["planned_speedup"], row["planned_speedup_over_uniform"]) == (1.5, 2.0)
    assert row["arrival_idle_frac"] == pytest.approx(1 - (0.5 / 3 + 0.5 / 4) / 2)
    assert (row["num_quarantined_samples"], row["num_corrections"]) == (1, 2)


def test_hours_of_a_run_and_of_an_epoch_have_a_price_where_one_is_given(filled: Path) -> None:
    (row,) = named(filled, "process_hours", usd_per_gpu_hour=2.0)
    assert row["process_hours"] == pytest.approx(2 * (1.0 + 2.0) / 3600)
    assert row["epoch_process_hours"] == pytest.approx(2 * 90 / 2 / 3600), "two samples a second"
    assert (row["usd"], row["epoch_usd"]) == pytest.approx((row["process_hours"] * 2, row["epoch_process_hours"] * 2))
    assert named(filled, "process_hours", usd_per_gpu_hour=0.0)[0]["usd"] is None


def test_memory_compares_what_tensors_allocated_with_what_was_predicted(filled: Path) -> None:
    found = {
        (row.pop("module"), row.pop("stage")): tuple(row.values()) for row in named(filled, "memory", run_id="run")
    }
    assert found["llm", 1] == (200, 150, 0.75, 700), (
        "of the last attempt's fullest rank; a process is a size of its own"
    )
    assert found["llm", 0] == (300, None, None, None)


def test_a_run_that_has_only_begun_has_a_summary(tmp_path: Path, make) -> None:
    row = one(fill(tmp_path, make.run()), "v_run_summary")
    assert (row["num_steps"], row["measured_speedup"], row["num_corrections"]) == (0, None, 0)


def test_compare_query_pairs_the_policies(filled: Path) -> None:
    first, second = named(filled, "compare", run_id="run")
    assert (first["measured_speedup"], first["predicted_speedup"]) == (1.5, pytest.approx(1.25))
    assert (second["measured_speedup"], second["num_samples"]) == (2.0, 2)
