from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TORCHVISION = Path(sys.prefix) / "clients" / "torchvision"


@pytest.fixture(scope="session")
def ask_processor() -> Iterator[Callable[..., dict[str, Any]]]:
    """Asks Hugging Face's video processors, see `video_reference.py`; one process answers all tests of a session."""
    if not TORCHVISION.is_dir():
        pytest.skip(f"the video processors need {TORCHVISION} (make references)")
    env = {**os.environ, "PYTHONPATH": str(TORCHVISION), "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("video_reference.py")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        assert process.stdin
        assert process.stdout
        asks, answers = process.stdin, process.stdout

        def ask(family: str, *, options: dict[str, Any], pixels: bool = False, **source: Any) -> dict[str, Any]:
            print(json.dumps({"family": family, "options": options, "pixels": pixels, **source}), file=asks, flush=True)
            line = answers.readline()
            assert line, "the reference process ended"
            said: dict[str, Any] = json.loads(line)
            return said

        yield ask
        asks.close()
