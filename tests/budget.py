"""What a test costs in processor time, that of the processes it starts included, and the budget that it must keep.

A clock would measure the machine's other work too. A run prints its dearest tests at the end; a test outside the lanes
that exceeds the budget fails with the advice where it belongs. Processes that left the test's process tree (a daemon
whose parent ended) are not seen. What the server that forks ranks imports is charged to nobody: it would be to the test
that comes first.
"""

import contextlib
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest

BUDGET_CPU_S = 16.0
SLOWER_RATIO = 1.5
"""By how much one machine may be slower than another, or neighbours slow it, before a test fails for its budget."""
NUM_SHOWN = 10
_COST = "cpu_s"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write every test's processor seconds to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Meter(), "dflop-meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Costs(config.getoption("costs")), "dflop-costs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with a budget of their own come first, so that workers end together."""
    dear = {item.path for item in items if item.get_closest_marker("budget")}
    items.sort(key=lambda item: item.path not in dear)


def tree_cpu_s() -> float:
    """Processor seconds of this process, of its children that ended, and of all descendants that still run."""
    times = os.times()
    return sum(times[:4]) + sum(map(_cpu_s, _descendants(os.getpid())))


def _descendants(pid: int) -> Iterator[int]:
    children: list[str] = []
    with contextlib.suppress(OSError):  # the process or a thread of it ended
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            children += tasks.read_text().split()
    for child in children:
        yield int(child)
        yield from _descendants(int(child))


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it ended and is counted by whoever waited for it
        return 0.0
    is_server = pid == forkserver._forkserver._forkserver_pid
    return sum(map(int, fields[13 if is_server else 11 : 15])) * _TICK_S  # utime, stime, cutime, cstime


class _Meter:
    """In every process that runs tests."""

    def __init__(self) -> None:
        self._start_s = 0.0
        self._limit_s = BUDGET_CPU_S

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._start_s = tree_cpu_s()
        own = item.get_closest_marker("budget")
        in_lane = item.get_closest_marker("lane") or item.get_closest_marker("gpu")
        self._limit_s = float("inf") if in_lane else own.args[0] if own else BUDGET_CPU_S
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
        report = yield
        if call.when == "setup":
            return report
        cost_s = tree_cpu_s() - self._start_s
        if call.when == "teardown":
            report.user_properties.append((_COST, round(cost_s, 2)))
        elif cost_s > SLOWER_RATIO * self._limit_s and report.passed:
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {cost_s:.1f} s of processor time, its setup and processes included; the budget of "
                f"a test in `make test` is {self._limit_s:g} s, {SLOWER_RATIO} times as much on a slow machine. Make "
                "it smaller, let it share a run with its neighbours, or move it into a lane: "
                '@pytest.mark.lane("..."), see tests/lanes.py.'
            )
        return report


class _Costs:
    """Where results are gathered."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._cost_s: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _COST and report.when == "teardown":
                self._cost_s[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        dearest = sorted(self._cost_s.items(), key=lambda pair: -pair[1])
        if self._path:
            Path(self._path).write_text("".join(f"{cost_s}\t{name}\n" for name, cost_s in dearest))
        if dearest:
            total_s = sum(self._cost_s.values())
            terminalreporter.section(f"processor time: {total_s:.0f} s in tests; the {NUM_SHOWN} dearest")
            for name, cost_s in dearest[:NUM_SHOWN]:
                terminalreporter.write_line(f"{cost_s:8.2f} s  {name}")
