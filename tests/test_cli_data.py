"""`dflop data` as a person uses it: profile a dataset on this machine, look at it, compare two."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.jobs.configs import write_demo_config
from tests.test_cli import dflop


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    write_demo_config(folder, 24, "data_profile.num_shards=1")
    return folder


def profile(folder: Path, *overrides: str) -> str:
    done = dflop("data", "profile", folder / "run.yaml", *(f"--set={o}" for o in overrides), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    (key,) = done.stdout.splitlines()
    return key


@pytest.fixture(scope="module")
def key(folder: Path) -> str:
    return profile(folder)


@pytest.fixture(scope="module")
def short(folder: Path, key: str) -> str:
    """A second profile, of samples that were made shorter."""
    return profile(folder, "dataset.max_llm_tokens=120", "dataset.overlong=[shrink]", "data_profile.max_bad_frac=1")


def data(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return dflop("data", *arguments, cwd=folder, DFLOP_STORE=str(folder / "store"))


def test_a_profile_is_made_once_and_shown(folder: Path, key: str) -> None:
    assert profile(folder) == key  # found, not made again
    show = data(folder, "show", key[:6])
    assert show.returncode == 0, show.stderr
    shown = (f"profile {key}", "24 samples, 0 of them shortened, 0 skipped", "single_image", "darker is more samples")
    assert [words for words in shown if words not in show.stdout] == []
    rows = [json.loads(line) for line in data(folder, "show", key, "--format", "json").stdout.splitlines()]
    assert [r["num_samples"] for r in rows if (r["group"], r["module"]) == ("all", "llm")] == [24]


def test_the_newest_profile_is_drawn_and_compared(folder: Path, key: str, short: str) -> None:
    drawn = data(folder, "show", "--output", "d.svg")
    assert (drawn.returncode, drawn.stdout) == (0, "d.svg\n")
    assert short in (folder / "d.svg").read_text()  # the newest profile, where none is named
    assert data(folder, "drift", key, key).returncode == 0
    other = data(folder, "drift", key, short, "--format", "json")
    shifts = {row["quantity"]: row for row in map(json.loads, other.stdout.splitlines())}
    assert set(shifts) == {"group", "audio_tokens", "vision_tokens", "llm_tokens"}
    assert other.returncode == int(any(row["drifted"] for row in shifts.values()))
    assert shifts["llm_tokens"]["mean_ratio"] < 1


def test_too_many_bad_samples_stop_with_examples(folder: Path) -> None:
    done = dflop("data", "profile", folder / "run.yaml", "--set=dataset.max_llm_tokens=20", cwd=folder)
    assert done.returncode == 1
    assert done.stdout == ""
    for words in ("more than max_bad_frac = 0.01", "sample too long:", "raise dataset.max_llm_tokens, or shorten"):
        assert words in done.stderr
