from __future__ import annotations

import os

import pytest

from dflop.errors import ConfigError, LaunchError
from dflop.launch import JobState, make_launcher
from tests.launch.helpers import make_spec


def test_unknown_backend_lists_the_valid_ones():
    with pytest.raises(ConfigError, match="slrm") as caught:
        make_launcher("slrm")
    assert caught.value.hint == "did you mean `slurm`? valid: inline, local, slurm"


def test_slurm_without_slurm_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="`sbatch`, which is not on PATH"):
        make_launcher("slurm")


def test_inline_runs_in_this_process_and_leaves_the_environment_alone(tmp_path):
    launcher = make_launcher("inline")
    before = dict(os.environ)
    handle = launcher.submit(make_spec(tmp_path / "job", "report", "hello", env={"GREETING": "hi"}))
    assert launcher.poll(handle).state is JobState.DONE
    (seen,) = launcher.collect(handle)
    launcher.interrupt(handle)
    assert launcher.poll(handle).state is JobState.DONE, "there was nobody to tell"
    assert (seen["word"], seen["RANK"], seen["WORLD_SIZE"], seen["GREETING"]) == ("hello", "0", "1", "hi")
    assert dict(os.environ) == before


def test_inline_reports_the_traceback(tmp_path):
    launcher = make_launcher("inline")
    handle = launcher.submit(make_spec(tmp_path / "job", "fail_on", "0"))
    assert launcher.poll(handle).state is JobState.FAILED
    with pytest.raises(LaunchError, match="ValueError: no microbatch for rank 0"):
        launcher.collect(handle)


@pytest.mark.parametrize(
    ("entry", "named"),
    [("no_colon", "no_colon"), ("tests.launch.entries:absent", "absent"), ("tests.launch.nowhere:run", "nowhere")],
)
def test_an_entry_that_does_not_exist_is_named(entry, named, tmp_path):
    launcher = make_launcher("inline")
    handle = launcher.submit(make_spec(tmp_path / "job", "report", entry=entry))
    with pytest.raises(LaunchError, match=f"(raised|No module).*{named}"):
        launcher.collect(handle)
