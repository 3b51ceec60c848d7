"""What torch would compute several times slower than it could on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from dflop.doctor.finding import OK, SKIP, WARN, Finding

AREA = "kernels"


def slow_kernels() -> Iterator[Finding]:
    """A finding for everything that was reported to cost a multiple; measured on a GPU if there is one."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        yield Finding(AREA, "all", SKIP, "not measured: torch or transformers is missing", "pip install 'dflop[train]'")
        return
    from dflop.models.generic.kernel_traps import kernel_traps

    for trap in kernel_traps():
        yield Finding(AREA, trap.name, WARN if trap.is_hit else OK, str(trap), trap.remedy)
