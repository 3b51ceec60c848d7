"""What a task of a trial job sees of its node: runs on nodes, so it imports next to nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dflop import __version__

SIGNALLED_WITHIN_S = 60
"""How long a task waits for the signal that asks training for a checkpoint."""


def look(folder: str, paths: str, here: str, device: str) -> dict[str, Any]:
    """What this task sees; it says in `folder` when it is ready to be signalled.

    Args:
        folder: Of the trial, on the shared file system.
        paths: JSON list of what jobs read or write.
        here: A file in the temporary folder of the machine that submitted.
        device: `cuda` or `cpu`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    rank = os.environ["RANK"]
    seen: dict[str, Any] = {
        "rank": int(rank),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "host": socket.gethostname(),
        "python": sys.executable,
        "version": __version__,
        "variables": sorted(os.environ),
        "missing": [path for path in json.loads(paths) if not os.path.exists(path)],
        "shares_tmp": os.path.exists(here),
        "num_gpus": _num_gpus() if device == "cuda" else 0,
    }
    partial = Path(folder) / f".ready-{rank}"
    partial.write_text(str(time.time()))
    partial.rename(Path(folder) / f"ready-{rank}")
    return seen | {"is_signalled": signal.sigtimedwait({signal.SIGUSR2}, SIGNALLED_WITHIN_S) is not None}


def _num_gpus() -> int:
    """As Slurm's variable says, else the driver."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([number for number in named.split(",") if number])
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ")
    except OSError:
        return 0
