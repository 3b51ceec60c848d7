"""Checkpoints in torch's distributed format under global parameter names, so that any other plan can load them.

`save` copies the state to host memory and returns; a thread writes it while training goes on. All ranks write into a
temporary folder, which becomes the newest checkpoint (`manifest.py`) only when every rank's files are on disk and
summed up: whatever kills the job, what is called a checkpoint was complete. One that was damaged later is found out by
its checksums before anything is loaded, and the one before it is loaded instead.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex

from dflop.errors import TrainError
from dflop.files import TMP_PREFIX
from dflop.models.build import Stage
from dflop.parallel.part import Part
from dflop.parallel.topology import Groups
from dflop.train import checkpoint_state, manifest
from dflop.train.base import META, Base, base_problem
from dflop.train.blocks import Block, BlockLoadPlanner, BlockSavePlanner, BlockWriter, SafeReader, reason_of
from dflop.train.checkpoint_state import copy_to_host, host_memory
from dflop.train.optim import Optimizer, State

T = TypeVar("T")
R = TypeVar("R")


class Checkpointer:
    """Saves and loads one rank's part; every rank of the job must call the same methods in the same order.

    Args:
        folder: Shared by all ranks.
        stages: Holders of the parameters.
        optimizer: Of the same parameters.
        groups: Process groups.
        sharded: What the rank holds of the parameters that it does not hold whole.
        keep: Finished checkpoints to keep.
        base: Parameters that checkpoints leave out.
        on_failure: Called on every rank after a failed write, by the writing thread.
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
        base: Base | None = None,
        on_failure: Callable[[TrainError], None] = lambda error: None,
    ) -> None:
        self._folder, self._stages, self._optimizer, self._keep = folder, stages, optimizer, keep
        self._parts, self._group, self._on_failure = sharded, groups.checkpoint, on_failure
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._base = base or Base()
        self._described: dict[str, str] | None = None
        """The base, as checkpoints name it."""
        self._host: dict[MetadataIndex, torch.Tensor] | None = None
        """Copies of the blocks that this rank writes; allocated once."""
        self._writing: threading.Thread | None = None
        self._failure: TrainError | None = None

    def save(self, next_step: int, meta: Mapping[str, Any]) -> None:
        """Save the state reached before `next_step`: returns when it is copied, once the write before has ended.

        Args:
            next_step: First step a resumed job will run.
            meta: JSON values kept beside the tensors (plan id, corrections).

        Raises:
            TrainError: a weight or a moment is not finite; nothing is written, on any rank.
        """
        self.close()
        self._failure = None  # has been told; this is the next try
        blocks = self._blocks(self._optimizer.state())
        if self._host is None:
            # Which rank writes what several hold. `dcp.save` would choose, too, but only of what has been copied.
            planner = BlockSavePlanner(blocks)
            shares = self._together(planner.create_local_plan, lambda held: planner.create_global_plan(held)[0])
            ids = {item.index for item in shares[self._rank].items}
            self._host = host_memory(block for block in blocks if block.id in ids)
        mine = [block for block in blocks if block.id in self._host]
        name = self._together(lambda: checkpoint_state.not_finite(mine), lambda names: next(filter(None, names), ""))
        if name:
            raise TrainError(
                f"`{name}` has values that are not finite after step {next_step - 1}: no checkpoint was written",
                where=str(self._folder),
                hint="start a new run with a lower train.learning_rate: this one resumes from its newest checkpoint",
            )
        copies = copy_to_host(mine, self._host)
        about = {**meta, **self._about_base(), "next_step": next_step, "name": manifest.name_of(next_step)}
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
        """Load the newest checkpoint whose files are what was written.

        Returns:
            Its metadata with `next_step`, and `fell_back_from` where a newer one is damaged; None when there is none.

        Raises:
            TrainError: there are checkpoints but all are damaged, or the one to load belongs to another model, or to
                adapters of another base.
        """
        self.close()
        self._together(lambda: None, lambda _: manifest.sweep(self._folder))
        names = self._together(lambda: None, lambda _: manifest.candidates(self._folder))
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
        if problem := base_problem(meta, self._about_base().get(META, {})):
            hint = f"restore the base, or move {self._folder} away to start over"
            raise TrainError(problem, where=str(self._folder / meta["name"]), hint=hint)
        self._load(self._folder / meta["name"])
        return {**meta, **({"fell_back_from": damaged[0]} if damaged else {})}

    def take_back(self, meta: Mapping[str, Any]) -> None:
        """Make a checkpoint the newest, for all who look for one from now on: those that are newer are damaged."""
        self._together(lambda: None, lambda _: manifest.keep_older(self._folder, meta, self._keep))

    def close(self) -> None:
        """Wait until nothing is being written, whatever becomes of it."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _write(self, copies: Sequence[Block], about: Mapping[str, Any]) -> None:
        """Body of the thread."""
        temporary = self._folder / f"{TMP_PREFIX}{about['name']}"
        try:
            writer = BlockWriter(temporary, per_thread_copy_ahead=0)  # all of it is in host memory
            dcp.save({}, storage_writer=writer, planner=BlockSavePlanner(copies), process_group=self._group)
            self._together(lambda: self._written(temporary), lambda written: self._publish(temporary, about, written))
        except (Exception, dcp.CheckpointException) as error:  # nobody is there to catch it: `wait` raises it
            where = str(self._folder / str(about["name"]))
            self._failure = TrainError(f"cannot write checkpoint: {reason_of(error)}", where=where)
            if self._rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            self._on_failure(self._failure)

    def _written(self, folder: Path) -> dict[str, manifest.FileState]:
        return {path.name: manifest.file_state(path) for path in folder.glob(f"__{self._rank}_*")}

    def _publish(
        self, folder: Path, about: Mapping[str, Any], written: Sequence[Mapping[str, manifest.FileState]]
    ) -> None:
        states = {name: state for files in written for name, state in files.items()}
        states[manifest.INDEX] = manifest.file_state(folder / manifest.INDEX)
        manifest.publish(folder, about, states, self._keep)

    def _problem(self, checkpoint: Path) -> str:
        """What is wrong with a checkpoint, equal on all ranks; each reads its share of the files."""
        share = slice(self._rank, None, self._num_ranks)
        return self._together(
            lambda: manifest.checkpoint_problem(checkpoint, share), lambda problems: next(filter(None, problems), "")
        )

    def _load(self, checkpoint: Path) -> None:
        reader = SafeReader(checkpoint)
        stored = reader.index
        prefix = checkpoint_state.OPTIMIZER
        wanted = {
            name: {key: tensor for key, tensor in tensors.items() if f"{prefix}/{name}/{key}" in stored}
            for name, tensors in self._optimizer.state().items()
        }
        blocks = self._blocks(wanted)
        shapes = self._together(
            lambda: {block.name: block.shape for block in blocks},
            lambda ranks: {name: shape for shapes in ranks for name, shape in shapes.items()},
        )
        if problem := checkpoint_state.name_problem(shapes, stored):
            raise TrainError(problem, where=str(checkpoint), hint=f"to start over, move {self._folder} away")
        try:
            dcp.load({}, storage_reader=reader, planner=BlockLoadPlanner(blocks), process_group=self._group)
        except dcp.CheckpointException as error:
            raise TrainError(f"cannot load checkpoint: {reason_of(error)}", where=str(checkpoint)) from error
        self._optimizer.load_state(wanted)

    def _blocks(self, optimizer: State) -> list[Block]:
        rows = self._optimizer.rows
        return checkpoint_state.state_blocks(self._stages, optimizer, self._parts, self._base.names, rows)

    def _about_base(self) -> dict[str, dict[str, str]]:
        """What metadata say of the base; nothing where checkpoints hold every parameter. Collective, the first time."""
        if self._described is None and self._base.names:
            share = slice(self._rank, None, self._num_ranks)
            self._described = self._together(lambda: self._base.digests(share), self._base.described)
        return {META: self._described} if self._described else {}

    def _together(self, on_each: Callable[[], T], on_first: Callable[[list[T]], R]) -> R:
        """What rank 0 makes of what every rank returns; collective.

        Raises:
            RuntimeError: one of them failed; every rank raises it, with the rank and the reason.
        """
        found: list[Any] = [None] * self._num_ranks
        dist.gather_object(self._attempt(on_each), found if self._rank == 0 else None, group=self._group, group_dst=0)
        answer: list[Any] = [None]
        if self._rank == 0:
            failed = [result for result in found if result[1]]
            answer = [failed[0] if failed else self._attempt(lambda: on_first([value for value, _ in found]))]
        dist.broadcast_object_list(answer, group=self._group, group_src=0)
        result: tuple[R, str] = answer[0]
        if result[1]:
            raise RuntimeError(result[1])
        return result[0]

    def _attempt(self, work: Callable[[], Any]) -> tuple[Any, str]:
        """(what work returns, why it failed)."""
        try:
            return work(), ""
        except Exception as error:
            return None, f"rank {self._rank}: {reason_of(error)}"
