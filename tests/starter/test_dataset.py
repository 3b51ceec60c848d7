"""What is found at a path: the file with rows, its format, and the folder of its media."""

import gzip
import json
from pathlib import Path

from dflop.starter.dataset import NUM_LOOKED_AT, find_dataset
from tests.data.helpers import chat


def rows(*media: str, kind: str = "image") -> str:
    return "".join(json.dumps(chat(f"<{kind}>\nwhat?", "that", **{kind: name})) + "\n" for name in media)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_folder_gives_the_rows_for_training_and_the_root_of_their_media_and_a_file_is_taken_as_it_is(tmp_path):
    touch(tmp_path / "pictures", "a/1.jpg", "a/2.jpg")
    (tmp_path / "train.jsonl").write_text(rows("a/1.jpg", "a/2.jpg", "a/3.jpg"))
    (tmp_path / "val.jsonl").write_text(rows("a/1.jpg"))
    (tmp_path / "manifest.json").write_text(json.dumps([{"file": "x", "licence": "y"}] * 50))
    found = find_dataset(tmp_path)
    first, *more = found.card.lines()
    assert (found.card.annotations, found.num_bad, dict(found.kinds)) == (
        str(tmp_path / "train.jsonl"),
        0,
        {"image": 3},
    )
    assert first == f"{tmp_path / 'train.jsonl'}, JSON Lines, 3 rows, split train"
    assert more == ["not taken: val.jsonl, JSON Lines, 1 rows, split validation"]
    assert (found.media_root, found.num_media, found.num_media_found) == (tmp_path / "pictures", 3, 2)
    touch(tmp_path / "media", "1.mp4")
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(json.dumps([chat("<video>\nx", "y", video="1.mp4")]).encode()))
    found = find_dataset(path)
    assert (list(found.card.lines()), dict(found.kinds)) == ([f"{path}, JSON, 1 rows"], {"video": 1})
    assert found.media_root == tmp_path / "media"


def test_only_some_rows_of_a_long_file_are_read_and_bad_ones_counted_with_a_reason(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text((json.dumps(chat("a", "b")) + "\n") * 1000)
    found = find_dataset(tmp_path)
    assert (found.num_media, found.media_root, dict(found.kinds)) == (0, tmp_path, {}), "text needs no media"
    assert (found.card.num_rows, found.num_looked_at) == (1000, NUM_LOOKED_AT)
    path.write_text(rows("1.jpg") + '{"conversations": []}\n{"id": 1')
    found = find_dataset(tmp_path)
    assert (found.num_looked_at, found.num_bad) == (3, 2)
    assert found.first_reason.startswith("row 1: ")


def test_a_mixture_counts_the_rows_of_all_its_files(tmp_path):
    touch(tmp_path / "m", "1.jpg")
    (tmp_path / "a.jsonl").write_text(rows("1.jpg", "1.jpg"))
    (tmp_path / "b.jsonl").write_text(rows("1.jpg"))
    (tmp_path / "mixture.yaml").write_text(
        "datasets:\n  - {json_path: a.jsonl, media_root: m}\n  - {json_path: b.jsonl}\n"
    )
    found = find_dataset(tmp_path)
    assert next(iter(found.card.lines())) == f"{tmp_path / 'mixture.yaml'}, mixture, 3 rows"
    assert (found.media_root, found.num_media_found, found.kinds) == (tmp_path / "m", 3, {"image": 3})


def test_absolute_paths_count_where_they_lie_under_the_root(tmp_path):
    touch(tmp_path / "home" / "here" / "media", "1.jpg", "2.jpg")
    touch(tmp_path / "far" / "pictures", "a/1.jpg", "b/2.jpg")
    for folder, names, root in (
        ("home/here/media", ("1.jpg", "2.jpg"), tmp_path / "home" / "here"),
        ("far/pictures", ("a/1.jpg", "b/2.jpg"), tmp_path / "far" / "pictures"),
    ):
        (tmp_path / "home" / "here" / "rows.jsonl").write_text(rows(*(f"{tmp_path}/{folder}/{name}" for name in names)))
        found = find_dataset(tmp_path / "home" / "here")
        assert (found.media_root, found.num_media, found.num_media_found) == (root, 2, 2)


def test_keys_are_counted_and_rows_left_out_for_a_key_are_training_data(tmp_path):
    lines = [chat("a", "b", fps=1), chat("a", "b", fps=2), chat("a", "b", reviewer=7, tools=None)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = find_dataset(tmp_path)
    assert (found.num_bad, found.refused_keys, found.unknown_keys) == (2, {"fps": 2}, {"reviewer": 1})
    (tmp_path / "rows.jsonl").write_text(json.dumps(lines[0]))
    assert find_dataset(tmp_path).refused_keys == {"fps": 1}
