from pathlib import Path

import pytest

from dflop.errors import ConfigError, StoreError
from dflop.store.ingest import ingest
from dflop.store.settings import Settings, init, read_settings
from tests.store.asking import stored, write


def test_init_changes_what_is_given_and_keeps_the_rest(tmp_path: Path) -> None:
    init(tmp_path / "new/store", keep_snapshots=9)
    init(tmp_path / "new/store", grace_s=7.5)
    assert read_settings(tmp_path / "new/store") == Settings(keep_snapshots=9, grace_s=7.5)


def test_senseless_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lease_s is 1\.0, must be at least 10"):
        init(tmp_path, lease_s=1.0)
    assert not (tmp_path / "store.json").exists()


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ('{"keep": 3}', "unknown setting `keep`")])
def test_a_damaged_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "store.json").write_text(text)
    with pytest.raises(StoreError, match=words) as error:
        read_settings(tmp_path)
    assert error.value.where.endswith("store.json")


def test_two_nodes_with_live_databases_of_their_own_share_a_store(tmp_path: Path, make) -> None:
    steps = []
    for step, node in enumerate(("a", "b", "a", "b")):
        init(tmp_path / "store", live=tmp_path / f"disk-of-{node}")
        write(tmp_path / "store", make.correction(step))
        assert ingest(tmp_path / "store").snapshot_seq == step + 1
        steps.append([c.effective_step for c in stored(tmp_path / "store")])
    # Each node finds in the spool what the other one ingested while it was away.
    assert steps == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert not (tmp_path / "store/live").exists()
