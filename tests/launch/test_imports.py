"""Jobs import nothing from the folder they are started in: it may be a dataset's, and hold a `json.py`."""

from operator import length_hint

import pytest

from dflop.jobs.supervisor import Supervisor
from dflop.launch import JobState, Resources
from dflop.launch.local import LocalLauncher
from dflop.train.prefetch import _Worker
from tests.launch.helpers import REPO, end, make_spec

SHADOWS = ("json", "submitit", "dflop", "torch", "numpy")


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The working directory holds modules by the names of ours and of those we import; each leaves a mark."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise SystemExit(9)\n"
        )
    monkeypatch.chdir(folder)
    return tmp_path / "ran"


@pytest.mark.parametrize("setup", [(), ("true",)])
def test_a_local_job(hostile, tmp_path, setup):
    launcher = LocalLauncher(cancel_grace_s=0.5)
    handle = launcher.submit(make_spec(tmp_path / "job", "report", "x", resources=Resources(setup=setup)))
    assert end(launcher, handle).state is JobState.DONE
    assert not hostile.exists()


def test_the_scheduler_beside_rank_0(hostile, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    monkeypatch.setattr("dflop.jobs.supervisor.SCHEDULER_MODULE", "tests.launch.entries")  # runs nothing by itself
    supervisor = Supervisor([], tmp_path / "log", num_steps=1, max_restarts=0)
    supervisor._process.wait(60)
    assert (tmp_path / "log").read_text() == ""
    assert not hostile.exists()


def test_a_decoding_worker(hostile):
    worker = _Worker()
    worker.ask((length_hint, 30.0), 120.0)  # answers, so it has imported what it needs
    worker.kill()
    assert not hostile.exists()
