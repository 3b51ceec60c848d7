"""Processes that are just being started, or have just ended."""

from types import SimpleNamespace

import psutil
import pytest

from dflop.launch.process import environment_of


@pytest.mark.parametrize(
    ("status", "seen", "expected"),
    [
        (psutil.STATUS_RUNNING, [{}, {}, {"a": "1"}, {"a": "1"}], {"a": "1"}),
        (psutil.STATUS_ZOMBIE, [{}, {}], {}),
    ],
)
def test_a_program_that_is_being_loaded_is_waited_for(status, seen, expected):
    """Right after a process was started Linux shows no environment of it, now and then."""
    left = iter(seen)
    process = SimpleNamespace(environ=lambda: next(left), is_running=lambda: True, status=lambda: status)
    assert environment_of(process) == expected
    assert not list(left), "each look was needed"
