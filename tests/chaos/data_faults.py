"""Faults of the dataset: files that are gone, cut, changed or no files, and rows that change under a run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.chaos.fault import Deed, End, Fault, NothingToStrike
from tests.chaos.play import Play
from tests.chaos.stage import CUT, MISSING

_ASIDE = "aside"


def _sound_picture(play: Play) -> tuple[str, Path]:
    """(id of a sample, its picture) that nothing has happened to yet."""
    spoilt = {MISSING, CUT} | play.must_be_left_out | play.may_be_left_out
    rows = [row for row in play.stage.rows() if "image" in row and row["id"] not in spoilt]
    if not rows:
        raise NothingToStrike("no sound picture is left")
    row = play.rng.choice(rows)
    return row["id"], play.stage.media / row["image"]


def spoil(deed: Callable[[Path, Play], None], *, is_sure: bool) -> Deed:
    """Do something to the picture of one sample; `is_sure`: that sample has to be left out because of it."""

    def strike(play: Play) -> None:
        sample_id, path = _sound_picture(play)
        deed(path, play)
        (play.must_be_left_out if is_sure else play.may_be_left_out).add(sample_id)
        play.note(f"{deed.__name__.strip('_')}: {path.name} of sample {sample_id}")

    return strike


def _removed(path: Path, play: Play) -> None:
    path.unlink()


def _cut(path: Path, play: Play) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _emptied(path: Path, play: Play) -> None:
    os.truncate(path, 0)


def _noise(path: Path, play: Play) -> None:
    path.write_bytes(play.rng.randbytes(20_000))


def _folder(path: Path, play: Play) -> None:
    path.unlink()
    path.mkdir()


def _loop(path: Path, play: Play) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _outside(path: Path, play: Play) -> None:
    target = play.stage.folder / path.name
    shutil.move(path, target)
    path.symlink_to(target)


def _pipe(path: Path, play: Play) -> None:
    path.unlink()
    os.mkfifo(path)


def _other_picture(path: Path, play: Play) -> None:
    from PIL import Image

    Image.new("RGB", (640, 40), (play.rng.randrange(256), 0, 0)).save(path)


def touch(play: Play) -> None:
    """All pictures have another time, as after a copy."""
    for path in sorted(play.stage.media.iterdir()):
        os.utime(path)


def bad_rows(play: Play) -> None:
    """Rows that are no samples; the profile leaves them out."""
    with play.stage.annotations.open("a") as file:
        file.write('{"id": "torn", "conversations": [\n')
        file.write(json.dumps({"id": "mute", "conversations": [{"from": "human", "value": "hello?"}]}) + "\n")
    play.must_be_left_out |= {"mute"}
    play.may_be_left_out |= {"torn", ""}


def another_row(play: Play) -> None:
    """A row more than the run has begun with."""
    path = play.stage.annotations
    shutil.copyfile(path, play.stage.data / _ASIDE)
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([rows[-3].replace('"id": "', '"id": "more-'), *rows]))


def rows_back(play: Play) -> None:
    os.replace(play.stage.data / _ASIDE, play.stage.annotations)


def aside(name: str) -> tuple[Deed, Deed]:
    """(a file or folder of the dataset is elsewhere, it is back)."""

    def gone(play: Play) -> None:
        os.replace(play.stage.data / name, play.stage.data / f"{name}.{_ASIDE}")

    def back(play: Play) -> None:
        os.replace(play.stage.data / f"{name}.{_ASIDE}", play.stage.data / name)

    return gone, back


def broken_headers(play: Play) -> None:
    """The cache of headers is noise."""
    files = sorted((play.stage.store / "cache" / "headers").glob("*/*.parquet"))
    if not files:
        raise NothingToStrike("no cache of headers")
    for path in files:
        path.write_bytes(play.rng.randbytes(100))


_FAILED_OR_CONFIG = (1, 2)


def _absent(name: str, says: str) -> tuple[Deed, tuple[End, ...]]:
    gone, back = aside(name)
    return gone, tuple(End(code, says, back) for code in _FAILED_OR_CONFIG)


def _absent_fault(title: str, name: str, says: str, *, is_between: bool) -> Fault:
    gone, ends = _absent(name, says)
    when = "training" if is_between else "before"
    return Fault(title, "data", when, gone, ends, is_between=is_between, excludes="absent")


_REPLACED = "picture replaced between two starts"

FAULTS = (
    *(
        Fault(f"picture {what} before the run", "data", "before", spoil(deed, is_sure=True))
        for what, deed in (
            ("lost", _removed), ("cut in half", _cut), ("emptied", _emptied), ("of noise", _noise),
            ("that is a folder", _folder), ("that is a link to itself", _loop), ("that leads outside", _outside),
            ("that is a pipe", _pipe),
        )
    ),
    *(
        Fault(f"picture {what} while it trains", "data", "training", spoil(deed, is_sure=False))
        for what, deed in (
            ("lost", _removed), ("cut in half", _cut), ("of noise", _noise), ("replaced by another", _other_picture),
            ("that is a pipe", _pipe),
        )
    ),
    Fault("picture lost between two starts", "data", "training", spoil(_removed, is_sure=False), is_between=True),
    Fault(_REPLACED, "data", "training", spoil(_other_picture, is_sure=False), is_between=True),
    Fault("all pictures touched between two starts", "data", "training", touch, is_between=True),
    Fault("rows that are no samples", "data", "before", bad_rows, excludes="rows"),
    Fault(
        "a row more between two starts", "data", "training", another_row,
        (End(1, "are not those that the run has begun to train on", rows_back),), is_between=True, excludes="rows",
    ),
    _absent_fault("annotations lost before the run", "annotations.jsonl", "annotations.jsonl", is_between=False),
    _absent_fault("annotations lost between two starts", "annotations.jsonl", "annotations.jsonl", is_between=True),
    _absent_fault("tokenizer lost between two starts", "tokenizer.json", "tokenizer.json", is_between=True),
    _absent_fault("media folder lost between two starts", "media", "media", is_between=True),
    Fault("cache of headers overwritten", "data", "planned", broken_headers),
)  # fmt: skip
