"""A disk that is really full: a tmpfs of a few megabytes, filled to the brim at the worst moments."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflop.errors import StoreError
from dflop.records import StepObservation
from dflop.store import snapshot
from dflop.store.ingest import ingest
from dflop.store.rebuild import verify
from tests.store.asking import fill, stored, write


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill_up(folder: Path, keep_bytes: int = 0) -> Path:
    ballast = folder / "ballast"
    with open(ballast, "wb", buffering=0) as file:
        try:
            while file.write(b"x" * 65536):
                pass
        except OSError:
            pass
        if keep_bytes:
            file.truncate(max(file.tell() - keep_bytes, 0))
    return ballast


OFTEN = pytest.mark.lane("kills")


@pytest.mark.parametrize(
    "keep_bytes", [0, 1_000_000, *(pytest.param(n, marks=OFTEN) for n in (300_000, 2_500_000, 4_000_000))]
)
def test_an_ingest_on_a_full_disk_fails_whole_and_the_next_one_succeeds(
    small_disk: Path, make, keep_bytes: int
) -> None:
    root = small_disk / "store"
    fill(root, make.correction(0))
    write(root, *(make.observation(step) for step in range(1, 200)))
    before = snapshot.read_current(root)
    ballast = fill_up(small_disk, keep_bytes)
    try:
        ingest(root)
        assert keep_bytes >= 1_000_000
    except StoreError:
        assert snapshot.read_current(root) == before
        assert stored(root) == [make.correction(0)], "readers go on with what there was"
    ballast.unlink()
    assert ingest(root).num_quarantined_files == 0
    assert verify(root).problems == ()
    assert len(stored(root, StepObservation)) == 199
