"""One folder of runs for several users, with whatever lies in such a folder."""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflop.config import dump_config
from dflop.errors import ConfigError, LaunchError
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.find import all_runs, find_run, left_out_text, look_into
from dflop.run.queue import reap
from dflop.run.status import run_rows
from tests.jobs.configs import make_config
from tests.jobs.made import make_run
from tests.users import ALICE, BOB, EVE, TEAM, act, as_root


@pytest.fixture
def folder() -> Iterator[Path]:
    """A team's folder of runs: setgid and writable by the group."""
    place = Path(tempfile.mkdtemp(prefix="dflop-team-"))
    place.chmod(0o755)
    runs = place / "runs"
    runs.mkdir()
    os.chown(runs, -1, TEAM)
    runs.chmod(0o2775)
    (place / "stores").mkdir()
    (place / "stores").chmod(0o1777)
    make_config(place)  # imports what configurations need
    yield runs
    shutil.rmtree(place)


def begin(folder: Path, user: int) -> RunDir:
    """What `dflop train CONFIG` of a user does first."""
    config = make_config(folder.parent, f"store={folder.parent}/stores/{user}")
    with act(user):
        return lifecycle.begin(config)[0]


def plant(folder: Path, mode: int = 0o777) -> Path:
    """A directory of Eve's that looks like an unfinished run of everybody's configuration, the newest."""
    path = folder / "small-20991231-235959-zzzzz"
    path.mkdir()
    config = make_config(folder.parent, f"store={folder.parent}/stores/{BOB}")
    (path / "config.resolved.yaml").write_text(dump_config(config))
    run = RunDir(path)
    run.write_state({"run_id": path.name, "config_key": config.key, "backend": "local", "state": "ready"})
    (path / "jobs/train").mkdir(parents=True)
    (path / "jobs/train/7_submitted.pkl").write_bytes(pickle.dumps(Explodes()))
    for found in (path, *path.rglob("*")):
        os.chown(found, EVE, TEAM)
    path.chmod(mode)
    return path


class Explodes:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, ("/tmp/dflop-pickle-of-eve-was-loaded",)


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o2775, 0o000])
def test_the_runs_of_others_are_left_out_and_never_chosen(folder, mode):
    of_alice, of_bob = begin(folder, ALICE), begin(folder, BOB)
    planted, config = plant(folder, mode), make_config(folder.parent, f"store={folder.parent}/stores/{BOB}")
    with act(BOB):
        assert all_runs(folder) == [of_bob]
        assert find_run("latest", folder) == find_run("small", folder) == of_bob
        assert lifecycle.unfinished(config) == of_bob
        assert [row[0] for row in run_rows(all_runs(folder))] == [of_bob.run_id]
        assert reap(folder, print) == []
        said = left_out_text(look_into(folder)[1])
        assert f"{of_alice.run_id}: it is a run of uid {ALICE}" in said
        assert f"{planted.name}: it is a run of uid {EVE}" in said
        for name in (planted.name, str(planted)):
            with pytest.raises(ConfigError, match=rf"cannot open run `{name}`: it is a run of uid {EVE}"):
                find_run(name, folder)
    assert not Path("/tmp/dflop-pickle-of-eve-was-loaded").exists()


@as_root
def test_whoever_has_no_run_in_a_teams_folder_gets_one_and_is_told_of_the_others(folder):
    begin(folder, ALICE)
    plant(folder)
    with act(BOB):
        with pytest.raises(ConfigError, match="no runs yet") as caught:
            find_run("latest", folder)
        assert f"it is a run of uid {ALICE}" in caught.value.hint
        assert f"it is a run of uid {EVE}" in caught.value.hint
        with pytest.raises(ConfigError, match="no run and no run directory `small`"):
            find_run("small", folder)
    own = begin(folder, BOB)
    assert (own.path.stat().st_uid, own.path.stat().st_mode & 0o777) == (BOB, 0o700)


@as_root
def test_a_folder_that_may_not_be_listed_is_named_with_its_owner(folder):
    os.chown(folder, ALICE, ALICE)
    folder.chmod(0o711)
    with act(BOB), pytest.raises(ConfigError, match="cannot list the runs: Permission denied") as caught:
        find_run("latest", folder)
    assert f"belongs to uid {ALICE}" in caught.value.hint


@as_root
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda path: path.touch(0o600), f"a file of uid {ALICE}: Permission denied"),
        (lambda path: path.touch(0o666), f"a file of uid {ALICE}"),
        (lambda path: path.symlink_to("elsewhere"), f"a symbolic link of uid {ALICE}"),
        (lambda path: path.mkdir(0o777), f"a special file of uid {ALICE}"),
        (lambda path: os.mkfifo(path, 0o666), f"a special file of uid {ALICE}"),
    ],
)
def test_a_lock_file_that_somebody_else_made_is_named_with_its_owner_and_no_link_followed(folder, make, what):
    lock = folder / f".begin-{BOB}.lock"
    with act(ALICE, umask=0):
        make(lock)
    with pytest.raises(LaunchError, match=f"cannot use the lock file, {what}") as caught:
        begin(folder, BOB)
    assert (caught.value.where, caught.value.hint) == (str(lock), "remove it, or ask its owner to")
    assert not (folder / "elsewhere").exists()


def test_a_directory_of_another_user_is_refused_by_name_and_path(tmp_path, monkeypatch):
    run = make_run(tmp_path)
    monkeypatch.chdir(run.path.parent)
    monkeypatch.setattr(os, "geteuid", lambda: ALICE)
    for name in (run.run_id, str(run.path), f"./{run.run_id}"):
        with pytest.raises(ConfigError, match="it is a run of ") as caught:
            find_run(name, run.path.parent)
        assert caught.value.where == str(run.path)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o2775])
def test_a_run_that_others_may_write_to_is_not_opened(tmp_path, mode):
    run, other = make_run(tmp_path), make_run(tmp_path, "small-2")
    run.path.chmod(mode)
    folder = run.path.parent
    assert (all_runs(folder), find_run("latest", folder), find_run("small", folder)) == ([other], other, other)
    with pytest.raises(ConfigError, match=rf"others may write to it \(mode {mode:o}\); .*chmod go-w {run.path}"):
        find_run("small-1", folder)
    run.path.chmod(0o750)
    assert find_run("small-1", folder) == run


def damage(run: RunDir, how: str) -> None:
    """Make of a directory what a crash, a full disk, an interrupted `rm -r` or a person leaves."""
    if how == "run.json":
        (run.path / "run.json").write_text("{half")
    elif how == "types":
        run.write_state({"state": 3})
    elif how == "config":
        run.config_file.unlink()
    elif how == "folder":
        run.config_file.unlink()
        run.config_file.mkdir()
    elif how == "copy":
        shutil.copytree(run.path, run.path.parent / "copied")
    elif how == "renamed":
        run.path.rename(run.path.parent / "copied")


@pytest.mark.parametrize(
    ("how", "name", "problem"),
    [
        ("run.json", "small-1", "run.json is damaged: "),
        ("types", "small-1", "run.json is damaged: `state` is 3"),
        ("config", "small-1", "config.resolved.yaml is missing"),
        ("folder", "small-1", "config.resolved.yaml is no file"),
        ("copy", "copied", "it is run `small-1` under another name"),
        ("renamed", "copied", "it is run `small-1` under another name"),
    ],
)
def test_a_damaged_run_hides_no_other_and_is_refused_with_the_reason(tmp_path, how, name, problem):
    run, other = make_run(tmp_path), make_run(tmp_path, "small-2")
    damage(run, how)
    folder = run.path.parent
    assert other in all_runs(folder)
    assert name not in [found.run_id for found in all_runs(folder)]
    assert problem in left_out_text(look_into(folder)[1])
    for given in (name, str(folder / name)):
        with pytest.raises(ConfigError, match=problem):
            find_run(given, folder)


def test_a_copy_in_another_folder_is_refused_while_the_original_is_there_and_a_moved_run_is_taken_up(tmp_path):
    run, _ = lifecycle.begin(make_config(tmp_path))
    copy = tmp_path / "there" / run.run_id
    shutil.copytree(run.path, copy)
    assert all_runs(copy.parent) == []
    with pytest.raises(ConfigError, match=f"it is a copy of {run.path}; use that one"):
        find_run(str(copy), copy.parent)
    assert find_run(str(run.path), run.path.parent) == run
    shutil.rmtree(run.path)
    moved = find_run("latest", copy.parent)
    assert moved == RunDir(copy)
    lifecycle.note(moved, lifecycle.READY)
    assert moved.state()["run_dir"] == str(copy)


def test_links_files_and_other_folders_among_runs_do_no_harm(tmp_path):
    run = make_run(tmp_path)
    folder = run.path.parent
    elsewhere = tmp_path / "scratch" / "small-0"
    make_run(tmp_path, "small-0").path.rename(tmp_path / "small-0")
    elsewhere.parent.mkdir()
    (tmp_path / "small-0").rename(elsewhere)
    (folder / "small-0").symlink_to(elsewhere)  # moved to another disk by its owner
    (folder / "newest").symlink_to(run.path)
    (folder / "dangling").symlink_to(tmp_path / "nowhere")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "notes.txt").write_text("no run")
    (folder / "notes").mkdir()
    os.mkfifo(folder / "pipe")
    found, left_out = look_into(folder)
    assert ({one.path for one in found}, left_out) == ({run.path, elsewhere}, {})
    assert find_run("small-0", folder).path == elsewhere


@as_root
def test_a_link_of_somebody_else_is_not_followed(folder):
    own = begin(folder, BOB)
    moved = folder.parent / "stores" / own.run_id
    own.path.rename(moved)
    (folder / "small-9").symlink_to(moved)
    os.lchown(folder / "small-9", EVE, TEAM)
    with act(BOB):
        assert all_runs(folder) == []
        with pytest.raises(ConfigError, match=f"a symbolic link of uid {EVE}"):
            find_run("small-9", folder)


def test_a_run_that_vanishes_while_runs_are_listed_is_left_out(tmp_path, monkeypatch):
    first, gone = make_run(tmp_path), make_run(tmp_path, "small-2")
    names = os.listdir(first.path.parent)
    shutil.rmtree(gone.path)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: names if Path(path) == first.path.parent else listdir(path))
    assert look_into(first.path.parent) == ([first], {})
    assert run_rows([gone])[0][:2] == (gone.run_id, "damaged: cannot read the configuration: No such file or directory")


@as_root
def test_a_read_only_file_system_is_named(tmp_path):
    """In a mount namespace of its own, where the runs are mounted read-only."""
    run = make_run(tmp_path)
    script = (
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,bind,ro {tmp_path} && cd / &&"
        f" {sys.executable} -m dflop.cli"
    )
    for words, code, said in (
        (f"runs list --runs {tmp_path}/runs", 0, ""),
        (f"runs show {run.path}", 0, ""),
        (f"train {run.path}", 5, "Read-only file system"),
        (f"cancel {run.path}", 5, "Read-only file system"),
    ):
        done = subprocess.run(["unshare", "-m", "sh", "-c", f"{script} {words}"], capture_output=True, text=True)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert said in done.stderr
