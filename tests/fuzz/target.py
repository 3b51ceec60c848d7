"""A target: what is drawn, what is done with it, and what may come of it.

What may come of an example is success or a `DflopError` that a person can read. Anything else is a crash: another
exception, a hang, or a broken promise that the target looks at itself (a row lost, a file that is neither read nor
refused), which it says with `assert`.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

from dflop.errors import DflopError

T = TypeVar("T")
MAX_MESSAGE_CHARS = 20_000
EXIT_CODES = (0, 1, 2, 3, 4, 5, 75)
"""Those that docs/operating.md lists."""

Check = Callable[[Any], None]


@dataclass(frozen=True)
class Target:
    """One door to the outside."""

    name: str
    what: str
    """What is drawn, for people."""
    examples: Callable[[], st.SearchStrategy[Any]]
    """Strategy of plain values."""
    prepare: Callable[[Path], Check]
    """Given an empty folder, what runs one example; it may write into the folder."""
    quick: int = 8
    """Examples in the suite of tests."""
    deadline_s: float = 20.0
    """An example that takes longer hangs."""


def attempt(call: Callable[..., T], *args: Any, **options: Any) -> T | None:
    """What a call gives, or None where it refuses in words."""
    try:
        return call(*args, **options)
    except DflopError as error:
        check_words(error)
        return None


def check_words(error: DflopError) -> None:
    """An error must say what happened, in a length that a person reads."""
    text = str(error)
    assert error.what.strip(), "an error without words"
    assert len(text) < MAX_MESSAGE_CHARS, f"an error of {len(text)} characters"
    assert error.exit_code in EXIT_CODES


def written(example: Any) -> str:
    """An example as text that `read_back` takes."""
    return repr(example)


def read_back(text: str) -> Any:
    """Inverse of `written`; `nan` and `inf`, which Python writes and does not read, are read."""

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            return ast.copy_location(ast.Constant({"nan": math.nan, "inf": math.inf}[node.id]), node)

    return ast.literal_eval(Named().visit(ast.parse(text, mode="eval")))
