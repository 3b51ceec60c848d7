"""How far work is, in numbers, as the work reports it; `run/messages.py` makes lines with the time to go of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
At = Callable[[str, int, int], None]
"""Called with what is done, how much of it is, and of how much: first with 0, last with all of it."""


def unseen(_what: str, _done: int, _total: int) -> None:
    """Drops it: for work without a display."""


def counted(items: Sequence[T], what: str, at: At) -> Iterator[T]:
    """The items, one after the other, each about as long as the others; `at` is called after every one."""
    at(what, 0, len(items))
    for number, item in enumerate(items, 1):
        yield item
        at(what, number, len(items))


def quiet_imports() -> None:
    """Leave out what torchao, which transformers imports, logs of parts of its own that it cannot load or register."""
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
