"""Curves for TensorBoard, written by rank 0 where a person asked for them; the package is optional."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dflop.config import Config
from dflop.errors import ConfigError


def check_tensorboard(config: Config, where: str) -> None:
    """Refuse to start what could not write its curves.

    Raises:
        ConfigError: `train.tensorboard` is set and the package is not there; `where` is named.
    """
    if config.train.tensorboard and importlib.util.find_spec("tensorboard") is None:
        hint = "install `dflop[tensorboard]` where ranks run, or remove `train.tensorboard`"
        raise ConfigError("TensorBoard is not installed here", where=where, hint=hint)


class Scalars:
    """Appends to the event files of a job's folder, which a thread of TensorBoard's own writes.

    What an earlier start of the job wrote of `first_step` and later ones is hidden.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        # Seconds to import, and only for those who asked for it.
        from torch.utils.tensorboard import SummaryWriter

        self._has_failed = False
        self._writer: SummaryWriter | None = None
        with self._disk():
            self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, step: int, values: Mapping[str, float], at_s: float) -> None:
        """Append one point to every curve at a Unix time; `/` in their names groups them."""
        with self._disk():
            for name, value in values.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, step, walltime=at_s)

    def close(self) -> None:
        """Write what is left."""
        with self._disk():
            if self._writer is not None:
                self._writer.close()

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                print(f"TensorBoard files cannot be written, training continues: {error}", file=sys.stderr, flush=True)
            self._has_failed = True
