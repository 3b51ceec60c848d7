"""Brings a real Slurm up for the tests in this folder (see cluster.sh), once, and down again if it was down before."""

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from dflop.config import SlurmConfig
from dflop.launch.slurm import SlurmLauncher

CLUSTER = Path(__file__).with_name("cluster.sh")
SWITCH = "DFLOP_TEST_SLURM"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(CLUSTER.parent):
            item.add_marker(pytest.mark.lane("slurm"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))  # waiting for the cluster's turn counts


def cluster_script(*words: str) -> subprocess.CompletedProcess[str]:
    """Run cluster.sh; what it said is in `stdout`."""
    # Not through pipes: the daemons inherit them and keep them open.
    log = Path(os.environ.get("TMPDIR", "/tmp")) / f"dflop-cluster-{os.getpid()}.log"
    with log.open("w+") as file:
        code = subprocess.run(
            [CLUSTER, *words], stdout=file, stderr=file, stdin=subprocess.DEVNULL, check=False
        ).returncode
    return subprocess.CompletedProcess(words, code, log.read_text())


TURN = Path("/var/tmp/dflop-slurm-turn")
"""Locked by whoever uses the cluster: shared, but by tests that take its daemons down."""


@contextlib.contextmanager
def _turn(how: int) -> Iterator[None]:
    with TURN.open("a+") as file:
        fcntl.flock(file, how)
        yield


@pytest.fixture(scope="module", autouse=True)
def turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Test modules that say `NEEDS_CLUSTER_ALONE = True` have it for themselves, also from other workers."""
    with _turn(fcntl.LOCK_EX if getattr(request.module, "NEEDS_CLUSTER_ALONE", False) else fcntl.LOCK_SH):
        yield


USERS = Path("/var/tmp/dflop-slurm-users")
"""How many test processes use a cluster that one of them brought up: workers of pytest-xdist share it."""


@contextlib.contextmanager
def _users() -> Iterator[IO[str]]:
    with USERS.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _count(file: IO[str], count: int) -> None:
    file.truncate(0)
    file.write(str(count))


def _join() -> None:
    with _users() as file:
        is_up, count = cluster_script("status").returncode == 0, int(file.read() or 0)
        if is_up and count == 0:
            return  # somebody else's: not ours to stop
        up = cluster_script("up")
        if up.returncode != 0:
            cluster_script("down")
            pytest.fail(f"the test cluster did not start:\n{up.stdout}")
        _count(file, count + 1 if is_up else 1)


def _leave() -> None:
    with _users() as file:
        count = int(file.read() or 0)
        if count == 0:
            return
        _count(file, count - 1)
        if count == 1:
            cluster_script("down")


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """Four idle nodes."""
    wanted = os.environ.get(SWITCH, "")
    if wanted == "0":
        pytest.skip(f"{SWITCH}=0")
    if os.geteuid() != 0:
        pytest.skip("a test cluster needs root (slurmd, unshare --uts)")
    if not wanted and shutil.which("sbatch") is None:
        pytest.skip(f"Slurm is not installed; {SWITCH}=1 installs Debian's packages")
    with _turn(fcntl.LOCK_SH):  # not while a test has taken the controller down
        _join()
    yield
    _leave()


@pytest.fixture
def launcher(cluster: None) -> SlurmLauncher:
    """Polls every second and has no patience, as tests want it."""
    return SlurmLauncher(run_id="test", site=SlurmConfig(poll_interval_s=0.5, lost_after_s=3), results_timeout_s=5)
