from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

TORCHVISION = Path(sys.prefix) / "clients" / "torchvision"


@pytest.fixture(scope="session")
def ask_processor() -> Iterator[Callable[..., dict[str, Any]]]:
    """Asks Hugging Face's video processors, see `video_reference.py`; one process answers all tests of a session."""
    with _process("video_reference.py") as answered:

        def ask(family: str, *, options: dict[str, Any], pixels: bool = False, **source: Any) -> dict[str, Any]:
            return answered({"family": family, "options": options, "pixels": pixels, **source})

        yield ask


@pytest.fixture(scope="session")
def ask_media() -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """Asks what media rules are read from a processor, see `media_reference.py`."""
    with _process("media_reference.py") as answered:
        yield answered


@contextmanager
def _process(script: str) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """A process that may import torchvision and answers JSON lines."""
    if not TORCHVISION.is_dir():
        pytest.skip(f"the processors need {TORCHVISION} (make references)")
    env = {**os.environ, "PYTHONPATH": str(TORCHVISION), "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    path = Path(__file__).with_name(script)
    with subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        asks, answers = process.stdin, process.stdout

        def answered(case: dict[str, Any]) -> dict[str, Any]:
            print(json.dumps(case), file=asks, flush=True)
            line = answers.readline()
            assert line, "the reference process ended"
            said: dict[str, Any] = json.loads(line)
            return said

        yield answered
        asks.close()
