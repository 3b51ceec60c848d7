"""Programs forked from a server that has imported torch, transformers and dflop once: they begin at once."""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

from tests.train.ranks import PRELOAD

_CONTEXT = multiprocessing.get_context("forkserver")


class Program:
    """`python -m entry *args`, with as much of `subprocess.Popen` as its tests use."""

    def __init__(
        self,
        entry: str,
        args: tuple[str, ...],
        env: Mapping[str, str],
        log: Path,
        *,
        err: Path | None = None,
        cwd: Path | None = None,
    ) -> None:
        """Starts it; stdout and stderr go to `log`, or stderr to `err`."""
        _CONTEXT.set_forkserver_preload(PRELOAD)
        for file in (log, err or log):  # here: a test that reads it at once must not find what an earlier one wrote
            file.write_bytes(b"")
        streams = str(log), str(err or log)
        self._process = _CONTEXT.Process(target=_run, args=(entry, args, dict(env), streams, str(cwd or Path.cwd())))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def run_module(
    entry: str, *args: str, cwd: Path, env: Mapping[str, str], timeout_s: float = 120
) -> subprocess.CompletedProcess[str]:
    """`python -m entry *args` to its end, with what it wrote."""
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        program = Program(entry, args, env, out, err=err, cwd=cwd)
        try:
            code = program.wait(timeout_s)
        finally:
            program.kill()
        return subprocess.CompletedProcess([entry, *args], code, out.read_text(), err.read_text())


def _run(entry: str, args: tuple[str, ...], env: dict[str, str], streams: tuple[str, str], cwd: str) -> None:
    os.environ.clear()
    os.environ |= env
    os.chdir(cwd)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.argv = [entry, *args]
    try:
        runpy.run_module(entry, run_name="__main__", alter_sys=True)
    except Exception:  # said before anything that ends the process at exit
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:  # what multiprocessing leaves out at the end of a program
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.main_thread():
                thread.join()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
