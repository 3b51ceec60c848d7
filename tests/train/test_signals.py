from __future__ import annotations

import os
import signal

import pytest

from dflop.train.signals import STOP_SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def handlers_as_before():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_said_and_the_second_changes_nothing(number, capfd):
    def end(*_):
        raise AssertionError("an earlier handler, as submitit's, would end the process")

    signal.signal(number, end)
    stop = StopRequest()
    stop.listen()
    assert not stop.is_set()
    os.kill(os.getpid(), number)
    assert stop.is_set()
    for again in STOP_SIGNALS:
        os.kill(os.getpid(), again)
    assert stop.is_set()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(signal.Signals(number).name)
