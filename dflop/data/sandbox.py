"""Jinja for templates from elsewhere: they reach nothing but their messages, and run for so many lines only.

Lines are counted and not seconds, so that a template works everywhere or nowhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dflop.data.template_probe import watched

_MAX_CHARACTERS = 100_000


def environment() -> jinja2.Environment:
    """With the names and settings of Hugging Face tokenizers, which templates are written against."""
    made = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # folding constants takes time that grows with the square of an expression
    )
    made.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    made.filters = {name: watched(name, filter_) for name, filter_ in made.filters.items()}
    made.globals["raise_exception"] = _raise
    return made


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's, in which no single operation makes a long text or a huge number either."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Whatever the operator stands for, unless a text or a list is repeated or filled, or a power taken."""
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateError(f"`{operator}` is not allowed in chat templates")
        sequence, number = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(sequence, str | list | tuple) and len(sequence) * max(0, int(number)) > _MAX_CHARACTERS:
            raise jinja2.TemplateError(f"`*` makes more than {_MAX_CHARACTERS} elements")
        return super().call_binop(context, operator, left, right)


@contextmanager
def at_most(num_lines: int) -> Iterator[None]:
    """Within it, code of templates that this thread runs ends with an error after so many lines of it."""
    before, left = sys.gettrace(), num_lines

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise jinja2.TemplateError(f"it takes more than {num_lines} lines to render")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for a loss mask; which characters are answers is known here anyhow."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def words(error: Exception) -> str:
    """What went wrong in a template, in a line."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__} {text}".strip()


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
