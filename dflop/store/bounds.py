"""Hard bounds for a process that runs other people's SQL.

DuckDB's own are soft: `memory_limit` does not count what one function makes of one row (`list_sort(range(300000000))`
took 18 GiB under a limit of 4), and an interrupt waits until that function returns (79 s instead of 3).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading

from dflop.errors import StoreError

PROCESS_BYTES = 6 * 2**30
"""What the process may allocate: the memory limit of a query, and 2 GiB for Python, Arrow and thread stacks."""
OVERTIME_S = 5.0
"""An interrupted query has so long to end by itself."""


def bound_process(timeout_s: float) -> None:
    """Bounds memory and life of this process; for a command that runs one query and ends.

    Args:
        timeout_s: Time the query has. `OVERTIME_S` later the process says so and ends with the exit code of a
            StoreError, without cleaning up: a `.tmp-` file may stay beside the output.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    least = min(n for n in (soft, hard, PROCESS_BYTES) if n != resource.RLIM_INFINITY)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(resource.RLIMIT_DATA, (least, hard))
    watchdog = threading.Timer(timeout_s + OVERTIME_S, _end, (timeout_s,))
    watchdog.daemon = True
    watchdog.start()


def _end(timeout_s: float) -> None:
    error = StoreError(
        f"the query was stopped after {timeout_s:g} s, and did not end by itself",
        hint="narrow it with WHERE or LIMIT, or raise --timeout-s",
    )
    print(f"dflop: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
