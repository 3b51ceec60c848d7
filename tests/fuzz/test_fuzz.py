"""A few examples of every target, the same each time, and that a campaign can fail; `make fuzz` runs it for long."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dflop.errors import ConfigError
from tests.fuzz.engine import Campaign, fuzz
from tests.fuzz.target import Target, attempt
from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_examples_end_well(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]

    @settings(
        max_examples=target.quick, derandomize=True, database=None, deadline=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(target.examples)
    def examples(example: Any) -> None:
        target.check(ready, example)

    with contextlib.chdir(tmp_path):
        ready = target.prepare(tmp_path)
        examples()


def divides(number: int) -> None:
    if number > 1000:
        raise KeyError(number)
    if number == 3:
        raise ConfigError("three is refused", hint="another number")
    if number % 2:
        raise SystemExit(number)


def hangs(_number: int) -> None:
    with contextlib.suppress(Exception):
        while True:
            os.getpid()


def campaign(folder: Path, check: Any, **options: Any) -> Campaign:
    target = Target("toy", "numbers", st.integers(0, 10**6), lambda _, n: attempt(check, n), **options)
    folder.mkdir()
    return fuzz(target, folder, seconds=3600, first_seed=3, database=folder.parent / "database", max_slices=2)


def test_crashes_are_found_made_small_kept_once_and_run_first_the_next_time(tmp_path: Path) -> None:
    found = campaign(tmp_path / "first", divides)
    assert {crash.example for crash in found.crashes.values()} == {"1001", "1"}
    again = fuzz(found.target, tmp_path, seconds=0, first_seed=99, database=tmp_path / "database")
    assert {crash.example for crash in again.crashes.values()} == {"1001", "1"}
    assert campaign(tmp_path / "mended", lambda _: None).crashes == {}


def test_an_example_that_does_not_end_is_a_crash_even_where_that_is_swallowed(tmp_path: Path) -> None:
    (name,) = campaign(tmp_path / "hangs", hangs, deadline_s=0.05).crashes
    assert name.startswith("TooLong")
