"""Costs of samples, from a function, from tables and from a store."""

import json
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from dflop.cost.model import CostModel
from dflop.data.demo_content import SPECIAL_TOKENS, train_tokenizer
from dflop.errors import ConfigError, DataError
from dflop.models.weights import hf_types
from dflop.records import LLM, Correction, ProfileRecord, to_dict
from dflop.sampler.costs_of_media import media_costs
from dflop.sampler.costs_of_samples import SampleCosts, sample_costs, sample_costs_from_store, sample_costs_from_tables
from tests.builders import make_corrections, make_sample, make_table, random_batch
from tests.data.containers import jsonl_of
from tests.data.helpers import chat
from tests.models.tiny_families import CASES
from tests.store.asking import fill

TABLES = [make_table(LLM, per_token_s=3e-5), make_table("vision"), make_table("audio")]
KEYS = {"data": "data", TABLES[0].profile_key: "model"}
PROFILES = [ProfileRecord(key, kind, "run", "{}", 20, 0, time.time(), 1.0) for key, kind in KEYS.items()]


def test_a_sample_costs_its_tokens_what_a_function_says_or_what_a_list_holds():
    lengths = [10, 400, 30]
    costs = sample_costs(lengths, cost=lambda i: lengths[i] ** 1.5, supervised=[5, 6, 7])
    assert costs.seconds == pytest.approx([10**1.5, 8000, 30**1.5])
    assert costs.tokens.tolist() == lengths
    assert costs.supervised.tolist() == [5, 6, 7]
    assert sample_costs(iter([3, 4])).seconds.tolist() == [3.0, 4.0]
    assert sample_costs([3, 4], cost=[1.5, 2.5]).seconds.tolist() == [1.5, 2.5]


def test_a_file_of_costs_holds_everything(tmp_path):
    costs = SampleCosts(
        np.array([1.0, 2.0]), np.array([3, 4]), np.array([1, 1]), np.array([7, 9]), np.array([1.0, 2.0]), 0.25, "x"
    )
    costs.save(tmp_path / "costs.npz")
    found = SampleCosts.load(tmp_path / "costs.npz")
    assert (found.key, found.fixed_s, found.origin, found.index.tolist()) == (costs.key, 0.25, "x", [7, 9])
    sample_costs([1, 2]).save(tmp_path / "bare.npz")
    assert SampleCosts.load(tmp_path / "bare.npz").supervised is None


def test_the_key_sees_every_number():
    base = {"lengths": [1, 2], "cost": [1.0, 2.0], "supervised": [1, 1], "fixed": 0.5}
    changes = [{}, {"lengths": [1, 3]}, {"cost": [1.0, 2.5]}, {"supervised": None}, {"fixed": 0.25}]
    assert len({sample_costs(**{**base, **change}).key for change in changes}) == len(changes)
    assert sample_costs(**base).key == sample_costs(**base).key


def test_by_tables_a_sample_costs_what_the_cost_model_says_in_all_modules(tmp_path):
    shapes = random_batch(20, seed=3)
    (tmp_path / "cost_tables.json").write_text(json.dumps([to_dict(t) for t in TABLES]))
    costs = sample_costs_from_tables(tmp_path / "cost_tables.json", shapes)
    model = CostModel(TABLES, extrapolate=True)
    for i, shape in enumerate(shapes):
        expected = 0.0
        for table in TABLES:
            load = shape.load(table.module)
            args = (load.num_items, load.num_tokens, load.sum_sq_tokens)
            expected += model.item_seconds(table.module, args, num_layers=table.num_layers, edge=True)
        assert costs.seconds[i] == pytest.approx(float(expected))
    assert costs.tokens.tolist() == [s.num_llm_tokens for s in shapes]
    assert costs.supervised.tolist() == [s.num_supervised_tokens for s in shapes]
    assert costs.fixed_s > 0
    assert costs.weights is None


def test_a_file_that_holds_no_tables_is_refused(tmp_path):
    (tmp_path / "plan.json").write_text('{"schema": "dflop.plan"}')
    with pytest.raises(ConfigError, match="cost tables"):
        sample_costs_from_tables(tmp_path / "plan.json", random_batch(2))


def seconds_of(module, tables, shapes, **how):
    """What one module takes of every sample: the others take nothing."""
    free = {"fixed_s": 0.0, "per_token_s": 0.0, "per_sq_token_s": 0.0, "edge_per_token_s": 0.0}
    part = [t if t.module == module else replace(make_table(t.module, **free), trains=t.trains) for t in tables]
    return sample_costs_from_tables(part, shapes, **how).seconds


def test_a_store_gives_the_same_costs_and_the_corrections_in_force(tmp_path):
    shapes = random_batch(20, seed=3)
    fill(tmp_path, *shapes[::-1], *TABLES, *PROFILES)
    plain, by_tables = sample_costs_from_store(tmp_path), sample_costs_from_tables(TABLES, shapes)
    assert plain.key == by_tables.key
    fill(tmp_path, Correction("run", 3, LLM, TABLES[0].table_id, 2.0, 0.1, 8, time.time()), producer="q")
    corrected = sample_costs_from_store(tmp_path, data_profile="da", model_profile=TABLES[0].profile_key)
    assert corrected.seconds == pytest.approx(plain.seconds + seconds_of(LLM, TABLES, shapes))
    with pytest.raises(DataError, match="no data profile"):
        sample_costs_from_store(tmp_path, data_profile="zz")


def test_corrections_by_size_count_sample_by_sample_in_the_state_a_module_is_in(tmp_path):
    shapes = [make_sample(0, 50), make_sample(1, 150), make_sample(2, 150, [("vision", 40), ("vision", 80)])]
    trained, frozen = make_table("vision"), make_table("vision", table_id="vision-frozen", trains="none")
    tables = [make_table(LLM), trained, frozen]
    made = partial(make_corrections, observed_at_s=time.time())
    rows = [
        *made(LLM, (1.5, 3.0), (100,), level=2.0),
        *made("vision", (2.0, 9.0), (100,), table_id=frozen.table_id),
        *made("vision", (5.0, 5.0), (100,), table_id=trained.table_id, is_in_force=False, level=4.0),
    ]
    fill(tmp_path, *shapes, *tables, *PROFILES, *rows)
    for way, times in ((("vision",), 2.0), ((), 4.0)):
        found = sample_costs_from_store(tmp_path, frozen=way).seconds
        llm_s, vision_s = (seconds_of(module, tables, shapes, frozen=way) for module in (LLM, "vision"))
        assert found == pytest.approx(llm_s * [1.5, 3.0, 3.0] + vision_s * times, rel=1e-4)


def test_a_models_files_and_headers_of_media_are_enough(tmp_path, caplog):
    """Of a file and in memory; what cannot be read is left out, and what carries loss is the trainer's business."""
    case, tokens = CASES["Qwen2.5-VL"], ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    config = hf_types(case.family, case.family.hf_config)[0]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    rows = [chat("<image>\nwhat?", "that", image=f"{i}.png") for i in range(3)]
    for i in range(2):
        Image.new("RGB", (112 * (i + 1), 56)).save(tmp_path / f"{i}.png")
    jsonl_of([*rows, chat("what?", "that " * 20)], tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        media_costs(tmp_path, rows)
    train_tokenizer(["what that\n"], tmp_path / "tokenizer.json", [*SPECIAL_TOKENS, *tokens])
    found = media_costs(tmp_path, tmp_path / "rows.jsonl")
    assert (found.index.tolist(), found.supervised) == ([0, 1, 3], None)
    assert found.tokens[1] - found.tokens[0] == 8, "two rows of four tokens of 28 x 28 px"
    assert found.seconds[1] > found.seconds[0] > 0
    assert "1 of 4 samples are left out; row 2: image: " in caplog.text
    in_memory = media_costs(tmp_path / "config.json", rows[:2], media_root=tmp_path)
    assert in_memory.index is None
    assert in_memory.tokens.tolist() == found.tokens[:2].tolist()
    with pytest.raises(DataError, match="no sample can be read, row 0: image"):
        media_costs(tmp_path, rows[2:], media_root=tmp_path)
