import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflop import files


def test_writers_of_one_file_do_not_meet_and_readers_see_whole_files(tmp_path: Path):
    path, texts = tmp_path / "run.json", [str(n) * 100_000 for n in range(4)]
    path.write_text(texts[0])

    def write(text: str) -> None:
        for _ in range(40):
            files.replace(path, text)

    with ThreadPoolExecutor() as pool:
        writing = [pool.submit(write, text) for text in texts]
        while not all(future.done() for future in writing):
            assert path.read_text() in texts
        assert [future.result() for future in writing] == [None] * len(texts)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("call", ["os.fsync", "os.replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "file.json"
    files.replace(path, b"old", is_durable=True)

    def fail(*_args: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(call, fail)
        with pytest.raises(OSError, match="disk full"):
            files.replace(path, "new", is_durable=True)
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file.json"])
    files.replace(path, "é")
    assert path.read_bytes() == "é".encode()
