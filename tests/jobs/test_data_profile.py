"""The data-profile job: whatever the number of shards and processes, the store holds the same profile."""

from __future__ import annotations

import hashlib
from pathlib import Path

import duckdb
import polars as pl
import pytest

from dflop.data.dataset_profile import profile_key
from dflop.data.demo import make_demo_dataset
from dflop.errors import ConfigError
from dflop.jobs import data_profile
from dflop.run.batches import GlobalBatches
from dflop.run.directory import RunDir, dataset_ref, family_of
from dflop.steps.profiling import data_profile_key
from dflop.store import snapshot
from dflop.store.ingest import ingest
from dflop.store.profile_frames import profile_frame
from dflop.store.reader import Reader
from tests.jobs.configs import make_config
from tests.jobs.made import run_of

TABLES = ("v_sample_shape", "quarantined_sample")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    folder = tmp_path_factory.mktemp("demo") / "demo"
    make_demo_dataset(folder, num_samples=40, seed=3)
    rows = (folder / "annotations.jsonl").read_text("utf-8").splitlines()
    rows[7:7] = ['{"cut', '{"id": "mute", "conversations": [{"from": "human", "value": "hello?"}]}']
    # Beside the demo dataset, which nobody may change.
    (folder.parent / "rows.jsonl").write_text("\n".join(rows) + "\n", "utf-8")
    return folder


def run_in(folder: Path, demo: Path, *overrides: str) -> RunDir:
    folder.mkdir(exist_ok=True)
    config = make_config(
        folder,
        f"dataset.annotations={demo.parent / 'rows.jsonl'}",
        f"dataset.media_root={demo / 'media'}",
        f"dataset.tokenizer={demo / 'tokenizer.json'}",
        *overrides,
    )
    return run_of(folder / "run-1", config)


def profile(run: RunDir, num_shards: int) -> list[dict[str, float]]:
    config = run.config()
    key = profile_key(dataset_ref(config), family_of(config))
    counts = [data_profile.main(str(run.path), key, str(shard), str(num_shards)) for shard in range(num_shards)]
    ingest(config.store)
    return counts


def contents(store: Path) -> dict[str, str]:
    """Hash of every row a reader sees of a profile, in order, but for which file it came in."""
    con, _ = snapshot.open_current(store)
    with con:
        found = {}
        for table in TABLES:
            where = "exclude (_run_id, _producer, _seq)"
            rows = con.execute(f"select * {where} from {table} order by sample_index").fetchall()
            assert rows
            found[table] = hashlib.sha256(repr(rows).encode()).hexdigest()
        return found


def test_any_number_of_shards_leaves_the_same_bytes_in_the_store(tmp_path: Path, demo: Path) -> None:
    found = []
    for num_shards, num_workers in ((1, 1), (5, 1), (1, 2)):
        run = run_in(tmp_path / f"{num_shards}-{num_workers}", demo, f"data_profile.num_workers={num_workers}")
        counts = profile(run, num_shards)
        assert sum(c["num_samples"] for c in counts) == 40
        assert sum(c["num_quarantined"] for c in counts) == 2
        found.append(contents(run.config().store))
    assert found == [found[0]] * 3


def test_weights_of_a_mixture_reach_the_store_and_the_order_of_training(tmp_path: Path, demo: Path) -> None:
    # The YAML of LLaVA-OneVision's training scripts, with weights.
    mixture = (
        f"datasets:\n  - {{path: {demo}/annotations.jsonl, weight: 1}}\n"
        f"  - {{path: {demo}/annotations.jsonl, sampling_strategy: 'first:10', weight: 3}}\n"
    )
    (tmp_path / "mixture.yaml").write_text(mixture)
    run = run_in(tmp_path, demo, f"dataset.annotations={tmp_path / 'mixture.yaml'}", "plan.global_batch_size=10")
    config, ref = run.config(), dataset_ref(run.config())
    profile(run, 2)
    key = profile_key(ref, family_of(config))
    assert profile_frame(config.store, key)["weight"].to_list() == pytest.approx([12.5 / 40] * 40 + [37.5 / 10] * 10)
    with Reader(config.store) as reader:
        batches = GlobalBatches(config, reader.shapes(key))
    drawn = [s.sample_index for step in range(5) for s in batches.at(step)]
    assert 35 <= sum(index >= 40 for index in drawn) <= 38
    (tmp_path / "mixture.yaml").write_text(mixture.replace("weight: 3", "weight: 2"))
    assert profile_key(dataset_ref(config), family_of(config)) != key


def test_a_table_of_sizes_that_shall_be_truncated_is_refused_before_a_job_is_submitted(
    tmp_path: Path, demo: Path
) -> None:
    table = tmp_path / "sizes.parquet"
    pl.DataFrame({"id": ["a"], "prompt_tokens": [9], "response_tokens": [5]}).write_parquet(table)
    run = run_in(tmp_path / "run", demo, f"dataset.annotations={table}", "dataset.overlong=[shrink, truncate]")
    with pytest.raises(ConfigError, match="cannot be truncated") as caught:
        data_profile_key(run, print)
    assert caught.value.where == "dataset.overlong"


def test_a_table_of_sizes_is_profiled_without_media(tmp_path: Path, demo: Path) -> None:
    table = tmp_path / "sizes.parquet"
    columns = {"id": ["a", "b", "c"], "prompt_tokens": [9, 9, 9], "response_tokens": [5, 0, 5]}
    sizes = {"image_w": [[640, 320], [], []], "image_h": [[480, 200], [], []]}
    pl.DataFrame({**columns, **sizes}).write_parquet(table)
    stores = []
    for num_shards in (1, 3):
        run = run_in(tmp_path / str(num_shards), demo, f"dataset.annotations={table}")
        counts = profile(run, num_shards)
        assert [sum(c[name] for c in counts) for name in ("num_samples", "num_quarantined")] == [2, 1]
        stores.append(run.config().store)
    assert contents(stores[0]) == contents(stores[1])
    with duckdb.connect(str(stores[0] / "current.duckdb"), read_only=True) as con:
        assert con.execute("select sample_index, len(items) from sample_shape order by all").fetchall() == [
            (0, 2),
            (2, 0),
        ]
        assert con.execute("select sample_index, reason from quarantined_sample").fetchall() == [
            (1, "no supervised tokens: every answer is empty")
        ]
