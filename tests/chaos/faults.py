"""The faults of a run on one machine, as a table: name, moment, what happens, how the command may end because of it.

Campaigns of a seed draw from it in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR2
from typing import Any

from tests.chaos import strikes as do
from tests.chaos.dying import LAST_WORDS
from tests.chaos.fault import Deed, End, Fault
from tests.chaos.play import Play


def by(strike: Callable[..., None], *words: Any, **options: Any) -> Deed:
    return lambda play: strike(play, *words, **options)


_KILLED, _DIES = (End(-9),), (End(-9, LAST_WORDS),)
_INTERRUPTED = (End(130), End(143))
_DIED, _STOPPED = End(5, "died (signal 9)"), End(75, "was told to stop")
_MISSED = tuple(End(5, why) for why in ("gives no sign of life", "does not answer", "is stuck"))
_FULL = tuple(End(code, says, do.free_disk) for says in ("No space left on device", "is full") for code in (1, 4, 5))
_REBUILT = (End(4, "", do.rebuild),)
_DAMAGED = (End(1, "every checkpoint is damaged", do.checkpoints_away),)
_CURRENT, _LIVE, _SNAPSHOT = "store/CURRENT", "store/live/dflop.duckdb", "store/snapshots/dflop-*.duckdb"
_HOLDS = (
    "import sys, time; from dflop.store import live; from pathlib import Path\n"
    "with live.hold(Path(sys.argv[1])): time.sleep(5)"
)
_READS = (
    "import sys, time; from dflop.store import snapshot; con, _ = snapshot.open_current(sys.argv[1])\n"
    "for _ in range(20): con.execute('select count(*) from run_record').fetchall(); time.sleep(0.5)"
)
_store, _data, _engine = (partial(Fault, part=part) for part in ("store", "data", "engine"))


def _dies(make: partial[Fault], name: str, place: str) -> Fault:
    return make(name, "before", lambda _: None, _DIES, "dying", dies_at=f"dflop.{place}")


def _command(word: str) -> Deed:
    return by(do.somebody, "-m", "dflop.cli", "store", word, "--store", needs=_CURRENT)


def _disk(name: str) -> Fault:
    prepare = by(do.mount_disk, name)
    return _store(
        f"disk of the {name} full for 8 s", "training", by(do.fill_disk, name), _FULL, "disk", prepare=prepare
    )


def _absent(name: str, when: str, file: str) -> Fault:
    """A file of the dataset is elsewhere until the command says so."""
    ends = tuple(End(code, file, by(do.move, "away", file)) for code in (1, 2))
    return _data(name, when, by(do.move, file, "away"), ends, "absent")


def _rank(name: str, when: str, job: str, number: int, end: End) -> Fault:
    return _engine(name, when, by(do.send, do.rank, job, number), (end,), "rank")


def _driver(name: str, when: str, number: int, ends: tuple[End, ...]) -> Fault:
    return _engine(name, when, lambda play: play.send(number), ends)


def _run_file(name: str, what: str, file: str, kind: str) -> Fault:
    return _engine(name, "between", by(do.edit, f"runs/*/{file}", what, 300), (), kind)


def _overwritten(file: str) -> Fault:
    """The file is named, and made again once it is gone."""
    ends = tuple(End(code, file, by(do.edit, f"runs/*/{file}", "lost")) for code in (1, 2, 5))
    return _engine(f"{file} overwritten", "between", by(do.edit, f"runs/*/{file}", "of noise", 300), ends, "run file")


def _cancel(play: Play) -> None:
    play.also("-m", "dflop.cli", "cancel", "latest")


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
    _store("spool: all files touched", "training", by(do.touch, do.SPOOL)),
    _store("spool: leftover of a dead writer", "starting", do.leftover),
    _store("somebody holds the lock", "training", by(do.somebody, "-c", _HOLDS)),
    _store("a second ingester, killed", "training", do.second_ingester),
    _store("a reader that stays", "training", by(do.somebody, "-c", _READS, needs=_SNAPSHOT)),
    *(_store(f"{word} in the midst", "training", _command(word)) for word in ("rebuild", "verify", "compact")),
    _disk("store"), _disk("runs"),
    _store("ingester stopped for 3 s", "training", do.stop_driver),
    _store("ingester killed while it publishes", "publishing", lambda play: play.send(SIGKILL), _KILLED),
    _dies(_store, "ingester dies inside a transaction", "store.ingest:_insert:behind:3"),
    _dies(_store, "ingester dies behind a commit", "store.ingest:_verify:before:3"),
    _dies(_store, "ingester dies behind the copy of a snapshot", "store.snapshot:copy_database:behind:3"),
    _dies(_store, "ingester dies before the publish log", "store.publishes:append:before:3"),
    _dies(_store, "ingester dies before CURRENT", "store.durable:replace:before:3"),
    _dies(_store, "ingester dies behind a spool file", "store.durable:write_new:behind:2"),
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
    _data("all pictures touched between two starts", "between", by(do.touch, "data/media/*")),
    _data("rows that are no samples", "before", do.bad_rows, (), "rows"),
    _data("a row more between two starts", "between", do.another_row,
          (End(1, "are not those that the run has begun to train on", by(do.move, "aside", "annotations.jsonl")),),
          "rows"),
    _absent("annotations lost before the run", "before", "annotations.jsonl"),
    _absent("annotations lost between two starts", "between", "annotations.jsonl"),
    _absent("tokenizer lost between two starts", "between", "tokenizer.json"),
    _absent("media folder lost between two starts", "between", "media"),
    _data("cache of headers overwritten", "planned", do.edit_headers),
)  # fmt: skip

ENGINE = (
    _rank("rank killed", "training", "train", SIGKILL, _DIED),
    _rank("rank killed while it saves", "saving", "train", SIGKILL, _DIED),
    _rank("rank killed in the comparison", "comparing", "compare", SIGKILL, _DIED),
    _rank("probing job killed", "probing", "profile-tp1", SIGKILL, _DIED),
    _rank("data job killed", "profiling data", "data", SIGKILL, _DIED),
    _rank("rank told to stop (SIGUSR2)", "training", "train", SIGUSR2, _STOPPED),
    _rank("rank told to stop (SIGTERM)", "training", "train", SIGTERM, _STOPPED),
    _engine("rank stopped for 3 s", "training", by(do.stop, do.rank, "train", 3), (), "rank"),
    _engine("rank stopped for ever", "training", by(do.stop, do.rank, "train", 0), (*_MISSED, _DIED), "rank"),
    _engine("controller of the job killed", "training", by(do.send, do.named, "dflop.launch.controller", SIGKILL),
            (End(5, "its controller died"),), "rank"),
    _engine("scheduler killed", "training", by(do.send, do.named, "dflop.jobs.scheduler", SIGKILL)),
    _engine("scheduler stopped for 4 s", "training", by(do.stop, do.named, "dflop.jobs.scheduler", 4)),
    _driver("driver killed, whatever it is at", "starting", SIGKILL, _KILLED),
    _driver("driver killed while it probes", "probing", SIGKILL, _KILLED),
    _driver("driver killed while it trains", "training", SIGKILL, _KILLED),
    _driver("driver killed while it compares", "comparing", SIGKILL, _KILLED),
    _driver("Ctrl-C", "starting", SIGINT, _INTERRUPTED),
    _driver("Ctrl-C while it trains", "training", SIGINT, _INTERRUPTED),
    _driver("SIGTERM to the driver", "training", SIGTERM, _INTERRUPTED),
    _engine("dflop cancel", "training", _cancel, (End(1, "was cancelled"),)),
    _engine("a second driver", "training", do.second_driver),
    _dies(_engine, "driver dies before it notes its shards", "launch.journal:Journal.submitted:before:1"),
    _dies(_engine, "driver dies before it notes a probing job", "launch.journal:Journal.submitted:before:2"),
    _dies(_engine, "driver dies before it notes the training", "launch.journal:Journal.submitted:before:4"),
    _dies(_engine, "driver dies behind the rows of its journal", "jobs.runs:SpoolWriter.close:behind:3"),
    _dies(_engine, "driver dies between tables and plan", "jobs.rundir:write_atomically:behind:3"),
    *(_engine(name, "between", by(do.edit_checkpoint, what), _DAMAGED, "checkpoint") for name, what in (
        ("checkpoint cut in half", "cut in half"), ("a byte of a checkpoint is another one", "a byte is another one"),
    )),
    _run_file("latest.json lost", "lost", "checkpoints/latest.json", "checkpoint"),
    _run_file("latest.json overwritten", "of noise", "checkpoints/latest.json", "checkpoint"),
    _run_file("journal torn", "torn", "jobs.jsonl", "journal"),
    *map(_overwritten, ("plan.json", "cost_tables.json", "shapes.parquet")),
    _run_file("jobs.spooled overwritten", "of noise", "jobs.spooled", "run file"),
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (*STORE, *DATA, *ENGINE)
