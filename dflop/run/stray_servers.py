"""Temporary Prefect servers that a driver left behind: killed with -9, it ends nothing of its own.

They are told from everybody else's by a variable in their environment that names the driver, and are ended only when
that process is gone.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from dflop.launch.process import ProcessId

VARIABLE = "DFLOP_DRIVER"
"""In the environment of whatever a driver starts, its pid."""
_SERVER = b"prefect.server.api.server:create_app"


def left_behind() -> set[ProcessId]:
    """Temporary servers of this user whose driver is gone; what they kept is in their database."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # somebody else's, or gone
            if _SERVER in (entry / "cmdline").read_bytes():
                driver = re.search(rb"(?:^|\0)%b=(\d+)\0" % VARIABLE.encode(), (entry / "environ").read_bytes())
                process = ProcessId.of(int(entry.name))
                if driver and process and not Path("/proc", driver[1].decode()).exists():
                    found.add(process)
    return found
