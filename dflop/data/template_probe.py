"""Whether a chat template looks into the texts it is given, or only writes them out.

A template that only writes texts out needs one rendering for all conversations of the same roles. One that splits
reasoning off an answer, trims it or asks what it begins with has to see every text. Which it is shows when it renders
probes: texts that note whatever is done to them but joining. What could join and look later, unseen, counts as looking.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.nodes

_BLIND = (jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.AssignBlock, jinja2.nodes.FilterBlock)
"""What makes a new text out of others, from which on a probe is no probe any more."""

_FILTER, _JOIN = jinja2.nodes.Filter, ("join", "sum")


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
