"""What fuzzing found, each at its smallest: all of these were tracebacks, hangs or lost rows once.

They go through the checks of their targets, with a few other examples, the same each time; what a check cannot say is
below. `make fuzz` looks for more.
"""

import contextlib
import functools
import json
import math
import operator
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import example as explicit

from dflop.cli.common import check_value
from dflop.config import load_config
from dflop.data.dataset_profile import profile_shard
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError, StoreError
from dflop.models import load_family
from dflop.records import from_dict, parse_json
from dflop.store import settings
from dflop.store.lease import Lease
from dflop.store.snapshot import Current
from dflop.store.spool import read_next_seq
from tests.data.helpers import make_tokenizer
from tests.fuzz.hostile import as_json
from tests.fuzz.targets import TARGETS
from tests.fuzz.targets.dataset import SIZES, dataset_at, prepare, write_parquet
from tests.fuzz.targets.media import rules
from tests.fuzz.targets.runs import sound_tables
from tests.jobs.configs import write_config

NO_VALUES = ("0x" + "f" * 9000, "{a: " * 500, "!!float a", ".nan", '"\\ud800"', "2001-01-01", "!!binary aGk=", "1e999")
CURRENT = {**dict.fromkeys(("file", "sha256", "revision", "duckdb"), "0"), "seq": 3, "published_at_s": 1.0}
DEEP = b"[" * 3000


def edited(value: Any, *above: Any, **changes: Any) -> bytes:
    """A document as JSON, with other values at a place in it."""
    functools.reduce(operator.getitem, above, value).update(changes)
    return as_json(value)


def section(family: str, hf_config: Any, **media: Any) -> dict[str, Any]:
    return {"family": family, "hf_config": hf_config, "media": media}


EXAMPLES: dict[str, list[Any]] = {
    "config-set": [["model.hf_config.text_config=a"], ["dataset.annotations=" + "a" * 5000]],
    "chat-template": [("{{ 1 // 0 }}", ["user"]), ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", ["user"])],
    "chat-template-name": ["\x00"],
    "chat-template-file": [DEEP, as_json({"chat_template": [3]})],
    "model-section": [
        section("llava_onevision", {"vision_config": 3}), section("internvl", {"downsample_ratio": 5e-324}),
        section("qwen2_5_vl", {"vision_config": {"patch_size": 0}}), section("qwen2_5_vl", {}, max_pixels=math.nan),
        section("qwen3_vl", {"vision_config": {"depth": 2**31}}),
    ],
    "model-config-json": [(as_json({"model_type": "internvl", "vision_config": {"norm_type": "no"}}), b"{}")],
    "sizes": [{**SIZES, "image_h": [None, []]}, {**SIZES, "video_seconds": [[1e308], []]},
              {**SIZES, "prompt_tokens": ["three", "four"]}, {**SIZES, "turns": [10**12, 1]}],
    "store-json": [
        ("CURRENT", as_json({**CURRENT, "seq": None})), ("store.json", DEEP),
        ("archive/correction/run/next_seq.json", b"[1]"),
    ],
    "sql": [("\ud800select 1", None)],
    "sql-parameters": [(0, {"a": "\ud800"})],
    "sql-file": ["-- purpose: \udcff"],
    "sample-costs": [b"", b"PK\x03\x04", b"P"],
    "cost-tables": [
        edited(sound_tables(), 0, "forward_s", layer_knots=[*sound_tables()[0]["forward_s"]["layer_knots"], 100.0]),
    ],
    "run-directory": [
        ("plan.json", b""), ("run.json", b"[1]"), ("jobs.jsonl", b"[1]\n"), ("jobs.jsonl", DEEP + b"\n"),
        ("plan_basis.json", b"[]"), ("shapes.parquet", b""),
    ],
    "checkpoints": [DEEP, as_json({"meta": {"next_step": 20}, "files": {"a": [math.inf, 1]}})],
    "slurm-answers": [
        "0|1_[0-9:0]|PENDING|1|1|n|None|a", "0|1|PENDING|1|" + "9" * 400 + "|n|None|a",
    ],
    "command-line": [
        ["plan", "\x00"], ["sql", "tables", "--store", "a" * 300], ["runs", "show", "a" * 300],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_what_was_found_and_a_few_other_examples_end_well(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    test = given(target.examples)(lambda example: target.check(prepared, example))
    for found in EXAMPLES.get(name, ()):
        test = explicit(found)(test)
    with contextlib.chdir(tmp_path):
        prepared = target.prepare(tmp_path)
        hypothesis.settings(
            max_examples=target.quick, derandomize=True, database=None, deadline=None,
            phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck),
        )(test)()  # fmt: skip


def written(folder: Path, name: str, data: bytes) -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def tokenizer(folder: Path, **changes: Any) -> None:
    path = make_tokenizer(folder)
    ChatTokenizer(written(folder, path.name, edited(json.loads(path.read_text()), "model", **changes)), rules())


REFUSED: list[tuple[Callable[[Path], Any], type[Exception] | tuple[type[Exception], ...], str | None]] = [
    (lambda path: settings.init(path, lease_s=1e300), ConfigError, "at most"),
    (lambda path: settings.read_settings(written(path, "store.json", b'{"lease_s": NaN}').parent), StoreError,
     "at most"),
    *((lambda _, s=s: check_value(float, s), ValueError, "a number between") for s in (math.nan, math.inf, 1e300)),
    (lambda _: from_dict(Current, {**CURRENT, "seq": math.inf}), (TypeError, ValueError), None),
    (lambda _: from_dict(Current, [1]), TypeError, "object"),
    (lambda _: parse_json("[" * 100_000), ValueError, "nested"),
    (lambda _: load_family("qwen2_5_vl", {"vision_config": {"depth": "many"}}, {}), ConfigError,
     r"positive whole number(.|\n)*model\.hf_config\.vision_config\.depth"),
    (lambda path: read_next_seq(written(path, "next_seq.json", b'{"a": "x"}').parent), StoreError, "damaged"),
    (partial(tokenizer, dropout=0.5), ConfigError, r"dropout 0\.5"),
    *((lambda path, value=value: load_config(write_config(path), [f"model.hf_config.a={value}"]), ConfigError,
       r"--set model\.hf_config\.a=") for value in NO_VALUES),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_what_was_found_is_refused_in_words(call: Any, error: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        call(tmp_path)


def test_lists_of_different_lengths_and_media_that_are_numbers_cost_their_own_row(tmp_path: Path) -> None:
    columns = {**SIZES, "image_w": [[640, 2], [10]], "image_h": [[480], [20]], "turns": [1, 10**12]}
    path = write_parquet(prepare(tmp_path), columns)
    shapes, bad = profile_shard(dataset_at(path, tmp_path), rules(), 0, 1)
    assert (len(shapes), [row.reason for row in bad]) == (0, [
        "`image_w` and `image_h` have different numbers of entries",
        f"sample too long: {10**12} turns > max_llm_tokens 4096",
    ])  # fmt: skip
    images = [{"bytes": 2.0, "path": "a.png"}, {"bytes": None, "path": "rgb.png"}]
    path = write_parquet(tmp_path, {"texts": [[{"user": "<image>", "assistant": "c"}]] * 2, "image": images})
    shapes, bad = profile_shard(dataset_at(path, tmp_path), rules(), 0, 1)
    assert (len(shapes), ["of type float" in row.reason for row in bad]) == (1, [True])


def test_a_damaged_claim_expires_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "INGEST.lease").mkdir()
    os.utime(written(tmp_path / "INGEST.lease", "000007.json", b"{"), (1.0, 1.0))
    with Lease(tmp_path, lease_s=10, timeout_s=0.0) as lease:
        assert lease.epoch == 8
