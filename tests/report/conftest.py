from collections.abc import Iterator
from typing import Any

import pytest
from matplotlib.figure import Figure

from dflop.report.summary import RunSummary
from tests.report.detailed import detailed


@pytest.fixture(scope="session")
def run() -> RunSummary:
    """A finished run with everything a report can show."""
    return detailed()


@pytest.fixture(scope="module")
def saved() -> Iterator[list[Figure]]:
    """Figures that tests of this file have saved, in order."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        yield figures


@pytest.fixture
def drawn(saved: list[Figure]) -> list[Figure]:
    """Figures that this test has saved."""
    saved.clear()
    return saved
