"""Faults of what runs: ranks, schedulers, controllers, drivers that die, sleep or are told to stop; files of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from dflop.train import manifest
from tests.chaos.dying import DIED
from tests.chaos.fault import Deed, End, Fault, NothingToStrike
from tests.chaos.play import Play
from tests.launch.helpers import parent_of

_SCHEDULER, _CONTROLLER = "dflop.jobs.scheduler", "dflop.launch.controller"
_DIED, _STOPPED = End(5, "died (signal 9)"), End(75, "was told to stop")
_MISSED = tuple(End(5, why) for why in ("gives no sign of life", "does not answer", "is stuck"))
_UNCONTROLLED = End(5, "its controller died")
_KILLED = (End(-9),)
_INTERRUPTED = tuple(End(code) for code in (130, 143))


def _rank(play: Play, job: str) -> int:
    ranks = play.ranks(job)
    if not ranks:
        raise NothingToStrike(f"no rank of {job}")
    return play.rng.choice(ranks)


def to_rank(number: int, job: str = "train") -> Deed:
    """A signal to one rank of a job."""
    return lambda play: os.kill(_rank(play, job), number)


def sleeping_rank(seconds: float) -> Deed:
    """A rank stands still for a while; 0: for ever."""

    def deed(play: Play) -> None:
        pid = _rank(play, "train")
        os.kill(pid, signal.SIGSTOP)
        if seconds:
            play.later(seconds, lambda: _wake(play, pid))

    return deed


def _wake(play: Play, pid: int) -> None:
    if pid in play.processes():
        os.kill(pid, signal.SIGCONT)


def to_process(words: str, number: int) -> Deed:
    """A signal to the process of this run that has these words in its command line; to no fork of it."""

    def deed(play: Play) -> None:
        named = play.processes(words)
        found = sorted(pid for pid in named if parent_of(pid) not in named)
        if not found:
            raise NothingToStrike(f"no process `{words}`")
        os.kill(found[-1], number)

    return deed


def sleeping_scheduler(play: Play) -> None:
    """The scheduler stands still for some seconds."""
    found = sorted(play.processes(_SCHEDULER))
    if not found:
        raise NothingToStrike("no scheduler")
    os.kill(found[-1], signal.SIGSTOP)
    play.later(4, lambda: _wake(play, found[-1]))


def second_driver(play: Play) -> None:
    """Somebody else issues the same command."""
    done = play.dflop(*play.command)
    if done.returncode != 5 or "is being driven by process" not in done.stderr:
        play.note(f"WRONG: a second driver ended with {done.returncode}: {done.stderr.strip()[-300:]}")


def cancel(play: Play) -> None:
    """`dflop cancel latest`, from another terminal."""
    play.beside("-m", "dflop.cli", "cancel", "latest")


def _checkpoint_file(play: Play, *, newest: bool = True) -> str:
    run = play.run
    names = manifest.candidates(run.checkpoints) if run is not None else []
    if len(names) < (1 if newest else 2):
        raise NothingToStrike("no checkpoint")
    assert run is not None
    files = [p for p in (run.checkpoints / names[0]).rglob("*") if p.is_file() and p.name != manifest.MANIFEST]
    return str(max(files, key=lambda p: p.stat().st_size))


def cut_checkpoint(play: Play) -> None:
    path = _checkpoint_file(play)
    os.truncate(path, os.path.getsize(path) // 2)


def flip_checkpoint(play: Play) -> None:
    """One byte of the newest checkpoint is another one."""
    with open(_checkpoint_file(play), "r+b") as file:
        file.seek(os.fstat(file.fileno()).st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))


def in_run(name: str, deed: Callable[[Play, str], None]) -> Deed:
    """Something happens to a file of the run directory."""

    def strike(play: Play) -> None:
        if play.run is None or not (play.run.path / name).exists():
            raise NothingToStrike(f"no {name}")
        deed(play, str(play.run.path / name))

    return strike


def lost(play: Play, path: str) -> None:
    os.unlink(path)


def torn(play: Play, path: str) -> None:
    """What is left of a line when the machine goes down."""
    with open(path, "a") as file:
        file.write('{"run_id": "chaos-')


def noise(play: Play, path: str) -> None:
    with open(path, "wb") as file:
        file.write(play.rng.randbytes(300))


def _dies(title: str, place: str) -> Fault:
    return Fault(title, "engine", "before", lambda _: None, DIED, excludes="dying", dies_at=place)


def _rank_fault(title: str, when: str, deed: Deed, *ends: End) -> Fault:
    return Fault(title, "engine", when, deed, ends, excludes="rank")


def _told(title: str, when: str, number: int, ends: tuple[End, ...]) -> Fault:
    """A signal to the driver."""
    return Fault(title, "engine", when, lambda play: play.send(number), ends)


def _file(title: str, deed: Deed, *ends: End, kind: str = "checkpoint") -> Fault:
    """Something happens to a file of the run while nobody trains."""
    return Fault(title, "engine", "training", deed, ends, is_between=True, excludes=kind)


def _overwritten(name: str) -> Fault:
    """The file is named, and made again once it is gone."""
    ends = (End(code, name, in_run(name, lost)) for code in (1, 2, 5))
    return _file(f"{name} overwritten", in_run(name, noise), *ends, kind="run file")


def checkpoints_away(play: Play) -> None:
    """To start over, as the message says."""
    if play.run is not None and play.run.checkpoints.exists():
        play.run.checkpoints.rename(play.stage.folder / "damaged-checkpoints")


_ONLY_ONE = End(1, "every checkpoint is damaged", checkpoints_away)
_LATEST = "checkpoints/latest.json"
_JOURNAL = "dflop.launch.journal:Journal.submitted:before"

FAULTS = (
    _rank_fault("rank killed", "training", to_rank(signal.SIGKILL), _DIED),
    _rank_fault("rank killed while it saves", "saving", to_rank(signal.SIGKILL), _DIED),
    _rank_fault("rank killed in the comparison", "comparing", to_rank(signal.SIGKILL, "compare"), _DIED),
    _rank_fault("probing job killed", "probing", to_rank(signal.SIGKILL, "profile-tp1"), _DIED),
    _rank_fault("data job killed", "profiling_data", to_rank(signal.SIGKILL, "data"), _DIED),
    _rank_fault("rank told to stop (SIGUSR2)", "training", to_rank(signal.SIGUSR2), _STOPPED),
    _rank_fault("rank told to stop (SIGTERM)", "training", to_rank(signal.SIGTERM), _STOPPED),
    _rank_fault("rank stopped for 3 s", "training", sleeping_rank(3)),
    _rank_fault("rank stopped for ever", "training", sleeping_rank(0), *_MISSED, _DIED),
    _rank_fault("controller of the job killed", "training", to_process(_CONTROLLER, signal.SIGKILL), _UNCONTROLLED),
    Fault("scheduler killed", "engine", "training", to_process(_SCHEDULER, signal.SIGKILL)),
    Fault("scheduler stopped for 4 s", "engine", "training", sleeping_scheduler),
    _told("driver killed, whatever it is at", "starting", signal.SIGKILL, _KILLED),
    _told("driver killed while it probes", "probing", signal.SIGKILL, _KILLED),
    _told("driver killed while it trains", "training", signal.SIGKILL, _KILLED),
    _told("driver killed while it compares", "comparing", signal.SIGKILL, _KILLED),
    _told("Ctrl-C", "starting", signal.SIGINT, _INTERRUPTED),
    _told("Ctrl-C while it trains", "training", signal.SIGINT, _INTERRUPTED),
    _told("SIGTERM to the driver", "training", signal.SIGTERM, _INTERRUPTED),
    Fault("dflop cancel", "engine", "training", cancel, (End(1, "was cancelled"),)),
    Fault("a second driver", "engine", "training", second_driver),
    _dies("driver dies before it notes its shards", f"{_JOURNAL}:1"),
    _dies("driver dies before it notes a probing job", f"{_JOURNAL}:2"),
    _dies("driver dies before it notes the training", f"{_JOURNAL}:4"),
    _dies("driver dies behind the rows of its journal", "dflop.jobs.runs:SpoolWriter.close:behind:3"),
    _dies("driver dies between tables and plan", "dflop.jobs.rundir:write_atomically:behind:3"),
    _file("checkpoint cut in half", cut_checkpoint, _ONLY_ONE),
    _file("a byte of a checkpoint is another one", flip_checkpoint, _ONLY_ONE),
    _file("latest.json lost", in_run(_LATEST, lost)),
    _file("latest.json overwritten", in_run(_LATEST, noise)),
    _file("journal torn", in_run("jobs.jsonl", torn), kind="journal"),
    *map(_overwritten, ("plan.json", "cost_tables.json", "shapes.parquet")),
    _file("jobs.spooled overwritten", in_run("jobs.spooled", noise), kind="run file"),
)
