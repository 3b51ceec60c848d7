"""That a campaign can fail."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.errors import ConfigError
from tests.fuzz.engine import fuzz
from tests.fuzz.target import Target, attempt


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


def examples(folder: Path, check: Any, **options: Any) -> set[str]:
    """Those of the crashes of a campaign."""
    target = Target("toy", "numbers", st.integers(0, 10**6), lambda _, n: attempt(check, n), **options)
    folder.mkdir()
    found = fuzz(target, folder, seconds=3600, seeds=(3,), database=folder.parent / "database")
    return {re.findall(r"example=(\d+),", crash)[-1] for crash in found["crashes"]}


def test_crashes_are_made_small_and_kept_until_they_are_repaired(tmp_path: Path) -> None:
    assert examples(tmp_path / "first", divides) == {"1001", "1"}
    assert any((tmp_path / "database" / "toy").iterdir())
    assert examples(tmp_path / "repaired", lambda _: None) == set()
    assert examples(tmp_path / "hangs", hangs, deadline_s=0.05) == {"0"}, "even where that is swallowed"
