"""Checkpoints in torch's distributed format under global parameter names, so that another plan can load them.

A checkpoint is written to a temporary folder, renamed when every rank is done, and only then named by `latest.json`
(written, fsynced, renamed). Whatever kills the job, `latest.json` names a complete checkpoint or does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dflop.errors import TrainError
from dflop.models.build import Stage


class Checkpointer:
    """Saves and loads one rank's part; every rank of the job must call the same methods in the same order.

    Args:
        folder: Shared by all ranks.
        stages: Holders of the parameters.
        optimizer: AdamW over the same parameters.
        group: Process group for the coordination.
        keep: Finished checkpoints to keep.
    """

    def __init__(
        self, folder: Path, stages: Sequence[Stage], optimizer: torch.optim.AdamW, group: dist.ProcessGroup, keep: int
    ) -> None:
        self._folder, self._optimizer, self._group, self._keep = folder, optimizer, group, keep
        self._names = {n: p for stage in stages for n, p in stage.names.items()}

    def save(self, next_step: int, meta: Mapping[str, Any]) -> None:
        """Save the state reached before `next_step`.

        Args:
            next_step: First step a resumed job will run.
            meta: JSON values kept beside the tensors (seed, plan id).

        Raises:
            TrainError: the folder cannot be written.
        """
        name = f"step-{next_step:08d}"
        temporary, final = self._folder / f".tmp-{name}", self._folder / name
        try:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                self._folder.mkdir(parents=True, exist_ok=True)
            dist.barrier(group=self._group)
            dcp.save(self._state(), checkpoint_id=str(temporary), process_group=self._group, no_dist=False)
            dist.barrier(group=self._group)
            if dist.get_rank() == 0:
                shutil.rmtree(final, ignore_errors=True)
                os.replace(temporary, final)
                _write_json(self._folder / "latest.json", {"next_step": next_step, "name": name, **meta})
                self._forget_older_than(name)
        except (OSError, dcp.CheckpointException) as error:
            raise TrainError(f"cannot write checkpoint: {_reason(error)}", where=str(final)) from error
        dist.barrier(group=self._group)

    def load_latest(self) -> dict[str, Any] | None:
        """Load the newest complete checkpoint into the stage and the optimizer.

        Returns:
            Its metadata with `next_step`, or None when there is none.

        Raises:
            TrainError: the checkpoint cannot be read, or belongs to another model.
        """
        latest = read_latest(self._folder)
        if latest is None:
            return None
        state, folder = self._state(), self._folder / latest["name"]
        try:
            dcp.load(state, checkpoint_id=str(folder), process_group=self._group)
        except (OSError, dcp.CheckpointException) as error:
            raise TrainError(
                f"cannot load checkpoint: {_reason(error)}",
                where=str(folder),
                hint=f"to start over, move {self._folder} away",
            ) from error
        for name, p in self._names.items():
            self._optimizer.state[p] = {k: state["optimizer"][f"{name}/{k}"] for k in _ADAM}
        return latest

    def _state(self) -> dict[str, Any]:
        model = {name: p.data for name, p in self._names.items()}
        moments: dict[str, torch.Tensor] = {}
        for name, p in self._names.items():
            known = self._optimizer.state.get(p) or {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p.data),
                "exp_avg_sq": torch.zeros_like(p.data),
            }
            moments |= {f"{name}/{k}": known[k] for k in _ADAM}
        return {"model": model, "optimizer": moments}

    def _forget_older_than(self, name: str) -> None:
        # A crash before `latest.json` can leave a later one, which must not push out the one just written.
        older = sorted(p for p in self._folder.glob("step-*") if p.name < name)
        for old in older[: max(0, len(older) + 1 - self._keep)]:
            shutil.rmtree(old, ignore_errors=True)


_ADAM = ("step", "exp_avg", "exp_avg_sq")


def read_latest(folder: Path) -> dict[str, Any] | None:
    """Metadata of the newest complete checkpoint in `folder`, or None."""
    try:
        latest: dict[str, Any] = json.loads((folder / "latest.json").read_text())
    except FileNotFoundError:
        return None
    return latest


def _reason(error: OSError | dcp.CheckpointException) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {str(cause).splitlines()[0]}"


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".tmp-{path.name}")
    with open(temporary, "w", encoding="utf-8") as f:
        json.dump(value, f)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)
