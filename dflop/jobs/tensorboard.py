"""Curves for TensorBoard, written by rank 0 where a person asked for them; the package is optional."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path

from dflop.config import Config
from dflop.errors import ConfigError


def check_tensorboard(config: Config, where: str) -> None:
    """Refuse to start what could not write its curves.

    Args:
        config: Of the run.
        where: File and key, named in the error.

    Raises:
        ConfigError: `train.tensorboard` is set and the package is not there.
    """
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "TensorBoard is not installed here",
            where=where,
            hint="install `dflop[tensorboard]` where ranks run, or leave `train.tensorboard` out",
        )


class Scalars:
    """Appends to the event files of a folder; the files are written by a thread of TensorBoard's own.

    Args:
        folder: One per job.
        first_step: What an earlier start of the job wrote of this step and later ones is hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # Seconds to import, and only for those who asked for it.
        from torch.utils.tensorboard import SummaryWriter

        self._has_failed = False
        self._writer: SummaryWriter | None = None
        try:
            self._writer = SummaryWriter(str(folder), purge_step=first_step)
        except OSError as error:
            self._say(error)

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Append one point to every curve.

        Args:
            step: Optimizer step.
            values: By name; `/` groups curves.
            at_s: Seconds since the epoch.
        """
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step, walltime=at_s)
        except OSError as error:
            self._say(error)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._say(error)

    def _say(self, error: OSError) -> None:
        if not self._has_failed:
            print(f"TensorBoard's files cannot be written, training goes on: {error}", file=sys.stderr, flush=True)
        self._has_failed = True
