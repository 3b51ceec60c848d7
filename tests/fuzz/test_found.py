"""What fuzzing found, each at its smallest: all of these were tracebacks, hangs or lost rows once.

They go through the checks of their targets, which say what may come of an example.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflop.cli.common import check_value
from dflop.config import load_config
from dflop.data.chat import ChatTemplate
from dflop.data.headers import BadMedia, read_header
from dflop.data.profile import DatasetRef, profile_shard, profile_sizes_shard
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError, StoreError, path_problem
from dflop.launch.answers import epoch_s, expand
from dflop.models import load_family
from dflop.records import from_dict, parse_json
from dflop.sampler.costs import SampleCosts
from dflop.store import settings
from dflop.store.lease import Lease
from dflop.store.snapshot import Current
from dflop.store.spool import read_next_seq
from tests.fuzz.targets import TARGETS, plans
from tests.fuzz.targets.dataset import make_media, make_tokenizer, rules
from tests.fuzz.targets.media import clips
from tests.jobs.configs import write_config

ALIASES = (
    "[&a [1, 1], &b [*a, *a], "
    + ", ".join(f"&{x} [*{y}, *{y}]" for x, y in zip("cdefghijklmnopqrst", "bcdefghijklmnopqrs", strict=True))
    + "]"
)
SIZES: dict[str, list[Any]] = {"id": ["a", "b"], "prompt_tokens": [3, 4], "response_tokens": [5, 6], "turns": [1, 2],
                               "image_w": [[640], []], "image_h": [[480], []]}  # fmt: skip
ENVIRONMENT = {"SLURM_PROCID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
"SLURM_STEP_TASKS_PER_NODE": "2(x2)",
               "SLURM_JOB_ID": "77", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}  # fmt: skip
CURRENT = {
    "seq": 3,
    "file": "snapshots/dflop-000003.duckdb",
    "sha256": "0",
    "revision": "0",
    "duckdb": "1",
    "published_at_s": 1.0,
}
# Values of YAML that no configuration can hold.
NO_VALUES = (
    "9" * 5000, "0x" + "f" * 9000, "[" * 3000, "{a: " * 500, "!!float a", "2001-13-45", ".nan", "&a [*a]", "{1: 2}",
    '"\\ud800"',
    "2001-01-01", "!!set {a}", "!!binary aGk=", "1e999", "9" * 400, ALIASES,
)  # fmt: skip


def edited_plan(degree: str, size: float) -> dict[str, Any]:
    """A plan whose first module says that it has a degree of this size."""
    plan: dict[str, Any] = plans.sound_plan()
    plan["modules"][0][degree] = size
    return plan


def endless_plan() -> dict[str, Any]:
    """A plan whose step takes for ever."""
    plan: dict[str, Any] = plans.sound_plan()
    plan["simulated"]["uniform_step_s"] = math.inf
    return plan


def edited_table(key: str) -> list[dict[str, Any]]:
    """Cost tables of which one has a value too many."""
    tables = plans.sound_tables()
    tables[0]["forward_s"][key] = [*tables[0]["forward_s"][key], 100.0]
    return tables


EXAMPLES: list[tuple[str, Any]] = [
    ("config-set", ["model.hf_config.text_config=a"]),
    ("config-set", ["model.hf_config.vision_config.fullatt_block_indexes=8"]),
    ("config-set", ["dataset.annotations=" + "a" * 5000]),
    ("config-bytes", b"a: " + b"[" * 3000),
    ("chat-template", ("{{ 1 // 0 }}", ["user"])),
    ("chat-template", ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ["user"])),
    ("chat-template", ("{{ messages + 1 }}", ["user"])),
    ("chat-template-name", "\x00"),
    ("chat-template-file", b"[" * 3000),
    ("chat-template-file", {"chat_template": [3]}),
    ("model-section", {"family": "llava_onevision", "hf_config": {"vision_config": 3}, "media": {}}),
    ("model-section", {"family": "llava_onevision", "hf_config": {"image_grid_pinpoints": 5}, "media": {}}),
    ("model-section", {"family": "internvl", "hf_config": {"downsample_ratio": 5e-324}, "media": {}}),
    ("model-section", {"family": "internvl", "hf_config": {"vision_config": {"norm_type": "no"}}, "media": {}}),
    ("model-section", {"family": "internvl", "hf_config": {"text_config": {"vocab_size": [1]}}, "media": {}}),
    ("model-section", {"family": "qwen2_5_vl", "hf_config": {"vision_config": {"window_size": 1}}, "media": {}}),
    ("model-section", {"family": "qwen2_5_vl", "hf_config": {"vision_config": {"patch_size": 0}}, "media": {}}),
    ("model-section", {"family": "qwen2_5_vl", "hf_config": {}, "media": {"max_pixels": math.nan}}),
    ("model-section", {"family": "qwen2_5_vl", "hf_config": {}, "media": {"video_fps": "2"}}),
    ("model-section", {"family": "qwen3_vl", "hf_config": {"vision_config": {"depth": 2**31}}, "media": {}}),
    ("model-section", {"family": "llava_onevision", "hf_config": {"vision_config": {"image_size": 1}}, "media": {}}),
    ("model-config-json", ({"model_type": "internvl", "vision_config": {"norm_type": "no"}}, {})),
    ("model-config-json", ({"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 2**31}}, {})),
    ("sizes", {**SIZES, "image_h": [None, []]}),
    ("sizes", {**SIZES, "image_w": [[{"a": 1}], []]}),
    ("sizes", {**SIZES, "prompt_tokens": ["three", "four"]}),
    ("sizes", {**SIZES, "turns": [10**12, 1]}),
    ("sizes", {**SIZES, "video_w": [[64], []], "video_h": [[48], []], "video_frames": [[None], []],
               "video_fps": [[2.0], []], "video_seconds": [[1e308], []]}),
    ("store-json", ("CURRENT", json.dumps({**CURRENT, "seq": None}).encode())),
    ("store-json", ("CURRENT", b"[" * 3000)),
    ("store-json", ("store.json", b"[" * 3000)),
    ("store-json", ("archive/correction/run/next_seq.json", b"[1]")),
    ("sql", ("\ud800select 1", None)),
    ("sql-parameters", (0, {"a": "\ud800"})),
    ("sql-file", "-- purpose: \udcff"),
    ("sample-costs", b""),
    ("sample-costs", b"PK\x03\x04"),
    ("sample-costs", b"P"),
    ("cost-tables", b"[" * 3000),
    ("plan-json", b"[" * 3000),
    *(("plan-json", edited_plan(degree, size)) for degree in ("tp", "dp") for size in (10**12, 1e300)),
    ("plan-json", endless_plan()),
    *(("cost-tables", edited_table(key)) for key in ("layer_knots", "layer_bends")),
    ("run-directory", ("plan.json", b"")),
    ("run-directory", ("plan.json", b"[]")),
    ("run-directory", ("run.json", b"[1]")),
    ("run-directory", ("jobs.jsonl", b"[1]\n")),
    ("run-directory", ("jobs.jsonl", b"[" * 3000 + b"\n")),
    ("run-directory", ("plan_basis.json", b"[]")),
    ("run-directory", ("shapes.parquet", b"")),
    ("checkpoints", ({"meta": {"next_step": 20}, "files": {"a": [math.inf, 1]}}, {"next_step": math.inf})),
    ("checkpoints", (b"[" * 3000, b"[" * 3000)),
    ("slurm-answers", "1_[0-9:0]|PENDING|1|1|None|a"),
    ("slurm-answers", "1|PENDING|1|" + "9" * 400 + "|None|a"),
    ("slurm-answers", "JobId=1 JobState=RUNNING Restarts=²"),
    ("rank-environment", {**ENVIRONMENT, "SLURM_PROCID": ""}),
    ("rank-environment", {**ENVIRONMENT, "SLURM_PROCID": "4"}),
    ("rank-environment", {**ENVIRONMENT, "SLURM_LOCALID": "-2"}),
    ("rank-environment", {**ENVIRONMENT, "SLURM_NODEID": "4"}),
    ("rank-environment", {**ENVIRONMENT, "MASTER_PORT": "0"}),
    ("rank-environment", {name: value for name, value in ENVIRONMENT.items() if name != "SLURM_NTASKS"}),
    ("command-line", ["plan", "\x00"]),
    ("command-line", ["config", "validate", "\x00"]),
    ("command-line", ["sql", "tables", "--store", "a" * 300]),
    ("command-line", ["runs", "list", "--runs", "a" * 300]),
    ("command-line", ["runs", "show", "a" * 300]),
    ("command-line", ["store", "verify", "--store", "\x00"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Callable[[Any], None]]]:
    """The check of a target with its folder, prepared once."""
    known: dict[str, tuple[Path, Callable[[Any], None]]] = {}

    def of(name: str) -> tuple[Path, Callable[[Any], None]]:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            with contextlib.chdir(folder):
                known[name] = folder, TARGETS[name].prepare(folder)
        return known[name]

    return of


@pytest.mark.parametrize(("target", "example"), EXAMPLES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(EXAMPLES)])
def test_what_was_found_stays_mended(target: str, example: Any, checks: Any) -> None:
    folder, check = checks(target)
    with contextlib.chdir(folder):
        check(example)


@pytest.mark.parametrize("value", NO_VALUES)
def test_what_a_configuration_cannot_hold_is_refused_with_its_place(value: str, tmp_path: Path) -> None:
    path = write_config(tmp_path)
    with pytest.raises(ConfigError) as raised:
        load_config(path, [f"model.hf_config.a={value}"])
    assert "--set model.hf_config.a=" in raised.value.where


def test_lists_of_different_lengths_cost_their_own_row(tmp_path: Path) -> None:
    path = tmp_path / "sizes.parquet"
    pq.write_table(
        pa.table({**SIZES, "image_w": [[640, 2], [10]], "image_h": [[480], [20]], "turns": [1, 10**12]}), path
    )
    dataset = DatasetRef.of_file(path, make_media(tmp_path / "media"), make_tokenizer(tmp_path), 4096)
    shapes, bad = profile_sizes_shard(dataset, rules(), 0, 1)
    assert len(shapes) == 0
    assert bad["reason"].to_list() == [
        "`image_w` and `image_h` have different numbers of entries",
        f"sample too long: {10**12} turns > max_llm_tokens 4096",
    ]


def test_a_template_may_not_fill_memory() -> None:
    for source in ("{{ 2 ** 99999999 }}", "{{ 'a' * 10 ** 10 }}", "{{ [1] * 10 ** 9 }}"):
        with pytest.raises(ConfigError, match=r"not for templates|makes more than"):
            ChatTemplate(source, "x").skeleton(("user",))


def test_a_stream_in_an_unknown_codec_is_bad_media(tmp_path: Path) -> None:
    avi = next(clip for clip in clips() if clip[8:12] == b"AVI ")
    at = avi.index(b"strf") + 8 + 16  # the compression of BITMAPINFOHEADER
    path = tmp_path / "a.avi"
    path.write_bytes(avi[:at] + b"ZZZZ" + avi[at + 4 :].replace(b"H264", b"ZZZZ").replace(b"FMP4", b"ZZZZ"))
    with pytest.raises(BadMedia, match="codec"):
        read_header("video", path)


def test_arrays_of_jobs_have_as_many_elements_as_slurm_allows() -> None:
    assert expand("1_[0-99999999999]") == ("1",)
    assert expand("1_[9999990-9999999]") == ("1",)
    assert expand("1_[0-9:0]") == ("1",)
    assert epoch_s("9" * 400) == epoch_s("9" * 300)


def test_a_damaged_claim_expires_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "INGEST.lease"
    folder.mkdir()
    (folder / "000007.json").write_text("{")
    os.utime(folder / "000007.json", (1.0, 1.0))
    with Lease(tmp_path, lease_s=10, timeout_s=0.0) as lease:
        assert lease.epoch == 8


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 1e300])
def test_nobody_can_wait_for_ever(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at most"):
        settings.init(tmp_path, lease_s=seconds)
    (tmp_path / "store.json").write_text(json.dumps({"lease_s": seconds}))
    with pytest.raises(StoreError, match="at most"):
        settings.read_settings(tmp_path)
    with pytest.raises(ValueError, match="a number between"):
        check_value(float, seconds)


def test_nothing_is_no_number_of_a_record() -> None:
    for seq in (None, math.inf, "x", [1]):
        with pytest.raises((TypeError, ValueError)):
            from_dict(Current, {**CURRENT, "seq": seq})
    with pytest.raises(TypeError, match="object"):
        from_dict(Current, [1])
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 100_000)


def test_paths_that_no_file_can_have() -> None:
    for text in ("a", "a" * 255, "{" + "a," * 200 + "}"):
        assert path_problem(Path(text)) == ""
    for text in ("a\nb", "a\0b", "a" * 256, "é" * 128, "a/" * 3000):
        assert path_problem(Path(text))


def test_numbers_of_a_model_are_of_the_kind_of_their_defaults() -> None:
    with pytest.raises(ConfigError, match="positive whole number") as raised:
        load_family("qwen2_5_vl", {"vision_config": {"depth": "many"}}, {})
    assert raised.value.where == "model.hf_config.vision_config.depth"
    with pytest.raises(ConfigError, match="true or false"):
        load_family("qwen2_audio", {}, {"audio_truncate": 1})


def test_saved_costs_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "costs.npz"
    np.savez(path, seconds=np.ones(2))
    with pytest.raises(ConfigError, match="no sample costs"):
        SampleCosts.load(path)


def test_numbers_of_compacted_files_are_not_guessed(tmp_path: Path) -> None:
    (tmp_path / "next_seq.json").write_text('{"a": "x"}')
    with pytest.raises(StoreError, match="damaged"):
        read_next_seq(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("dropout", 0.5, r"dropout 0\.5"), ("continuing_subword_prefix", "long", "cannot be loaded.*out of range")],
)
def test_tokenizers_that_draw_lots_or_panic_are_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path)
    ChatTokenizer(path, rules())
    content = json.loads(path.read_text())
    content["model"][key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said):
        ChatTokenizer(path, rules())


def test_media_whose_bytes_are_numbers_cost_their_own_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    texts = [[{"user": "<image>", "assistant": "c"}]] * 2
    images = [{"bytes": 2.0, "path": "a.png"}, {"bytes": None, "path": "cat.png"}]
    pq.write_table(pa.table({"texts": texts, "image": images}), path)
    dataset = DatasetRef.of_file(path, make_media(tmp_path / "media"), make_tokenizer(tmp_path), 4096)
    shapes, bad = profile_shard(dataset, rules(), 0, 1)
    assert len(shapes) == 1
    assert [row.reason for row in bad] == ["`bytes` is of type float, not binary"]
