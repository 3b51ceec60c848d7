"""A dataset that changes while a run goes through it: the order of samples hangs on which of them there are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from PIL import Image

from dflop.data.demo_text import train_tokenizer
from dflop.errors import DataError
from dflop.run import lifecycle
from dflop.run.batches import TRAIN
from dflop.run.launcher import launcher_of
from dflop.steps import parts
from dflop.steps.drive import Drive
from tests.jobs.configs import make_config

NUM_ROWS = 6


@pytest.fixture
def drive(tmp_path: Path) -> Drive:
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
    config = make_config(tmp_path, "cluster.backend=inline", "data_profile.max_bad_frac=0.5")
    run, _ = lifecycle.begin(config)
    drive = Drive(run, run.config(), launcher_of(run, run.config()), print, None, lambda: None)
    asyncio.run(parts.data_profile(drive))
    assert len(run.shapes()) == NUM_ROWS
    return drive


def picture(drive: Drive, number: int) -> Path:
    return drive.config.dataset.media_root / f"{number}.png"


def profile_again(drive: Drive, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    asyncio.run(parts.data_profile(drive))
    return capsys.readouterr().out


def test_a_run_takes_the_dataset_as_it_is_until_it_trains_and_then_keeps_it(drive, capsys):
    assert "not repeated" in profile_again(drive, capsys)
    picture(drive, 1).unlink()
    assert "5 healthy samples, 1 quarantined" in profile_again(drive, capsys)
    assert [s.sample_index for s in drive.run.shapes()] == [0, 2, 3, 4, 5]
    drive.run.claim_attempt(TRAIN)
    assert "not repeated" in profile_again(drive, capsys)
    before = drive.run.shapes()
    for file, old, new in (("a.jsonl", "cat", "dog"), ("tokenizer.json", "}", "} ")):
        path = drive.config.dataset.annotations.with_name(file)
        content = path.read_text()
        path.write_text(content.replace(old, new))
        with pytest.raises(DataError, match="not those that the run has begun to train on") as caught:
            profile_again(drive, capsys)
        assert "another `name`" in caught.value.hint
        path.write_text(content)
    assert "not repeated" in profile_again(drive, capsys)
    for change in (Path.touch, Image.new("RGB", (300, 200)).save, Path.unlink):
        change(picture(drive, 2))
        assert "files of the dataset have changed since training began" in profile_again(drive, capsys)
    assert drive.run.shapes() == before
