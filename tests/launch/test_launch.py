from __future__ import annotations

import pytest

from dflop.errors import ConfigError, LaunchError
from dflop.launch import JobState, make_launcher
from tests.launch.helpers import end, make_spec


def test_unknown_backend_lists_the_valid_ones():
    with pytest.raises(ConfigError, match="slrm") as caught:
        make_launcher("slrm")
    assert caught.value.hint == "did you mean `slurm`? valid: local, slurm"


def test_slurm_without_slurm_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="`sbatch`, which is not on PATH"):
        make_launcher("slurm")


@pytest.mark.parametrize(
    ("entry", "named"),
    [("no_colon", "no_colon"), ("tests.launch.entries:absent", "absent"), ("tests.launch.nowhere:run", "nowhere")],
)
def test_an_entry_that_does_not_exist_is_named(entry, named, tmp_path):
    launcher = make_launcher("local")
    handle = launcher.submit(make_spec(tmp_path / "job", "report", entry=entry, num_tasks=2))
    assert end(launcher, handle).state is JobState.FAILED
    with pytest.raises(LaunchError, match=f"(raised|No module).*{named}"):
        launcher.collect(handle)
