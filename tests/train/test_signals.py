from __future__ import annotations

import os
import signal
import subprocess
import sys

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


@pytest.mark.parametrize("how", ["told", "done", "listens"])
def test_a_process_that_stops_or_has_done_its_work_does_not_die_of_a_late_signal(how):
    """It comes when Python has given up its handlers: `exit` calls what is registered here with the exit code."""
    code = (
        "import ctypes, os, signal, sys\n"
        "from dflop.train.signals import StopRequest\n"
        "libc, stop = ctypes.CDLL(None), StopRequest()\n"
        "stop.listen()\n"
        "if sys.argv[1] == 'told': os.kill(os.getpid(), signal.SIGTERM)\n"
        "if sys.argv[1] == 'done': stop.ignore()\n"
        "libc.on_exit(getattr(libc, 'raise'), None)\n"
        "sys.exit(int(signal.SIGUSR2))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, how], capture_output=True, text=True, check=False)
    died = how == "listens"
    assert ended.returncode == (-signal.SIGUSR2 if died else signal.SIGUSR2), ended.stderr
