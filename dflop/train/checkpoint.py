"""Checkpoints in torch's distributed format under global parameter names, so that any other plan can load them.

`save` copies the state to host memory and returns; a thread writes it while training goes on. All ranks write into a
temporary folder, which becomes the newest checkpoint (`manifest.py`) only when every rank's files are on disk and
summed up: whatever kills the job, what is called a checkpoint was complete. One that was damaged later is found out by
its checksums before anything is loaded, and the one before it is loaded instead.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.utils import _DistWrapper

from dflop.errors import TrainError
from dflop.files import TMP_PREFIX
from dflop.models.build import Stage
from dflop.parallel.part import Part
from dflop.parallel.topology import Groups
from dflop.train import checkpoint_state, manifest
from dflop.train.blocks import Block, BlockLoadPlanner, BlockSavePlanner, BlockWriter, SafeReader
from dflop.train.checkpoint_state import HostCopies
from dflop.train.optim import Optimizer


def _say(error: TrainError) -> None:
    print(error, file=sys.stderr, flush=True)


class Checkpointer:
    """Saves and loads one rank's part; every rank of the job must call the same methods in the same order.

    Args:
        folder: Shared by all ranks.
        stages: Holders of the parameters.
        optimizer: Of the same parameters.
        groups: Process groups.
        sharded: What the rank holds of the parameters that it does not hold whole.
        keep: Finished checkpoints to keep.
        on_failure: Told on every rank of a write that failed, by the thread that writes.
    """

    def __init__(
        self,
        folder: Path,
        stages: Sequence[Stage],
        optimizer: Optimizer,
        groups: Groups,
        sharded: Mapping[str, Part],
        *,
        keep: int,
        on_failure: Callable[[TrainError], None] = _say,
    ) -> None:
        self._folder, self._stages, self._optimizer, self._keep = folder, stages, optimizer, keep
        self._parts, self._group, self._on_failure = sharded, groups.checkpoint, on_failure
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        # What fails on one rank raises on all.
        self._ranks = _DistWrapper(self._group, use_dist=True, coordinator_rank=0)
        # Ranks of a tensor-parallel group must draw the same random numbers.
        self._random_rank = self._rank - groups.tensor.rank()
        self._host = HostCopies()
        self._mine: frozenset[MetadataIndex] | None = None
        self._random_ranks: list[int] = []
        self._writing: threading.Thread | None = None
        self._failure: TrainError | None = None

    def save(self, next_step: int, meta: Mapping[str, Any]) -> None:
        """Save the state reached before `next_step`: returns when it is copied, once the write before has ended.

        Args:
            next_step: First step a resumed job will run.
            meta: JSON values kept beside the tensors (seed, plan id, corrections).
        """
        self.close()
        self._failure = None  # has been told; this is the next try
        blocks = [
            *checkpoint_state.model_blocks(self._stages, self._parts),
            *checkpoint_state.optimizer_blocks(self._optimizer.state(), self._parts),
            *checkpoint_state.rng_blocks(self._rank, checkpoint_state.rng_state()),
        ]
        if self._mine is None:
            self._mine = checkpoint_state.share_out(blocks, self._group)
            self._random_ranks = self._ranks.all_gather("checkpoint", lambda: self._random_rank)
        copies = self._host.copy(block for block in blocks if block.id in self._mine)
        about = {
            **meta,
            "next_step": next_step,
            "name": manifest.name_of(next_step),
            "random_ranks": self._random_ranks,
        }
        self._writing = threading.Thread(target=self._write, args=(copies, about), name="checkpoint", daemon=True)
        self._writing.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            TrainError: it could not be written.
        """
        self.close()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def load_latest(self) -> dict[str, Any] | None:
        """Load the newest checkpoint whose files are what was written, and set the random generators.

        Returns:
            Its metadata with `next_step`, and `fell_back_from` where a newer one is damaged; None when there is none.

        Raises:
            TrainError: there are checkpoints but all are damaged, or the one to load belongs to another model.
        """
        self.close()
        self._ranks.broadcast("checkpoint", lambda: manifest.sweep(self._folder))
        names = self._ranks.broadcast("checkpoint", lambda: manifest.candidates(self._folder))
        meta, damaged = manifest.newest_sound(self._folder, names, self._problem)
        for problem in damaged if self._rank == 0 else ():
            print(f"checkpoint {problem}; using the one before it", file=sys.stderr, flush=True)
        if meta is None and damaged:
            raise TrainError(
                f"every checkpoint is damaged: {damaged[0]}",
                where=str(self._folder),
                hint=f"to start over, move {self._folder} away",
            )
        if meta is None:
            return None
        self._load(self._folder / meta["name"], meta)
        return {**meta, **({"fell_back_from": damaged[0]} if damaged else {})}

    def take_back(self, meta: Mapping[str, Any]) -> None:
        """Make a checkpoint the newest, for all who look for one from now on: those that are newer are damaged."""
        self._ranks.broadcast("checkpoint", lambda: manifest.keep_older(self._folder, meta["name"], self._keep))

    def close(self) -> None:
        """Wait until nothing is being written, whatever becomes of it."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, copies: Sequence[Block], about: Mapping[str, Any]) -> None:
        """Body of the thread."""
        temporary = self._folder / f"{TMP_PREFIX}{about['name']}"
        try:
            self._ranks.broadcast("checkpoint", lambda: self._make(temporary))
            planner = BlockSavePlanner(copies)
            dcp.save({}, storage_writer=BlockWriter(temporary), planner=planner, process_group=self._group)
            states = self._ranks.all_gather("checkpoint", lambda: self._states_of_files(temporary))
            files = {name: of_file for found in states for name, of_file in found.items()}
            self._ranks.broadcast("checkpoint", lambda: manifest.publish(temporary, about, files, self._keep))
        except (Exception, dcp.CheckpointException) as error:  # nobody is there to catch it: whoever waits is told
            where = str(self._folder / str(about["name"]))
            self._failure = TrainError(f"cannot write checkpoint: {_reason(error)}", where=where)
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self._on_failure(self._failure)

    def _make(self, temporary: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest.sweep(self._folder)
        temporary.mkdir()

    def _states_of_files(self, folder: Path) -> dict[str, manifest.FileState]:
        """Of the files this rank has written; rank 0 wrote the index, too."""
        mine = [*folder.glob(f"__{self._rank}_*"), *([folder / manifest.INDEX] if self._rank == 0 else [])]
        return {path.name: manifest.file_state(path) for path in mine}

    def _problem(self, checkpoint: Path) -> str:
        """What is wrong with a checkpoint, equal on all ranks; each reads its share of the files."""
        share = slice(self._rank, None, self._num_ranks)
        problems = self._ranks.all_gather("check", lambda: manifest.checkpoint_problem(checkpoint, share))
        return next(filter(None, problems), "")

    def _load(self, checkpoint: Path, meta: Mapping[str, Any]) -> None:
        reader = SafeReader(checkpoint)
        stored = checkpoint_state.shapes_in(reader.read_metadata())
        model = list(checkpoint_state.model_blocks(self._stages, self._parts))
        held = self._ranks.all_gather("checkpoint", lambda: {block.name: block.shape for block in model})
        if problem := checkpoint_state.name_problem({n: shape for names in held for n, shape in names.items()}, stored):
            raise TrainError(problem, where=str(checkpoint), hint=f"to start over, move {self._folder} away")
        wanted = {
            name: {
                key: tensor for key, tensor in tensors.items() if f"{checkpoint_state.OPTIMIZER}/{name}/{key}" in stored
            }
            for name, tensors in self._optimizer.state().items()
        }
        # Under another plan, ranks that must draw alike now may have drawn differently.
        is_same_world = meta.get("random_ranks") == self._ranks.all_gather("checkpoint", lambda: self._random_rank)
        random = checkpoint_state.empty_rng(stored, self._rank) if is_same_world else {}
        blocks = [
            *model,
            *checkpoint_state.optimizer_blocks(wanted, self._parts),
            *checkpoint_state.rng_blocks(self._rank, random),
        ]
        try:
            dcp.load({}, storage_reader=reader, planner=BlockLoadPlanner(blocks), process_group=self._group)
        except (OSError, dcp.CheckpointException) as error:
            raise TrainError(f"cannot load checkpoint: {_reason(error)}", where=str(checkpoint)) from error
        self._optimizer.load_state(wanted)
        if random:
            checkpoint_state.restore_rng(random)
        else:
            checkpoint_state.reseed(int(meta.get("seed", 0)), int(meta["next_step"]), self._random_rank)


def _reason(error: BaseException) -> str:
    """One line; of an error that DCP collected, the first rank's."""
    if isinstance(error, dcp.CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(cause)}"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    return (str(error).splitlines() or [type(error).__name__])[0]
