"""Jinja for templates from elsewhere: they reach nothing but their messages, and run for so many lines only.

Lines are counted and not seconds, so that a template works everywhere or nowhere. A template that only writes out the
texts it is given needs one rendering for all conversations of the same roles. One that splits reasoning off an answer,
trims it or asks what it begins with has to see every text. Which it is shows when it renders probes: texts that note
whatever is done to them but joining. What could join and look later, unseen, counts as looking.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_MAX_CHARACTERS = 100_000
_BLIND = (jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.AssignBlock, jinja2.nodes.FilterBlock)
"""What makes a new text out of others, from which on a probe is no probe any more."""
_FILTER, _JOIN = jinja2.nodes.Filter, ("join", "sum")


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


class Looks:
    """What was done to the probes of a rendering."""

    def __init__(self) -> None:
        self.inside = False
        """Something that may depend on any text."""
        self.for_empty = False
        """Whether a text is empty."""


class Probe(str):
    """A text that notes in `looks` what is done to it."""

    looks: Looks

    @classmethod
    def of(cls, text: str, looks: Looks) -> Probe:
        made = cls(text)
        made.looks = looks
        return made

    def __bool__(self) -> bool:
        self.looks.for_empty = True
        return len(str(self)) > 0

    def __add__(self, other: str) -> Probe:
        return Probe.of(str.__add__(self, other), self.looks)

    def __radd__(self, other: str) -> Probe:
        return Probe.of(str.__add__(other, str(self)), self.looks)


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(str, name)

    def noting(self: Probe, *args: Any, **named: Any) -> Any:
        self.looks.inside = True
        return plain(self, *args, **named)

    return noting


_QUIET = ("__add__", "__class__", "__getattribute__", "__init__", "__init_subclass__", "__new__", "__reduce__")
for _name in dir(str):
    if _name not in (*_QUIET, "__dir__", "__doc__", "__reduce_ex__", "__repr__", "__setattr__", "__delattr__",
                     "__sizeof__", "__str__", "__subclasshook__", "__getstate__", "__getnewargs__"):  # fmt: skip
        setattr(Probe, _name, _noting(_name))


def watched(name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of templates that notes when it is given a probe, or a list of some."""

    @functools.wraps(filter_)
    def noting(*args: Any, **named: Any) -> Any:
        for value in args:
            for probe in value if isinstance(value, list | tuple) else (value,):
                if isinstance(probe, Probe):
                    probe.looks.inside = True
        return filter_(*args, **named)

    return filter_ if name in ("list", "selectattr", "rejectattr", "map") else noting


def joins_unseen(tree: jinja2.nodes.Template) -> bool:
    """Whether a template makes texts of which a probe would not know."""
    if any(tree.find(kind) for kind in _BLIND) or any(filter_.name in _JOIN for filter_ in tree.find_all(_FILTER)):
        return True
    written = {id(node) for output in tree.find_all(jinja2.nodes.Output) for node in output.nodes}
    return any(id(concat) not in written for concat in tree.find_all(jinja2.nodes.Concat))
