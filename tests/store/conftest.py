import dataclasses
import os
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from dflop import records as r
from tests.forked import Program

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)


def strategy(hint: Any) -> st.SearchStrategy[Any]:
    """Values of any record field: the whole of int64, floats with NaN and infinities, any text, nested records."""
    scalars = {int: INT64, float: st.floats(), str: TEXT, bool: st.booleans()}
    if hint in scalars:
        return scalars[hint]
    if hint is r.CostTerms:  # knots and bends are pairs
        terms = st.lists(st.floats(), min_size=6, max_size=6)
        pairs = st.lists(st.tuples(st.floats(), st.floats()), max_size=2)
        return st.builds(lambda t, p: r.CostTerms(*t, tuple(k for k, _ in p), tuple(b for _, b in p)), terms, pairs)
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return st.builds(hint, **{f.name: strategy(hints[f.name]) for f in dataclasses.fields(hint)})
    args = typing.get_args(hint)
    if args[-1] is Ellipsis:
        return st.lists(strategy(args[0]), max_size=2).map(tuple)
    return st.tuples(*(strategy(arg) for arg in args))


class Make:
    """Small, valid records to fill a store with."""

    strategy = staticmethod(strategy)

    @staticmethod
    def correction(step: int = 0, factor: float = 1.0, **changes: Any) -> r.Correction:
        base = r.Correction("run", step, "llm", "table-llm", factor, 0.1, 8, 1000.0 + step, level=factor)
        return dataclasses.replace(base, **changes)

    @staticmethod
    def shape(index: int, tokens: int = 4, num_images: int = 1, key: str = "data") -> r.SampleShape:
        image = r.MediaItem("image", f"{index}.png", 8, 8, 1, 0.0, "vision", (1, 2, 2), tokens, tokens**2, tokens)
        return r.SampleShape(key, index, f"id{index}", 10, 5, 10 + num_images * tokens, (image,) * num_images)

    @staticmethod
    def cost_table(module: str = "llm", tp: int = 1, **changes: Any) -> r.CostTable:
        terms = r.CostTerms(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
        base = r.CostTable(
            f"table-{module}", "model", module, "cpu", "torch", "fp32", tp, "measured", 4, terms, terms, terms, 1, 2, 9,
            0.05, 0.1,
        )  # fmt: skip
        return dataclasses.replace(base, **changes)

    @staticmethod
    def plan(run_id: str = "run", rank: int = 0) -> r.Plan:
        modules = (
            r.ModulePlan("vision", r.ParallelSpec(1, 1, 2), 0, (2,), (100,)),
            r.ModulePlan("llm", r.ParallelSpec(1, 2, 1), 2, (2, 2), (300, 200)),
        )
        return r.Plan(f"plan{rank}", run_id, rank, modules, 4, 16, 0.9, 1.0, 1.5, 0.1, 2.0, ("t",), 1, "fastest")

    @staticmethod
    def run(state: str = "running", at_s: float = 1000.0, run_id: str = "run") -> r.RunRecord:
        return r.RunRecord(run_id, "demo", "key", state, "cpu", "torch", "abc", "/runs/run", at_s)

    @staticmethod
    def observation(step: int = 0, **changes: Any) -> r.StepObservation:
        span = r.MicrobatchSpan(0, 1, 50, 2500, 0.1, 0.2, 0.0, 0.2, 0.3, 0.2, 0.2, 0.2)
        base = r.StepObservation(
            "run", 0, step, "balanced", 0, "llm", 0, 0, 0.8, 1.0, 0.5, 0.1, 0.05, 0.1, 0.05, 2.0, 1.0, 80,
            1000.0 + step, (span, span),
        )  # fmt: skip
        return dataclasses.replace(base, **changes)

    @staticmethod
    def step_plan(step: int, **changes: Any) -> r.StepPlan:
        work = r.ModuleWork("llm", (0, 1), (0, 0), (50, 50), (((0, 1),),))
        base = r.StepPlan("run", step, "balanced", (0, 1), 1, (work,), 80, 0.8, 1.0)
        return dataclasses.replace(base, **changes)


class Snippet:
    """A process that runs Python code; what it prints is in a file."""

    def __init__(self, code: str, args: tuple[str | Path, ...], folder: Path) -> None:
        self._out, self._err = folder / "out", folder / "err"
        arguments = (code, *map(str, args))
        self.process = Program("tests.store.snippet", arguments, os.environ, self._out, err=self._err)

    def ends(self, code: int = 0) -> str:
        """What it has printed; fails unless it ends with this exit code."""
        assert self.process.wait(60) == code, self._err.read_text()
        return self.printed()

    def printed(self) -> str:
        return self._out.read_text()


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make


@pytest.fixture
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Snippet]]:
    """Starts a Python snippet in its own process, forked from a server that has imported the store."""
    started: list[Snippet] = []

    def run(code: str, *args: str | Path) -> Snippet:
        started.append(Snippet(code, args, tmp_path_factory.mktemp("snippet")))
        return started[-1]

    yield run
    for snippet in started:
        snippet.process.kill()
