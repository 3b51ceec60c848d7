"""What waiting costs, estimated from a file of lengths: `dflop sampler estimate`."""

import json

import numpy as np
import polars as pl
import pytest

from dflop.data.lengths_file import read_lengths
from dflop.errors import ConfigError
from dflop.sampler import sample_costs
from dflop.sampler.estimate import BY_COST, GROUPED, OURS, RANDOM, WINDOW, Setting, Waiting, estimate_waiting, verdict
from tests.sampler.test_batch_sampler import LENGTHS
from tests.test_cli import assert_refused, dflop


def test_lengths_and_costs_of_any_file(tmp_path):
    texts = {
        "a.txt": "3 5\n8", "a.csv": "id,length\na,3\nb,5\nc,8\n", "b.csv": "3\n5\n8\n", "a.json": "[3, 5, 8]",
        "b.json": '[{"tokens": 3}, {"tokens": 5}, {"tokens": 8}]', "c.json": '{"length": [3, 5, 8]}',
        "a.jsonl": "3\n5\n8\n", "b.jsonl": '{"input_ids": [1, 2, 3]}\n{"input_ids": [1, 2, 3, 4, 5]}\n'
        '{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n',
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    np.save(tmp_path / "a.npy", np.array([3, 5, 8]))
    pl.DataFrame({"length": [3, 5, 8], "cost": [0.5, 1.0, 2.0]}).write_parquet(tmp_path / "a.parquet")
    for path in sorted(tmp_path.iterdir()):
        lengths, costs = read_lengths(path)
        assert lengths.tolist() == [3, 5, 8], path.name
        assert (costs is not None) == (path.suffix == ".parquet")
    (tmp_path / "c.csv").write_text("seconds\n0.5\n1.5\n")
    assert read_lengths(tmp_path / "c.csv")[1].tolist() == [0.5, 1.5]
    bad = {"a.txt": ("1 x", "", "-1", "nan"), "a.csv": ("\n1", "", "0,3\n1,5", "0.5,3\nx,5")}
    for name, text in ((name, text) for name, texts in bad.items() for text in texts):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=r"cannot be read|no numbers"):
            read_lengths(tmp_path / name)
    np.save(tmp_path / "a.npy", np.array([[3, 5], [8, 1]]))
    with pytest.raises(ConfigError, match=r"one column without a name, not an array of shape \(2, 2\)"):
        read_lengths(tmp_path / "a.npy")


@pytest.mark.parametrize("setting", [Setting(2, 32), Setting(2, 32, 2, True), Setting(4, 32, 2, False, "microbatch")])
def test_balanced_ranks_wait_least(setting):
    found = {of.order: of for of in estimate_waiting(sample_costs(LENGTHS), setting, max_steps=6)}
    same_batches = [of.step_cost for name, of in found.items() if name != GROUPED and not name.startswith(WINDOW)]
    assert found[OURS].step_cost <= 1.001 * min(same_batches) < found[RANDOM].step_cost
    assert found[OURS].waiting_frac < 0.5 * found[RANDOM].waiting_frac
    assert (found[RANDOM].step_cost > 2 * found[OURS].step_cost) == setting.padded, "less padding and less waiting"
    assert (found[RANDOM].padding_frac > 2 * found[OURS].padding_frac) == setting.padded


def test_waiting_is_what_ranks_are_short_of_the_slowest(tmp_path):
    (tmp_path / "l.json").write_text(json.dumps([{"cost": c} for c in (6.0, 2.0, 2.0, 2.0)]))
    done = dflop("sampler", "estimate", "l.json", "--ranks", "2", "--batch", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["order"]: row["waiting_frac"] for row in map(json.loads, done.stdout.splitlines())}
    window = {f"{WINDOW} of 2": 0}
    assert rows == pytest.approx(
        {RANDOM: 0.25, GROUPED: 0.25, "Karmarkar-Karp, tokens": 0, BY_COST: 0, OURS: 0, **window}
    )
    assert "stand for tokens" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("dflop: 1.33x over random order, as fast as Karmarkar-Karp")
    refused = dflop("sampler", "estimate", "l.json", "--ranks", "2", cwd=tmp_path)
    assert_refused(refused, 2, "4 samples do not fill one global batch of 16")


@pytest.mark.parametrize("median", [60, 400])
@pytest.mark.parametrize(
    ("ranks", "slots", "sync"), [(2, 2, "step"), (2, 1, "step"), (8, 4, "microbatch"), (1, 4, "step")]
)
def test_a_window_is_never_slower_than_length_grouping(median, ranks, slots, sync):
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(median), 1, 6000), 16, 8192).astype(int)
    found = estimate_waiting(sample_costs(lengths), Setting(ranks, 8 * ranks * slots, slots, True, sync), max_steps=25)
    assert found[-1].step_cost <= next(of for of in found if of.order == GROUPED).step_cost


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        ((9, 9, 9, 9, 8.9, 8.9), "Stay with what you have: ranks wait 50.0 %"),
        ((9, 3, 6, 5, 4, 2), "Keep group_by_length if correlated batches are acceptable to you: 1.33x faster here; "
         "dflop, window of 4 is 1.50x faster still. Else dflop: 1.25x over the best other order of random batches"),
        ((9, 3, 6, 5, 4, 3), "1.33x faster here. Else dflop"),
        ((9, 5, 6, 5.5, 4, 4), "dflop: 1.25x over the best other order (length-grouped)."),
        ((9, 5, 6, 5.5, 4, 2), "(length-grouped); dflop, window of 4 is 2.00x faster still if correlated"),
        ((9, 12, 6, 4, 4, 4), "dflop: 2.25x over random order, as fast as kk cost: stay with that if"),
    ],
)  # fmt: skip
def test_the_verdict_names_what_is_fastest_also_where_that_is_not_dflop(costs, words):
    names = (RANDOM, GROUPED, "kk tokens", "kk cost", OURS, f"{WINDOW} of 4")
    assert words in verdict([Waiting(name, 0.5, 0.1, cost, 9) for name, cost in zip(names, costs, strict=True)])
