"""A few examples of every target, the same each time; `make fuzz` runs them for as long as one likes."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from tests.fuzz import hostile, page
from tests.fuzz.engine import fuzz
from tests.fuzz.target import Target, attempt, read_back, written
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_examples_end_well(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    with contextlib.chdir(tmp_path):
        check = target.prepare(tmp_path)

        @settings(
            max_examples=target.quick, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(target.examples())
        def examples(example: object) -> None:
            check(example)

        examples()


@given(hostile.VALUES)
@settings(max_examples=60)
def test_an_example_reads_back_as_it_was_written(example: object) -> None:
    assert written(read_back(written(example))) == written(example)
    assert math.isnan(read_back("nan"))


@given(st.data())
@settings(max_examples=30)
def test_broken_documents_and_bytes_are_rarely_the_sound_ones(data: st.DataObject) -> None:
    sound = {"a": [1, {"b": "c"}], "d": 2.5}
    assert data.draw(hostile.broken(sound)) is not sound
    assert sound == {"a": [1, {"b": "c"}], "d": 2.5}
    assert isinstance(data.draw(hostile.broken_bytes([b"abc", b""])), bytes)
    assert isinstance(data.draw(hostile.broken_text(["abc"], ("x",))), str)


def _divides(number: int) -> None:
    if number > 1000:
        raise KeyError(number)
    if number == 3:
        raise ConfigError("three is refused", hint="another number")


def _toy(_folder: Path) -> object:
    return lambda number: attempt(_divides, number)


def test_a_crash_is_found_made_small_and_kept_once(tmp_path: Path) -> None:
    target = Target("toy", "numbers", lambda: st.integers(0, 10**6), _toy)
    told: list[str] = []
    found = fuzz(target, tmp_path, seconds=600, max_rounds=1, first_seed=3, last=tmp_path / "last", say=told.append)
    (crash,) = found.crashes.values()
    assert crash.name.startswith("KeyError in test_fuzz.py")
    assert read_back(crash.example) == 1001
    assert found.num_examples > 10
    assert len(told) == 1
    assert read_back((tmp_path / "last").read_text()) is not None


def test_an_example_that_does_not_end_is_a_crash_even_where_that_is_swallowed(tmp_path: Path) -> None:
    def hangs(_folder: Path) -> object:
        def check(_number: int) -> None:
            with contextlib.suppress(Exception):
                while True:
                    os.getpid()

        return check

    target = Target("hangs", "numbers", lambda: st.just(1), hangs, deadline_s=0.05)
    with _alarm_kept():
        found = fuzz(target, tmp_path, seconds=0, first_seed=1)
    assert list(found.crashes) == ["TooLong, and swallowed"]


@contextlib.contextmanager
def _alarm_kept() -> Iterator[None]:
    """pytest's own limit is set again behind a test that uses the alarm."""
    before = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_the_page_tells_examples_and_crashes_of_every_target() -> None:
    results = [
        {"target": "a", "what": "x", "num_examples": 1200, "elapsed_s": 3.2, "crashes": []},
        {"target": "b", "what": "y", "num_examples": 5, "elapsed_s": 1.0, "crashes": [{"name": "E"}]},
    ]
    lines = page.tables({"targets": results})["fuzz"].splitlines()
    assert lines[2:] == ["| `a` | x | 1,200 | 3 | 0 |", "| `b` | y | 5 | 1 | 1 |", "| all |  | 1,205 | 4 | 1 |"]
