"""The tiny family, a tokenizer that fits it, tiny media, and a small demo dataset."""

import json
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dflop.data.dataset_profile import DatasetRef
from dflop.data.demo import make_demo_dataset
from dflop.data.demo_content import write_audio, write_video
from dflop.data.tokens import ChatTokenizer
from tests.data.helpers import TinyFamily, WriteRows, make_tokenizer


@pytest.fixture(scope="session")
def family() -> TinyFamily:
    return TinyFamily({}, {})


@pytest.fixture(scope="session")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_path: Path, family: TinyFamily) -> ChatTokenizer:
    return ChatTokenizer(tokenizer_path, family)


@pytest.fixture
def media_root(tmp_path: Path) -> Path:
    """A folder with `cat.png` (60 x 30 px), `clip.mp4` (64 x 48 px, 10 frames, 1 s) and `tone.flac` (2 s)."""
    root = tmp_path / "media"
    root.mkdir()
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 255, (30, 60, 3), np.uint8)).save(root / "cat.png")
    frames = [np.full((48, 64, 3), 20 * i, np.uint8) for i in range(10)]
    write_video(frames, root / "clip.mp4", Fraction(10))
    write_audio(np.sin(np.arange(32_000) / 5).astype(np.float32) / 2, root / "tone.flac")
    return root


@pytest.fixture
def write_rows(tmp_path: Path, media_root: Path, tokenizer_path: Path) -> WriteRows:
    """Write rows (objects, or strings taken as raw lines) as a JSONL dataset."""

    def write(rows: list[object], max_llm_tokens: int = 2048) -> DatasetRef:
        path = tmp_path / "annotations.jsonl"
        path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), "utf-8")
        return DatasetRef.of_file(path, media_root, tokenizer_path, max_llm_tokens)

    return write


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DatasetRef:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    return make_demo_dataset(tmp_path_factory.mktemp("demo") / "demo", num_samples=40, seed=7)


@pytest.fixture(scope="session")
def shared_media() -> Path:
    """Folder with hostile media, outside the repository; tests that want it skip without it."""
    root = Path(os.environ.get("DFLOP_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data")) / "media"
    if not root.is_dir():
        pytest.skip("no shared test data: set DFLOP_SHARED_DATA")
    return root
