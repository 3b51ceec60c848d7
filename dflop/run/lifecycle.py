"""Begin, resume and end runs: which directory a configuration belongs to, and what the store knows about it."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path

from dflop import files
from dflop.config import Config, dump_config
from dflop.errors import LaunchError
from dflop.launch import Journal
from dflop.profile.hardware import hardware_name, software_name
from dflop.records import JobRecord, RunRecord
from dflop.run import driver_lock
from dflop.run.directory import RunDir
from dflop.run.find import all_runs, problem_of, this_user
from dflop.run.messages import Say
from dflop.run.model_files import keep_model_files
from dflop.store.spool import SpoolWriter, next_seq, spool_rows

BEGINS_WITHIN_S = 60.0
ID_LETTERS, NUM_ID_LETTERS = "bcdfghjkmnpqrstvwxz", 5
"""At the end of an id: no vowels, so that they spell nothing."""
RUNNING, DONE, FAILED, INTERRUPTED = "running", "done", "failed", "interrupted"
CANCELLED = "cancelled"
_JOURNAL = "journal"
"""Producer of the journal's rows."""
READY = "ready"
"""A part of it was asked for and is done; the next one waits to be asked for."""


def begin(config: Config, say: Say = lambda _: None, *, trains: bool = True) -> tuple[RunDir, bool]:
    """The newest unfinished run of a configuration, else a new one; and whether an earlier one is resumed.

    The configuration is as loaded, without absolute paths: its key is that of the run. `trains` tells whether a new one
    is there to train, and not for a profile or a plan alone.

    Raises:
        LaunchError: somebody drives that run, or the folder of runs cannot be used: no lock, no owners, read-only.
    """
    folder = config.runs.absolute()
    try:
        return _begin(config, folder, say, trains)
    except OSError as error:
        what = f"cannot begin a run: {error.strerror}"
        raise LaunchError(what, where=str(error.filename or folder), hint="name another folder as `runs`") from error


def _begin(config: Config, folder: Path, say: Say, trains: bool) -> tuple[RunDir, bool]:
    folder.mkdir(parents=True, exist_ok=True)
    # Two drivers that look at once would both see no run, and make two.
    what = f"another process has been starting a run for {BEGINS_WITHIN_S:g} s"
    is_busy = LaunchError(what, where=str(folder), hint="try again; is the file system slow?")
    with driver_lock.locked(folder / f".begin-{os.geteuid()}.lock", lambda: is_busy, BEGINS_WITHIN_S):
        if (found := unfinished(config)) is None:
            run = RunDir(_new_folder(folder, config.name))
            files.replace(run.config_file, dump_config(absolute(config)), is_durable=True)
            keep_model_files(config, run.model_files)
            # From here on it is found again, whatever becomes of this process; what is resolved has another key.
            facts = {"run_id": run.run_id, "owner": this_user(), "config_key": config.key, "trains": trains}
            facts |= {"backend": config.cluster.backend, "run_dir": str(run.path)}
            run.write_state(facts | {"state": READY, "at_s": time.time()})
            if problem := problem_of(run.path):
                hint = "put `runs` on a file system that keeps the owners and modes of files"
                raise LaunchError(f"the new run cannot be used: {problem}", where=str(run.path), hint=hint)
            return run, False
    driver_lock.check_free(found, say)
    return found, True


def key_of(run: RunDir) -> str:
    """Key of the configuration that a run was begun with."""
    return str(run.state().get("config_key") or run.config().key)


def is_finished(run: RunDir) -> bool:
    """Whether nothing is left to do of a run."""
    return run.state().get("state") == DONE


def new_id(name: str) -> str:
    """An id that no other run has, in whatever folder and of whatever user it begins in the same second."""
    letters = "".join(secrets.choice(ID_LETTERS) for _ in range(NUM_ID_LETTERS))
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{letters}"


def _new_folder(parent: Path, name: str) -> Path:
    while True:
        folder = parent / new_id(name)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return folder


def unfinished(config: Config) -> RunDir | None:
    """The newest run of the same configuration that has not ended well."""
    of_config = (run for run in all_runs(config.runs) if run.state().get("config_key") == config.key)
    return next((run for run in of_config if not is_finished(run)), None)


def note(run: RunDir, state: str) -> None:
    """Record a change of state in run.json and in the spool."""
    config, by = run.config(), {"host": socket.gethostname(), "pid": os.getpid()}
    # Steps, too, for `dflop runs list`: to read a configuration takes a tenth of a second.
    now = {"state": state, "at_s": time.time(), "by": by, "num_steps": config.train.num_steps}
    now["run_dir"] = str(run.path)  # it may have been moved
    run.write_state(run.state() | now)
    hardware = config.cluster.hardware
    if hardware == "auto" and config.cluster.device == "cpu":
        hardware = hardware_name("cpu")
    record = RunRecord(
        run.run_id, config.name, key_of(run), state, hardware, software_name(), code_revision(), str(run.path),
        time.time(), str(run.state().get("owner", "")),
    )  # fmt: skip
    spool_rows(config.store, run.run_id, "flow", [record])


def spool_journal(run: RunDir, config: Config) -> None:
    """Spool the entries of the job journal that were not spooled before, each once, whenever this process is killed.

    A file has the number of its last entry, so that the next number is how many are spooled.
    """
    records = Journal(run.path, run.run_id).records()
    new = records[next_seq(config.store, JobRecord, run.run_id, _JOURNAL) :]
    if not new:
        return
    with SpoolWriter(config.store, run.run_id, _JOURNAL, flush_rows=len(new) + 1) as spool:
        spool.number(JobRecord, len(records) - 1)
        for record in new:
            spool.append(record)


def code_revision() -> str:
    """Commit of the checkout dflop runs from, with `-dirty` when it was changed; the version outside a checkout."""
    here = Path(__file__).resolve().parent
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(describe, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        from dflop import __version__

        return f"v{__version__}"
    return found.stdout.strip()


def absolute(config: Config) -> Config:
    """The same configuration with absolute paths: jobs may start in another working directory."""
    dataset, processor = config.dataset, config.model.processor
    paths = {name: getattr(dataset, name).absolute() for name in ("annotations", "media_root", "tokenizer")}
    return config.model_copy(
        update={
            "dataset": dataset.model_copy(update=paths),
            "model": config.model.model_copy(update={"processor": processor.absolute() if processor else None}),
            "store": config.store.absolute(),
            "runs": config.runs.absolute(),
        }
    )
