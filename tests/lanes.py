"""Lanes: tests that whoever changes a room runs before an issue is closed, and `make test` leaves out.

A test belongs to `make test` unless it is marked `@pytest.mark.lane("name")`; `--lane name` runs the tests of a lane
and nothing else, `--lane all` runs everything. A test that is named by its node id runs in any case.
"""

import pytest

LANES = {
    "layouts": "every parallel layout of every model family against plain Hugging Face; a model that learns by heart",
    "jobs": "whole training jobs of several processes, most of them under faults",
    "kills": "runs and stores that are killed again and again",
    "instances": "ten thousand random instances and files; examples planned at real size",
    "served": "flows on a real Prefect server",
    "browser": "pages in Chromium at every width",
    "people": "people's tasks from beginning to end, as scripts",
    "slurm": "a real Slurm of four nodes (root; tests/slurm/cluster.sh)",
    "slurm-heart": "what .ci/run plays of the Slurm lane",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", action="append", default=[], choices=[*LANES, "all"], help="run the tests of this lane")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "lane(*names): left out of `make test`; run with --lane NAME")


def lanes_of(item: pytest.Item) -> set[str]:
    """Every lane that a test belongs to.

    Raises:
        pytest.UsageError: A mark names no lane.
    """
    names = {name for mark in item.iter_markers("lane") for name in mark.args}
    if unknown := names - set(LANES):
        raise pytest.UsageError(f"{item.nodeid}: no lane {', '.join(sorted(unknown))}; there are {', '.join(LANES)}")
    return names


@pytest.hookimpl(trylast=True)  # behind those that add marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(config.getoption("lane"))
    named = {arg for arg in config.args if "::" in arg}
    kept, left = [], []
    for item in items:
        lanes = lanes_of(item)
        is_wanted = "all" in wanted or (bool(lanes & wanted) if wanted else not lanes)
        is_named = any(item.nodeid == arg or item.nodeid.startswith((f"{arg}[", f"{arg}::")) for arg in named)
        (kept if is_wanted or is_named else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept
