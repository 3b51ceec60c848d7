"""A dataset that changes while a run goes through it: the order of samples hangs on which of them there are."""

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image

from dflop.data.demo_content import train_tokenizer
from dflop.errors import DataError
from dflop.run import lifecycle
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir
from dflop.run.queue import launcher_of
from dflop.run.training_claim import TrainingClaim
from dflop.steps import profiling
from dflop.steps.follow import Listener
from dflop.steps.session import profiled_data
from tests.jobs.configs import make_config

NUM_ROWS = 6


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of a small dataset that is profiled; what is said of it is kept in `said`."""
    media = tmp_path / "data" / "media"
    media.mkdir(parents=True)
    rows = []
    for number in range(NUM_ROWS):
        Image.new("RGB", (60 + number, 60)).save(media / f"{number}.png")
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": "a picture of a cat"}]
        rows.append(json.dumps({"id": str(number), "image": f"{number}.png", "conversations": turns}) + "\n")
    (tmp_path / "data" / "a.jsonl").write_text("".join(rows))
    train_tokenizer(["a picture of a cat\n"], tmp_path / "data" / "tokenizer.json")
    config = make_config(tmp_path, "data_profile.max_bad_frac=0.5")
    run, _ = lifecycle.begin(config)
    profile(run)
    assert len(run.shapes()) == NUM_ROWS
    return run


def profile(run: RunDir) -> None:
    """What a driver does when it takes a run up."""
    data = asyncio.run(profiled_data(run, launcher_of(run, run.config()), Listener(print)))
    profiling.take_samples(run, data, print)


def picture(run: RunDir, number: int) -> Path:
    return run.config().dataset.media_root / f"{number}.png"


def profile_again(run: RunDir, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    profile(run)
    return capsys.readouterr().out


def test_a_run_takes_the_dataset_as_it_is_until_it_trains_and_then_keeps_it(run, capsys):
    assert "reused" in profile_again(run, capsys)
    picture(run, 1).unlink()
    assert "5 valid samples, 1 skipped" in profile_again(run, capsys)
    assert [s.sample_index for s in run.shapes()] == [0, 2, 3, 4, 5]
    TrainingClaim(run, TRAIN, print).release()
    assert "reused" in profile_again(run, capsys)
    before = run.shapes()
    for file, old, new in (("a.jsonl", "cat", "dog"), ("tokenizer.json", "}", "} ")):
        path = run.config().dataset.annotations.with_name(file)
        content = path.read_text()
        path.write_text(content.replace(old, new))
        with pytest.raises(DataError, match="differ from those at the start of training") as caught:
            profile_again(run, capsys)
        assert "another `name`" in caught.value.hint
        path.write_text(content)
    assert "reused" in profile_again(run, capsys)
    for change in (Path.touch, Image.new("RGB", (300, 200)).save, Path.unlink):
        change(picture(run, 2))
        assert "files of the dataset have changed since training began" in profile_again(run, capsys)
    assert run.shapes() == before
