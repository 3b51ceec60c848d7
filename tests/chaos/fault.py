"""What a fault is: when it strikes, what it does, and how the command may end because of it.

Moments are seen from outside, by files and by how long the command has run, and asked for again and again. `roll`,
drawn once per fault from the seed, says how far into a moment the fault strikes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.chaos.play import Play
from tests.chaos.stage import NUM_STEPS

Deed = Callable[[Play], None]


class NothingToStrike(Exception):
    """What a fault is aimed at is not there."""


@dataclass(frozen=True)
class End:
    """A way in which the command may end because of a fault; it is issued again, whatever it is."""

    code: int
    """Exit code; of a process that was killed minus the signal."""
    says: str = ""
    """Part of what it said."""
    repair: Deed | None = None
    """What the message, or docs/operating.md, says to do before; None: nothing."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong in a run."""

    name: str
    when: str
    """Name of a moment; `between`: when a training was interrupted by Ctrl-C, before it is started again."""
    strike: Deed
    ends: tuple[End, ...] = ()
    """How it may end the command; a fault without any is survived by the command that it strikes."""
    excludes: str = ""
    """Of the faults with the same word here, a run has one."""
    part: str = ""
    prepare: Deed | None = None
    """Done before anything starts."""
    dies_at: str = ""
    """Function before or behind which the first command kills itself, as `dying.py` takes it."""


def _is_training(play: Play, roll: float) -> bool:
    """A step has been made; the last four are left in peace, so that there is something to disturb."""
    return play.steps_done() >= 1 + int(roll * (NUM_STEPS - 4))


def _is_publishing(play: Play, _roll: float) -> bool:
    """A snapshot is being written, after the first one."""
    folder = play.stage.store / "snapshots"
    return any(folder.glob("dflop-*")) and any(folder.glob(".tmp-*"))


def _is_saving(play: Play, _roll: float) -> bool:
    """A checkpoint is being written; or there is one, where that was too quick to be seen."""
    return play.run is not None and (any(play.run.checkpoints.glob(".tmp-*")) or play.steps_done() >= NUM_STEPS - 3)


MOMENTS: dict[str, Callable[[Play, float], bool]] = {
    "before": lambda _play, _roll: True,
    "starting": lambda play, roll: play.age_s() >= roll * 6.0,
    "profiling data": lambda play, _roll: play.job_age_s("data") >= 0,
    "probing": lambda play, roll: play.job_age_s("profile-tp1") >= roll * 4.0,
    "publishing": _is_publishing,
    "planned": lambda play, _roll: play.run is not None and play.run.has_plan(),
    "training": _is_training,
    "between": _is_training,
    "saving": _is_saving,
    "comparing": lambda play, roll: play.job_age_s("compare") >= roll * 4.0,
}
