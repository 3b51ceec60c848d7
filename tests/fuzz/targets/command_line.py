"""Command lines: every command that only reads, with words and numbers that nobody would type.

The commands run in this process, as `dflop` runs them: what leaves `main` is an exit code that docs/operating.md lists,
and never a traceback.
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from dflop import cli
from dflop.cli.usage import subcommands
from dflop.store import bounds
from tests.fuzz import hostile
from tests.fuzz.target import EXIT_CODES, Target
from tests.jobs.configs import write_config
from tests.jobs.finished import finished_run

_LEFT_OUT = (
    "run",
    "train",
    "serve",
    "reap",
    "doctor",
    "compare",
    "completion",
    "demo-data",
    "profile",
    "watch",
    "replan",
    "init",
)
"""Commands that start jobs or servers, end processes, or go on for ever; `init` and `compare` take long."""
_WORDS = (
    "run.yaml", "small-1", "latest", "store", "runs", "out.json", "out.svg", "nope.yaml", "missing/out.svg", ".",
    "tables", "runs", "select 1",
    "--", "-", "--set", "--set=train.num_steps=", "train.num_steps=1e999", "--help", "--json", "--format", "--store",
    "--param", "a=b", "=",
    "--gpus=0", "--gpus=-3", "--gpus=99999999999999999999", "--gpus=nan", "--lines=-5", "--rank=999",
    "--timeout-s=nan", "--timeout-s=inf",
    "--timeout-s=-1", "--timeout-s=1e308", "--steps=9..1", "--steps", "--top=-1", "--threshold=nan", "--interval-s=0",
    "--output", "--grace-s=nan",
    "--keep-snapshots=-9223372036854775809", "--device=h100", "--emit=json", "--no-quiet", "-q", "-n",
    "--max-files=1e9", "--min-files=0",
)  # fmt: skip


@functools.cache
def _commands() -> list[tuple[str, ...]]:
    return [chain for chain in subcommands(cli.app) if not set(chain) & set(_LEFT_OUT)]


@functools.cache
def _options(chain: tuple[str, ...]) -> list[str]:
    app = cli.app
    for name in chain:
        app = app[name]
    if app.default_command is None:
        return []
    names = [name for argument in app.assemble_argument_collection() for name in argument.names]
    return sorted({name for name in names if name.startswith("-")})


def _argv() -> st.SearchStrategy[list[str]]:
    def of(chain: tuple[str, ...]) -> st.SearchStrategy[list[str]]:
        word = st.sampled_from(_WORDS) | hostile.TEXTS | hostile.SCALARS.map(lambda v: str(v)[:400])
        option = st.sampled_from(_options(chain) or ["--help"])
        pair = st.tuples(option, word).map(lambda p: [f"{p[0]}={p[1]}"] if p[0].startswith("--") else list(p))
        parts = st.lists(word.map(lambda w: [w]) | pair, max_size=5)
        return parts.map(lambda found: [*chain, *(word for part in found for word in part)])

    return st.sampled_from(_commands()).flatmap(of)


@contextlib.contextmanager
def _as_typed(argv: list[str]) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["dflop", *argv]),
        mock.patch.object(bounds, "bound_process"),  # of a process of its own
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        yield out, err


def _check(folder: Path) -> Callable[[Any], None]:
    finished_run(folder)
    write_config(folder)

    def check(argv: list[str]) -> None:
        code: Any = 0
        with contextlib.chdir(folder), _as_typed(argv) as (_, err):
            try:
                cli.main()
            except SystemExit as error:
                code = error.code or 0
        assert code in EXIT_CODES, f"exit code {code}: {err.getvalue()[:300]}"
        assert "Traceback" not in err.getvalue()
        if code == 2:
            assert err.getvalue().strip(), "refused without a word"

    return check


TARGETS = (Target("command-line", "words after the commands that only read", _argv, _check, quick=6, deadline_s=60),)
