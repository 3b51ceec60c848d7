"""Temporary Prefect servers that a driver left behind: killed with -9, it ends nothing of its own.

They are told from everybody else's by a variable in their environment that names the driver, and are ended only when
that process is gone.
"""

from __future__ import annotations

import psutil

from dflop.launch.process import processes_where

VARIABLE = "DFLOP_DRIVER"
"""In the environment of whatever a driver starts, its pid."""
_SERVER = "prefect.server.api.server:create_app"


def left_behind() -> set[psutil.Process]:
    """Temporary servers of this user whose driver is gone; what they kept is in their database."""
    return processes_where(_is_left_behind)


def _is_left_behind(process: psutil.Process) -> bool:
    if _SERVER not in process.cmdline():
        return False
    driver = process.environ().get(VARIABLE, "")
    return driver.isdecimal() and not psutil.pid_exists(int(driver))
