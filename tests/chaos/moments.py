"""Moments of a run at which a fault can strike, seen from outside: by files, and by how long the command has run.

A moment is asked again and again until it has come. `roll`, drawn once per fault from the seed, says how far into it.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.chaos.play import Play
from tests.chaos.stage import NUM_STEPS

Moment = Callable[[Play, float], bool]
START_S, PROBING_S = 6.0, 4.0


def before(play: Play, roll: float) -> bool:
    """Before anything is started."""
    return True


def starting(play: Play, roll: float) -> bool:
    """Some seconds after the command was issued, whatever it is at."""
    return play.age_s() >= roll * START_S


def profiling_data(play: Play, roll: float) -> bool:
    """A job looks at the dataset."""
    return play.job_age_s("data") >= 0


def probing(play: Play, roll: float) -> bool:
    """Modules are being timed."""
    return play.job_age_s("profile-tp1") >= roll * PROBING_S


def publishing(play: Play, roll: float) -> bool:
    """A snapshot is being written, after the first one."""
    folder = play.stage.store / "snapshots"
    return any(folder.glob("dflop-*")) and any(folder.glob(".tmp-*"))


def planned(play: Play, roll: float) -> bool:
    """There is a plan."""
    return play.run is not None and play.run.has_plan()


def training(play: Play, roll: float) -> bool:
    """A step has been made; the last four are left in peace, so that there is something to disturb."""
    return play.steps_done() >= 1 + int(roll * (NUM_STEPS - 4))


def saving(play: Play, roll: float) -> bool:
    """A checkpoint is being written; or there is one, where that was too quick to be seen."""
    if play.run is None:
        return False
    folder = play.run.checkpoints
    return any(folder.glob(".tmp-*")) or play.steps_done() >= NUM_STEPS - 3


def comparing(play: Play, roll: float) -> bool:
    """The data-blind comparison runs."""
    return play.job_age_s("compare") >= roll * PROBING_S


MOMENTS: dict[str, Moment] = {
    moment.__name__: moment
    for moment in (before, starting, profiling_data, probing, publishing, planned, training, saving, comparing)
}
