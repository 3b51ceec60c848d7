import os
import subprocess
import sys

import pytest
from hypothesis import settings

from dflop.launch.kernels import kernel_environment

pytest_plugins = ["tests.lanes", "tests.budget", "tests.jobs.fixtures"]

# Tests and the jobs that they start share what is compiled.
os.environ |= kernel_environment(os.environ)
# What is compiled is kept: a tenth of what a process costs that imports dflop, and half of what collecting tests costs.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

WARMING = pytest.StashKey[subprocess.Popen]()

# Workers with a thread per core each wait for one another in spin loops: up to 60 times as slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shared machine makes any single example slow now and then; pytest-timeout catches what really hangs.
settings.register_profile("dflop", deadline=None)
settings.load_profile("dflop")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Kernels are compiled once, while workers collect, before they and their jobs would all do so at the same time."""
    if session.config.getoption("numprocesses", None):
        session.config.stash[WARMING] = subprocess.Popen([sys.executable, "-m", "tests.warm"])


def pytest_configure(config: pytest.Config) -> None:
    """Workers start the server of ranks and commands while they collect; no test pays for its imports."""
    if hasattr(config, "workerinput"):
        from tests.train.ranks import start_server

        start_server()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node) -> None:
    """No worker gets a test before that is done."""
    assert node.config.stash[WARMING].wait() == 0


@pytest.fixture
def config_file(tmp_path):
    """A run's configuration with a cluster of its folder."""
    from tests.test_config import BASE, CLUSTER

    (tmp_path / "clusters").mkdir()
    (tmp_path / "clusters" / "here.yaml").write_text(CLUSTER)
    (path := tmp_path / "run.yaml").write_text(BASE)
    return path
