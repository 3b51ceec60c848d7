"""The faults of a run on one machine, as a table: name, moment, what happens, how the command may end because of it.

Campaigns of a seed draw from it in this order.
"""

from __future__ import annotations

from functools import partial
from signal import SIGINT, SIGKILL, SIGTERM, SIGUSR2
from typing import Any

from tests.chaos import strikes as do
from tests.chaos.dying import LAST_WORDS
from tests.chaos.fault import Deed, End, Fault
from tests.chaos.strikes import at, in_run, in_store, picture

_CURRENT, _LATEST = in_store("CURRENT"), in_run("checkpoints/latest.json")
_RANK, _SCHEDULER = do.rank_of("train"), do.named("dflop.jobs.scheduler")
_KILLED, _DIES = (End(-9),), (End(-9, LAST_WORDS),)
_INTERRUPTED = (End(130), End(143))
_DIED = End(5, "died (signal 9)")
_STOPPED = (End(75, "was told to stop"),)
_MISSED = tuple(End(5, why) for why in ("gives no sign of life", "does not answer", "is stuck"))
_FULL = tuple(End(code, says, do.free_disk) for says in ("No space left on device", "is full") for code in (1, 4, 5))
_REBUILT = (End(4, "", do.rebuild),)
_DAMAGED = (End(1, "every checkpoint is damaged", do.checkpoints_away),)
_OTHER_ROWS = (End(1, "are not those that the run has begun to train on", do.moved("aside", "annotations.jsonl")),)
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


def _absent(name: str, when: str, file: str) -> Fault:
    """A file of the dataset is elsewhere until the command says so."""
    ends = tuple(End(code, file, do.moved("away", file)) for code in (1, 2))
    return _data(name, when, do.moved(file, "away"), ends, "absent")


def _command(*words: str, **options: Any) -> Deed:
    return do.beside("-m", "dflop.cli", "store", *words, "--store", **options)


def _disk(name: str) -> Fault:
    title = f"disk of the {name} full for 8 s"
    return _store(title, "training", do.fill_disk(name), _FULL, "disk", prepare=do.mount_disk(name))


def _overwritten(name: str) -> Fault:
    """The file is named, and made again once it is gone."""
    ends = tuple(End(code, name, at(in_run(name), "lost")) for code in (1, 2, 5))
    return _engine(f"{name} overwritten", "between", at(in_run(name), "of noise", 300), ends, "run file")


STORE = (
    *(_store(f"live database {what}", "between", at(in_store("live/dflop.duckdb"), what), ends, "live")
      for what, ends in (("lost", ()), ("cut in half", _REBUILT), ("overwritten", _REBUILT))),
    _store("CURRENT lost", "training", at(_CURRENT, "lost"), (), "current"),
    _store("CURRENT overwritten", "between", at(_CURRENT, "overwritten"),
           (End(4, "CURRENT is damaged", at(_CURRENT, "lost")),), "current"),
    *(_store(f"snapshot {what}", "between", at(in_store("snapshots/dflop-*.duckdb"), what), (), "snapshot")
      for what in ("lost", "cut in half", "overwritten")),
    _store("spool: a file cut in half", "training", do.foreign(do.half_a_spool_file)),
    _store("spool: an empty file", "starting", do.foreign(lambda _: b"")),
    _store("spool: a file of noise", "probing", do.foreign(lambda play: play.rng.randbytes(5000))),
    _store("spool: a file under another's name", "training", do.foreign(do.a_spool_file)),
    _store("spool: other bytes under a new number", "training", do.same_key),
    _store("spool: all files touched", "training", do.touch("store/spool/**/*.parquet")),
    _store("spool: leftover of a dead writer", "starting", do.leftover),
    _store("somebody holds the lock", "training", do.beside("-c", _HOLDS)),
    _store("a second ingester, killed", "training",
           _command("ingest", "--watch", ends_s=lambda play: 2 + 4 * play.rng.random())),
    _store("a reader that stays", "training", do.beside("-c", _READS, needs="snapshots/dflop-*.duckdb")),
    _store("rebuild in the midst", "training", _command("rebuild", needs="CURRENT")),
    _store("verify in the midst", "training", _command("verify", needs="CURRENT")),
    _store("compact in the midst", "training", _command("compact", needs="CURRENT")),
    _disk("store"), _disk("runs"),
    _store("ingester stopped for 3 s", "training", do.sleeping_driver),
    _store("ingester killed while it publishes", "publishing", do.to_driver(SIGKILL), _KILLED),
    _dies(_store, "ingester dies inside a transaction", "store.ingest:_insert:behind:3"),
    _dies(_store, "ingester dies behind a commit", "store.ingest:_verify:before:3"),
    _dies(_store, "ingester dies behind the copy of a snapshot", "store.snapshot:copy_database:behind:3"),
    _dies(_store, "ingester dies before the publish log", "store.publishes:append:before:3"),
    _dies(_store, "ingester dies before CURRENT", "store.durable:replace:before:3"),
    _dies(_store, "ingester dies behind a spool file", "store.durable:write_new:behind:2"),
)  # fmt: skip

DATA = (
    *(_data(f"picture {what} before the run", "before", picture(what, is_sure=True)) for what in (
        "lost", "cut in half", "emptied", "of noise", "that is a folder", "that is a link to itself",
        "that leads outside", "that is a pipe",
    )),
    *(_data(f"picture {what} while it trains", "training", picture(what, is_sure=False)) for what in (
        "lost", "cut in half", "of noise", "replaced by another", "that is a pipe",
    )),
    _data("picture lost between two starts", "between", picture("lost", is_sure=False)),
    _data("picture replaced between two starts", "between", picture("replaced by another", is_sure=False)),
    _data("all pictures touched between two starts", "between", do.touch("data/media/*")),
    _data("rows that are no samples", "before", do.bad_rows, (), "rows"),
    _data("a row more between two starts", "between", do.another_row, _OTHER_ROWS, "rows"),
    _absent("annotations lost before the run", "before", "annotations.jsonl"),
    _absent("annotations lost between two starts", "between", "annotations.jsonl"),
    _absent("tokenizer lost between two starts", "between", "tokenizer.json"),
    _absent("media folder lost between two starts", "between", "media"),
    _data("cache of headers overwritten", "planned", do.broken_headers),
)  # fmt: skip

ENGINE = (
    _engine("rank killed", "training", do.signalled(_RANK, SIGKILL), (_DIED,), "rank"),
    _engine("rank killed while it saves", "saving", do.signalled(_RANK, SIGKILL), (_DIED,), "rank"),
    _engine("rank killed in the comparison", "comparing", do.signalled(do.rank_of("compare"), SIGKILL), (_DIED,),
            "rank"),
    _engine("probing job killed", "probing", do.signalled(do.rank_of("profile-tp1"), SIGKILL), (_DIED,), "rank"),
    _engine("data job killed", "profiling data", do.signalled(do.rank_of("data"), SIGKILL), (_DIED,), "rank"),
    _engine("rank told to stop (SIGUSR2)", "training", do.signalled(_RANK, SIGUSR2), _STOPPED, "rank"),
    _engine("rank told to stop (SIGTERM)", "training", do.signalled(_RANK, SIGTERM), _STOPPED, "rank"),
    _engine("rank stopped for 3 s", "training", do.asleep(_RANK, 3), (), "rank"),
    _engine("rank stopped for ever", "training", do.asleep(_RANK, 0), (*_MISSED, _DIED), "rank"),
    _engine("controller of the job killed", "training", do.signalled(do.named("dflop.launch.controller"), SIGKILL),
            (End(5, "its controller died"),), "rank"),
    _engine("scheduler killed", "training", do.signalled(_SCHEDULER, SIGKILL)),
    _engine("scheduler stopped for 4 s", "training", do.asleep(_SCHEDULER, 4)),
    _engine("driver killed, whatever it is at", "starting", do.to_driver(SIGKILL), _KILLED),
    _engine("driver killed while it probes", "probing", do.to_driver(SIGKILL), _KILLED),
    _engine("driver killed while it trains", "training", do.to_driver(SIGKILL), _KILLED),
    _engine("driver killed while it compares", "comparing", do.to_driver(SIGKILL), _KILLED),
    _engine("Ctrl-C", "starting", do.to_driver(SIGINT), _INTERRUPTED),
    _engine("Ctrl-C while it trains", "training", do.to_driver(SIGINT), _INTERRUPTED),
    _engine("SIGTERM to the driver", "training", do.to_driver(SIGTERM), _INTERRUPTED),
    _engine("dflop cancel", "training", lambda play: play.beside("-m", "dflop.cli", "cancel", "latest") and None,
            (End(1, "was cancelled"),)),
    _engine("a second driver", "training", do.second_driver),
    _dies(_engine, "driver dies before it notes its shards", "launch.journal:Journal.submitted:before:1"),
    _dies(_engine, "driver dies before it notes a probing job", "launch.journal:Journal.submitted:before:2"),
    _dies(_engine, "driver dies before it notes the training", "launch.journal:Journal.submitted:before:4"),
    _dies(_engine, "driver dies behind the rows of its journal", "jobs.runs:SpoolWriter.close:behind:3"),
    _dies(_engine, "driver dies between tables and plan", "jobs.rundir:write_atomically:behind:3"),
    _engine("checkpoint cut in half", "between", at(do.checkpoint, "cut in half"), _DAMAGED, "checkpoint"),
    _engine("a byte of a checkpoint is another one", "between", at(do.checkpoint, "a byte is another one"), _DAMAGED,
            "checkpoint"),
    _engine("latest.json lost", "between", at(_LATEST, "lost"), (), "checkpoint"),
    _engine("latest.json overwritten", "between", at(_LATEST, "of noise", 300), (), "checkpoint"),
    _engine("journal torn", "between", at(in_run("jobs.jsonl"), "torn"), (), "journal"),
    *map(_overwritten, ("plan.json", "cost_tables.json", "shapes.parquet")),
    _engine("jobs.spooled overwritten", "between", at(in_run("jobs.spooled"), "of noise", 300), (), "run file"),
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (*STORE, *DATA, *ENGINE)
