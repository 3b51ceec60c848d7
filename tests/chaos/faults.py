"""The faults of a run on one machine, as a table: name, moment, what happens, how the command may end because of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from signal import SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR2
from typing import Any

from tests.chaos import strikes as do
from tests.chaos.dying import LAST_WORDS
from tests.chaos.play import Play
from tests.chaos.stage import NUM_STEPS

Deed = Callable[[Play], object]


@dataclass(frozen=True)
class End:
    """A way in which the command may end because of a fault; it is issued again, whatever it is."""

    code: int
    says: str = ""
    repair: Deed | None = None
    """What the message, or docs/operating.md, says to do before."""


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


MOMENTS: dict[str, Callable[[Play, float], bool]] = {
    "before": lambda _play, _roll: True,
    "starting": lambda play, roll: play.age_s() >= roll * 6.0,
    "profiling data": lambda play, _roll: play.job_age_s("data") >= 0,
    "probing": lambda play, roll: play.job_age_s("profile-tp1") >= roll * 4.0,
    # A snapshot is being written, after the first one; a checkpoint, or that was too quick to be seen.
    "publishing": lambda play, _roll: (
        any(play.store.glob("snapshots/dflop-*")) and any(play.store.glob("snapshots/.tmp-*"))
    ),
    "planned": lambda play, _roll: play.run is not None and play.run.has_plan(),
    "training": _is_training,
    "between": _is_training,
    "saving": lambda play, _roll: any(play.runs.glob("*/checkpoints/.tmp-*")) or play.steps_done() >= NUM_STEPS - 3,
    "comparing": lambda play, roll: play.job_age_s("compare") >= roll * 4.0,
}
"""Seen from outside, and asked for again and again; `roll`, drawn once per fault, says how far into a moment."""


def by(strike: Callable[..., None], *words: Any, **options: Any) -> Deed:
    return lambda play: strike(play, *words, **options)


_KILLED, _DIES = (End(-9),), (End(-9, LAST_WORDS),)
_INTERRUPTED = (End(130), End(143))
_DIED, _STOPPED = End(5, "died (signal 9)"), End(75, "was stopped")
_MISSED = tuple(End(5, why) for why in ("sent no heartbeat", "has not responded", "is stuck"))
_FULL = tuple(End(code, says, do.free_disk) for says in ("No space left on device", "is full") for code in (1, 4, 5))
_REBUILT = (End(4, "", by(Play.dflop, "store", "rebuild", "--store", "store")),)
_DAMAGED = (End(1, "every checkpoint is damaged", by(do.edit, "runs/*/checkpoints", "lost")),)  # to start over
_CURRENT, _LIVE, _SNAPSHOT = "store/CURRENT", "store/live/dflop.duckdb", "store/snapshots/dflop-*.duckdb"
_HOLDS = "import pathlib, time; from dflop.store import live\nwith live.hold(pathlib.Path('store')): time.sleep(5)"
_READS = (
    "import time; from dflop.store import snapshot; con, _ = snapshot.open_current('store')\n"
    "for _ in range(20): con.execute('select count(*) from run_record').fetchall(); time.sleep(0.5)"
)
_store, _data, _engine = (partial(Fault, part=part) for part in ("store", "data", "engine"))


def _dying(make: partial[Fault], name: str, place: str) -> Fault:
    return make(name, "before", lambda _: None, _DIES, "dying", dies_at=f"dflop.{place}")


STORE = (
    *(_store(f"live database {what}", "between", by(do.edit, _LIVE, what), ends, "live")
      for what, ends in (("lost", ()), ("cut in half", _REBUILT), ("overwritten", _REBUILT))),
    _store("CURRENT lost", "training", by(do.edit, _CURRENT, "lost"), (), "current"),
    _store("CURRENT overwritten", "between", by(do.edit, _CURRENT, "overwritten"),
           (End(4, "CURRENT is damaged", by(do.edit, _CURRENT, "lost")),), "current"),
    *(_store(f"snapshot {what}", "between", by(do.edit, _SNAPSHOT, what), (), "snapshot")
      for what in ("lost", "cut in half", "overwritten")),
    _store("spool: a file cut in half", "training",
           by(do.foreign, lambda play: (whole := do.spool_bytes(play))[: len(whole) // 2])),
    _store("spool: an empty file", "starting", by(do.foreign, lambda _: b"")),
    _store("spool: a file of noise", "probing", by(do.foreign, lambda play: play.rng.randbytes(5000))),
    _store("spool: a file under another's name", "training", by(do.foreign, do.spool_bytes)),
    _store("spool: other bytes under a new number", "training", do.same_key),
    _store("spool: all files touched", "training", by(do.to_all, do.SPOOL, os.utime)),
    _store("spool: leftover of a dead writer", "starting",
           by(do.foreign, lambda _: b"PAR1", "run_record/gone/.tmp-elsewhere-1-000000000000")),
    _store("somebody holds the lock", "training", by(do.somebody, "-c", _HOLDS)),
    _store("a second ingester, killed", "training", do.second_ingester),
    _store("a reader that stays", "training", by(do.somebody, "-c", _READS, needs=_SNAPSHOT)),
    *(_store(f"{word} in the midst", "training",
             by(do.somebody, "-m", "dflop.cli", "store", word, "--store", "store", needs=_CURRENT))
      for word in ("rebuild", "verify", "compact")),
    *(_store(f"disk of the {name} full for 8 s", "training", by(do.fill_disk, name), _FULL, "disk",
             prepare=by(do.mount_disk, name)) for name in ("store", "runs")),
    _store("ingester stopped for 3 s", "training", do.stop_driver),
    _store("ingester killed while it publishes", "publishing", lambda play: play.send(SIGKILL), _KILLED),
    _dying(_store, "ingester dies inside a transaction", "store.ingest:_insert:behind:3"),
    _dying(_store, "ingester dies behind a commit", "store.rollup:refresh:before:3"),
    _dying(_store, "ingester dies behind the copy of a snapshot", "store.snapshot:copy_database:behind:3"),
    _dying(_store, "ingester dies before the publish log", "store.publishes:append:before:3"),
    _dying(_store, "ingester dies before CURRENT", "store.durable:replace:before:3"),
    _dying(_store, "ingester dies behind a spool file", "store.durable:write_new:behind:2"),
)  # fmt: skip

DATA = (
    *(_data(f"picture {what} before the run", "before", by(do.edit_picture, what, is_sure=True)) for what in (
        "lost", "cut in half", "emptied", "of noise", "that is a folder", "that is a link to itself",
        "that leads outside", "that is a pipe",
    )),
    *(_data(f"picture {what} while it trains", "training", by(do.edit_picture, what)) for what in (
        "lost", "cut in half", "of noise", "replaced by another", "that is a pipe",
    )),
    _data("picture lost between two starts", "between", by(do.edit_picture, "lost")),
    _data("picture replaced between two starts", "between", by(do.edit_picture, "replaced by another")),
    _data("all pictures touched between two starts", "between", by(do.to_all, "data/media/*", os.utime)),
    _data("rows that are no samples", "before", do.bad_rows, (), "rows"),
    _data("a row more between two starts", "between", do.another_row,
          (End(1, "differ from those at the start of training", by(do.move, "aside", "annotations.jsonl")),),
          "rows"),
    *(_data(f"{name} lost {moment}", when, by(do.move, file, "away"),
            tuple(End(code, file, by(do.move, "away", file)) for code in (1, 2)), "absent")
      for name, moment, when, file in (
        ("annotations", "before the run", "before", "annotations.jsonl"),
        ("annotations", "between two starts", "between", "annotations.jsonl"),
        ("tokenizer", "between two starts", "between", "tokenizer.json"),
        ("media folder", "between two starts", "between", "media"),
    )),
    _data("cache of headers overwritten", "planned", 
          by(do.to_all, "store/cache/headers/*/*.parquet", lambda path: path.write_bytes(b"no cache" * 12))),
)  # fmt: skip

ENGINE = (
    *(_engine(name, when, by(do.send, do.rank, job, number), (end,), "rank") for name, when, job, number, end in (
        ("rank killed", "training", "train", SIGKILL, _DIED),
        ("rank killed while it saves", "saving", "train", SIGKILL, _DIED),
        ("rank killed in the comparison", "comparing", "compare", SIGKILL, _DIED),
        ("probing job killed", "probing", "profile-tp1", SIGKILL, _DIED),
        ("data job killed", "profiling data", "data", SIGKILL, _DIED),
        ("rank told to stop (SIGUSR2)", "training", "train", SIGUSR2, _STOPPED),
        ("rank told to stop (SIGTERM)", "training", "train", SIGTERM, _STOPPED),
    )),
    *(_engine(name, "training", by(do.send, find, which, number, seconds), ends, kind)
      for name, find, which, number, seconds, ends, kind in (
        ("rank stopped for 3 s", do.rank, "train", SIGSTOP, 3, (), "rank"),
        ("rank stopped for ever", do.rank, "train", SIGSTOP, 0, (*_MISSED, _DIED), "rank"),
        ("controller of the job killed", do.named, "dflop.launch.controller", SIGKILL, 0,
         (End(5, "its controller died"),), "rank"),
        ("scheduler killed", do.named, "dflop.jobs.scheduler", SIGKILL, 0, (), ""),
        ("scheduler stopped for 4 s", do.named, "dflop.jobs.scheduler", SIGSTOP, 4, (), ""),
    )),
    *(_engine(name, when, by(Play.send, number), ends) for name, when, number, ends in (
        ("driver killed, whatever it is at", "starting", SIGKILL, _KILLED),
        ("driver killed while it probes", "probing", SIGKILL, _KILLED),
        ("driver killed while it trains", "training", SIGKILL, _KILLED),
        ("driver killed while it compares", "comparing", SIGKILL, _KILLED),
        ("Ctrl-C", "starting", SIGINT, _INTERRUPTED),
        ("Ctrl-C while it trains", "training", SIGINT, _INTERRUPTED),
        ("SIGTERM to the driver", "training", SIGTERM, _INTERRUPTED),
    )),
    _engine("dflop cancel", "training", by(Play.also, "-m", "dflop.cli", "cancel", "latest"),
            (End(1, "was cancelled"),)),
    _engine("a second driver", "training", do.second_driver),
    _dying(_engine, "driver dies before it notes its shards", "launch.journal:Journal.submitted:before:1"),
    _dying(_engine, "driver dies before it notes a probing job", "launch.journal:Journal.submitted:before:2"),
    _dying(_engine, "driver dies before it notes the training", "launch.journal:Journal.submitted:before:4"),
    _dying(_engine, "driver dies behind the rows of its journal", "run.lifecycle:SpoolWriter.flush:behind:3"),
    _dying(_engine, "driver dies between tables and plan", "run.directory:_write:behind:3"),
    *(_engine(name, "between", by(do.edit_checkpoint, what), _DAMAGED, "checkpoint") for name, what in (
        ("checkpoint cut in half", "cut in half"), ("a byte of a checkpoint is another one", "a byte is another one"),
    )),
    _engine("journal torn", "between", by(do.edit, "runs/*/jobs.jsonl", "torn"), (), "journal"),
    # The file is named, and made again once it is gone.
    *(_engine(f"{file} overwritten", "between", by(do.edit, f"runs/*/{file}", "of noise"),
              tuple(End(code, file, by(do.edit, f"runs/*/{file}", "lost")) for code in (1, 2, 5)), "run file")
      for file in ("plan.json", "cost_tables.json", "shapes.parquet")),
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (*STORE, *DATA, *ENGINE)
