"""Which results the documents show: a line per part, with the machine whose newest file counts."""

from __future__ import annotations

from dataclasses import dataclass

XEON, EPYC = "2-core-intel-xeon", "2-core-amd-epyc"


@dataclass(frozen=True)
class Shown:
    """The tables of one part."""

    part: str
    machine: str
    """A folder of `tests/bench/results/`."""
    page: str
    """Module with `tables(content) -> dict[str, str]`: from what the JSON file has to Markdown, by name."""


SHOWN = (
    Shown("schedule-real", XEON, "tests.bench.schedule.real_page"),
    Shown("schedule-makespan", XEON, "tests.bench.schedule.makespan_page"),
    Shown("engine", XEON, "tests.bench.engine.page"),
    Shown("data", XEON, "tests.bench.data.page"),
    Shown("suite", XEON, "tests.bench.suite.page"),
    Shown("correct", EPYC, "tests.bench.correct.page"),
    Shown("correct-measured", EPYC, "tests.bench.correct.measured_page"),
    Shown("endtoend", EPYC, "tests.bench.endtoend.page"),
    Shown("peers", EPYC, "tests.bench.peers.page"),
    Shown("claims", EPYC, "tests.bench.claims.page"),
    Shown("growth", EPYC, "tests.bench.growth.page"),
    Shown("chaos", EPYC, "tests.chaos.page"),
    Shown("chaos-slurm", EPYC, "tests.chaos.page"),
    Shown("fuzz", EPYC, "tests.fuzz.page"),
)
