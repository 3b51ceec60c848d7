import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from dflop.errors import ConfigError, StoreError
from dflop.store import access, durable, live, settings, snapshot
from dflop.store.ingest import ingest
from dflop.store.maintenance import compact, gc
from dflop.store.rebuild import rebuild
from dflop.store.spool import SpoolWriter
from tests.store.asking import stored, write
from tests.users import ALICE, BOB, EVE, TEAM, act, as_root


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory, make) -> None:
    """Everything has been imported: other users may not be able to read root's Python."""
    root = tmp_path_factory.mktemp("store")
    write(root, make.correction())
    ingest(root)
    compact(root, min_files=1, min_age_s=-1)


@pytest.fixture
def place(imported: None) -> Iterator[Path]:
    """A folder that every user may reach; pytest's own are root's alone."""
    folder = Path(tempfile.mkdtemp(prefix="dflop-team-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


def of_alice(root: Path, make, *, group: str | None = str(TEAM)) -> Path:
    with act(ALICE):
        settings.init(root, group=group)
        write(root, make.correction(0), run_id="a")
        ingest(root)
        if group:  # the tests' own copy of an empty database went past the store
            settings.init(root, group=group)
    return root


def not_of_the_team(root: Path) -> list[str]:
    found = [(path, path.stat()) for path in (root, *root.rglob("*"))]
    least = {
        path: 0o2070 if path.is_dir() else 0o040 if "snapshots" in str(path.resolve()) else 0o060 for path, _ in found
    }
    return [f"{p} {access.whose(s)}" for p, s in found if s.st_gid != TEAM or s.st_mode & least[p] != least[p]]


@as_root
@pytest.mark.parametrize(("group", "umask"), [(str(TEAM), 0o077), (None, 0o022)])
def test_every_member_publishes_spools_reads_and_cleans_whatever_the_umasks(place, make, group, umask) -> None:
    if group is None:  # no option: the folder it is made in is the team's
        os.chown(place, 0, TEAM)
        place.chmod(0o2770)
    root = place / "store"
    with act(ALICE, umask):
        settings.init(root, group=group)
        live.migrate_store(root)
    for step, user in enumerate((ALICE, BOB, ALICE)):
        with act(user, umask):
            write(root, make.correction(step), run_id=f"of-{user}", producer=f"p{step}")
            ingest(root)
            assert len(stored(root)) == step + 1
    with act(BOB, umask):
        (root / "spool/correction/of-60001/p7-000000.parquet").write_bytes(b"no Parquet")
        (root / "spool/correction/of-60001/p7-000000.parquet").chmod(0o660)
    with act(ALICE, umask):
        assert ingest(root).num_quarantined_files == 1
        assert compact(root, min_files=1, min_age_s=-1).num_runs == 2
        assert rebuild(root).num_files == 3
    with act(BOB, umask):
        settings.init(root, keep_snapshots=1, grace_s=0)
        assert sum(gc(root).values()) > 0
    assert not_of_the_team(root) == []


@as_root
def test_the_log_of_a_killed_ingester_is_the_groups(place, make, monkeypatch) -> None:
    root, modes = of_alice(place / "store", make), []

    def look(*_: object, **_given: object) -> int:
        modes.extend((p.name, stat.S_IMODE(p.stat().st_mode)) for p in live.live_file(root).parent.iterdir())
        return 0

    monkeypatch.setattr(snapshot, "publish_if_stale", look)
    with act(BOB, 0o077):
        write(root, make.correction(1), run_id="b")
        ingest(root)
    assert sorted(modes) == [("dflop.duckdb", 0o664), ("dflop.duckdb.wal", 0o664)]


@as_root
@pytest.mark.parametrize(
    ("name", "mode", "words"),
    [
        ("live/dflop.duckdb", 0o644, "may not write"), ("ingest.lock", 0o644, "may not write"),
        ("store.json", 0o600, "may not read"), ("live", 0o2700, "may not enter"),
        ("INGEST.lease", 0o2755, "may not write in"), ("snapshots", 0o2755, "may not write in"),
        (".", 0o2750, "may not write in"),
    ],
)  # fmt: skip
def test_what_a_member_kept_to_himself_is_named_and_opened_by_init(place, make, name, mode, words) -> None:
    root = of_alice(place / "store", make)
    (root / name).chmod(mode)
    with act(BOB):
        write_as_is(root, make.correction(1))
        with pytest.raises(StoreError) as error:
            ingest(root)
    assert f"60002 {words} " in error.value.what
    assert f"owned by uid 60001, group gid {TEAM}, mode {mode:04o}" in error.value.what
    assert "init --store" in error.value.hint
    with act(ALICE):
        settings.init(root, group=str(TEAM))
    with act(BOB):
        write_as_is(root, make.correction(2))
        ingest(root)
    assert not_of_the_team(root) == []


def write_as_is(root: Path, record) -> None:
    with SpoolWriter(root, f"b{record.effective_step}", "p") as writer:
        writer.append(record)


@as_root
@pytest.mark.parametrize(("name", "mode"), [("a/p-000001.parquet", 0o600), ("a", 0o700)])
def test_rows_that_cannot_be_read_wait_and_are_named(place, make, name, mode) -> None:
    root = of_alice(place / "store", make)
    with act(ALICE):
        write(root, make.correction(1), run_id="a")
    path = root / "spool/correction" / name
    path.chmod(mode)
    said: list[str] = []
    with act(BOB):
        write_as_is(root, make.correction(2))
        done = ingest(root, said.append)
        assert (done.num_files, done.num_unreadable) == (1, 1)
        with pytest.raises(StoreError, match="would skip 1 files or folders"):
            rebuild(root)
    assert any(str(path) in line and f"mode {mode:04o}" in line for line in said)
    with act(ALICE):
        settings.init(root, group=str(TEAM))
    with act(BOB):
        assert ingest(root).num_files == 1
    assert len(stored(root)) == 3


@as_root
@pytest.mark.parametrize("user", [BOB, EVE])
@pytest.mark.parametrize("group", [None, str(TEAM)])
def test_who_may_not_is_told_whose_it_is(place, make, user, group) -> None:
    root = of_alice(place / "store", make, group=group)
    allowed = user == BOB and group is not None
    root.chmod(root.stat().st_mode & ~0o007)
    for attempt in (
        lambda: write_as_is(root, make.correction(1)), lambda: ingest(root), lambda: gc(root), lambda: rebuild(root),
        lambda: settings.init(root), lambda: live.migrate_store(root), lambda: snapshot.open_current(root)[0].close(),
    ):  # fmt: skip
        with act(user):
            if allowed:
                attempt()
                continue
            with pytest.raises(
                StoreError, match=rf"uid {user} may not .* owned by uid 60001, group gid \d+, mode 2?0?7"
            ):
                attempt()


@as_root
def test_init_refuses_groups_of_others_and_follows_no_link(place, make) -> None:
    root = of_alice(place / "store", make, group=None)
    for user, group, words in ((ALICE, "no-such-group", "no group"), (EVE, str(TEAM), "not in group")):
        with act(user), pytest.raises(ConfigError, match=words):
            settings.init(root, group=group)
    secret = place / "secret"
    secret.touch(mode=0o600)
    (root / "link").symlink_to(secret)
    (root / "spool/of-bob").mkdir()
    os.chown(root / "spool/of-bob", BOB, BOB)
    with act(ALICE), pytest.raises(StoreError, match="1 files or folders of other users") as error:
        settings.init(root, group=str(TEAM))
    assert "uid 60002 or root must run the same command" in error.value.hint
    settings.init(root, group=str(TEAM))
    assert (stat.S_IMODE(secret.stat().st_mode), secret.stat().st_gid) == (0o600, 0)
    (root / "link").unlink()
    assert not_of_the_team(root) == []


@given(st.integers(0, 0o777), st.sampled_from([0o755, 0o775, 0o2755, 0o2770, 0o2775, 0o2777]))
@hypothesis_settings(deadline=None, max_examples=40)
def test_in_a_groups_folder_the_folder_decides_and_elsewhere_the_umask(umask: int, mode: int) -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(mode)
        umask = umask & 0o077 | 0o002  # as commands have it
        before = os.umask(umask)
        durable.make_folder(folder / "a/b")
        durable.write_new(folder / "a/b/new", b"")
        durable.replace(folder / "a/b/new", b"x")
        os.umask(before)
        found = [stat.S_IMODE(p.stat().st_mode) & 0o777 for p in (folder / "a", folder / "a/b", folder / "a/b/new")]
        bits = mode & 0o775 if mode in (0o2770, 0o2775, 0o2777) else 0o777 & ~umask
        assert found == [bits, bits, bits & 0o666]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/s/spool/x"), "mounted read-only"),
        (duckdb.IOException('IO Error: Cannot open file "/s/x": Read-only file system'), "mounted read-only"),
        (OSError(errno.EIO, os.strerror(errno.EIO), "/s/x"), "Input/output error"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception, words: str) -> None:
    told = access.error_of("ingest failed", error, Path("/s"), hint="again")
    assert told.what.startswith("ingest failed: ")
    assert words in told.what
