"""What a path holds, by layout: rows per split, taken and left, and what is refused."""

import json
from pathlib import Path

import pytest

from dflop.data.card import DatasetCard, entries_of, layout_of, read_card
from dflop.data.mixture import Dataset
from dflop.errors import ConfigError
from tests.data.containers import jsonl_of
from tests.data.helpers import chat
from tests.data.layouts import PICTURE, pictures, rows, save_to_disk, shards, write_json


def counts(card: DatasetCard) -> tuple[dict[str, int], dict[str, int]]:
    """Rows by split: taken and left."""
    taken, left = ({of.split: 0 for of in parts} for parts in (card.taken, card.left))
    for found, parts in ((taken, card.taken), (left, card.left)):
        for of in parts:
            found[of.split] += of.num_rows or 0
    return taken, left


def dataset(card: DatasetCard, root: Path | None = None) -> Dataset:
    """The rows that a run with this card's configuration reads."""
    path = Path(card.annotations)
    return Dataset.open(entries_of(path, root or path.parent, card.written_split))


@pytest.mark.parametrize(
    ("files", "taken", "left"),
    [
        ({"train.json": 3, "test.json": 8}, {"train": 3}, {"test": 8}),
        ({"dev.jsonl": 9, "a_training-set.json": 2, "evaluation.json": 1}, {"train": 2}, {"validation": 9, "test": 1}),
        ({"train/a.jsonl": 2, "valid/a.jsonl": 3, "testing/a.jsonl": 4}, {"train": 2}, {"validation": 3, "test": 4}),
        ({"train.jsonl": 2, "other.jsonl": 9}, {"train": 2}, {"": 9}),
        ({"rows.jsonl": 2, "captions_val2014.json": 9}, {"": 2}, {"validation": 9}),
        ({"qa.json": 2, "qa_testmini.json": 5, "held_out.json": 6}, {"": 2}, {"test": 11}),
        ({f"part-0000{n}.jsonl": 5 for n in range(4)}, {"": 20}, {}),
        ({f"{n}/shard{n}.jsonl.gz": 5 for n in range(3)}, {"": 15}, {}),
        ({f"train-0000{n}-of-00002.jsonl.zst": 2 for n in range(2)} | {"val-00000-of-00001.jsonl.zst": 1},
         {"train": 4}, {"validation": 1}),
        ({f"data/{s}-00000-of-00001.parquet": n for s, n in (("train", 3), ("testmini", 2), ("extra", 1))},
         {"train": 3}, {"testmini": 2, "extra": 1}),
        ({"contest.jsonl": 2, "interval/development.jsonl": 0}, {"": 2}, {"": 0}),
        ({"training/retest.jsonl": 2, "latest/devices.jsonl": 3}, {"train": 2}, {"": 3}),
    ],
)  # fmt: skip
def test_names_say_which_files_are_for_training(tmp_path, files, taken, left):
    for name, num_rows in files.items():
        rows(tmp_path / name, num_rows)
    card = read_card(tmp_path)
    assert counts(card) == (taken, left)
    assert len(dataset(card)) == card.num_rows == sum(taken.values())


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({"a.jsonl": 2, "b.jsonl": 3}, "--data {}/a.jsonl; or --data {}/b.jsonl"),
        ({"train.json": 2, "train.csv": 2}, "--data {}/train.csv; or --data {}/train.json"),
        ({"llava_v1.jsonl": 2, "llava_v2.jsonl": 3}, "llava_v2.jsonl"),
        ({"mix_150k.json": 2, "mix_665k.json": 3}, "mix_665k.json"),
        ({"stage1.json": 2, "stage2.json": 3}, "stage2.json"),
        ({"a-00000-of-00001.parquet": 2, "a-00000-of-00002.parquet": 1, "a-00001-of-00002.parquet": 1}, "of-00001"),
        ({"en/train.jsonl": 2, "de/train.jsonl": 3}, "--data {}/de/train.jsonl"),
        ({"val.jsonl": 2}, "--split validation"),
        ({"dev/a.jsonl": 2, "test/a.jsonl": 2}, "--split validation; or --split test"),
        ({"train_test.jsonl": 2}, "--split test"),
        ({"train/test.jsonl": 2}, "--split test"),
        ({"data/train_sft-00000-of-00001.parquet": 2, "data/train_gen-00000-of-00001.parquet": 2}, "--split train_sft"),
    ],
)
def test_where_two_answers_are_possible_both_are_listed(tmp_path, files, hint):
    for name, num_rows in files.items():
        rows(tmp_path / name, num_rows)
    with pytest.raises(ConfigError) as caught:
        read_card(tmp_path)
    assert caught.value.exit_code == 2
    assert hint.replace("{}", str(tmp_path)) in caught.value.hint
    wanted = [word.split()[1] for word in caught.value.hint.split("; ") if word.startswith("--split ")]
    for split in wanted:  # what the hint says can be passed
        assert read_card(tmp_path, split).num_rows == 2


def test_files_that_a_person_names_are_taken_whatever_their_split(tmp_path):
    rows(tmp_path / "test.jsonl", 2)
    rows(tmp_path / "val.jsonl", 3)
    assert read_card(tmp_path / "test.jsonl").num_rows == 2
    assert read_card(tmp_path / "*.jsonl").num_rows == 5
    assert read_card(tmp_path, "test").num_rows == 2
    assert read_card(tmp_path, "test,validation").num_rows == 5


def test_shards_that_are_not_there_are_told_and_many_are_counted_by_their_sizes(tmp_path):
    for number in range(40):
        rows(tmp_path / f"train-{number:05}-of-00041.jsonl", 3)
    card = read_card(tmp_path)
    first, *notes = card.lines()
    assert "about 120 rows" in first
    assert notes == ["40 of 41 shards are there: train-00000-of-00041.jsonl"]


def test_a_json_of_splits_is_read_by_split(tmp_path):
    content = {"train": [chat("a", "b"), chat("c", "d")], "test": [chat("e", "f")], "info": {"version": 1}}
    for path in (write_json(tmp_path / "one" / "rows.json", content), tmp_path / "one"):
        card = read_card(path)
        assert counts(card) == ({"train": 2}, {"test": 1})
        assert len(dataset(card)) == 2
        assert dataset(read_card(path, "test")).sample(0).turns[0].text == "e"
    names = write_json(tmp_path / "two.json", {"dev": [chat("a", "b")], "test": [chat("c", "d")]})
    with pytest.raises(ConfigError, match=r"two\.json: dev \(1 rows\), two\.json: test"):
        read_card(names)


def test_energon_gives_the_split_of_its_index(tmp_path):
    shards(tmp_path, 3)
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    (meta / "split.yaml").write_text(
        "split_parts:\n  train: ['s-{0..1}.tar']\n  val: [s-2.tar]\n  test: []\nexclude: []"
    )
    assert counts(read_card(tmp_path)) == ({"train": 4}, {"val": 2})
    assert len(dataset(read_card(tmp_path))) == 4
    assert len(dataset(read_card(tmp_path, "validation"))) == 2
    (meta / ".info.yaml").write_text("shard_counts:\n  s-0.tar: 7\n  s-1.tar: 8\n  s-2.tar: 9\n")
    assert counts(read_card(tmp_path)) == ({"train": 15}, {"val": 9}), "rows as the index states them"
    (meta / "split.yaml").write_text("split_parts:\n  train: [s-0.tar, s-1.tar]\nexclude: [s-1.tar]\n")
    assert [p.name for p in entries_of(tmp_path, tmp_path)[0].paths] == ["s-0.tar"]
    for text, reason in (
        ("split_parts:\n  train: [s-0.tar]\nexclude: [s-0.tar/k0]\n", "excludes single samples"),
        ("split_parts:\n  train: [s-9.tar]\n", "no file .*s-9.tar"),
        ("split_parts:\n  val: [s-0.tar]\n", "no split `train`"),
        ("exclude: []\n", "damaged: KeyError"),
    ):
        (meta / "split.yaml").write_text(text)
        with pytest.raises(ConfigError, match=reason):
            read_card(tmp_path)
    (meta / "split.yaml").unlink()
    with pytest.raises(ConfigError, match=r"Energon folder without \.nv-meta/split\.yaml"):
        read_card(tmp_path)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "file"])
def test_a_saved_dataset_is_its_arrow_files(tmp_path, stream):
    save_to_disk(tmp_path, {"train": 4, "test": 2}, stream=stream)
    card = read_card(tmp_path)
    assert counts(card) == ({"train": 4}, {"test": 2})
    assert card.taken[0].columns == ("images", "messages")
    read = dataset(card)
    (ref,) = read.sample(3).media
    with read.open_media(3, ref) as file:  # type: ignore[union-attr]  # it is no path
        assert file.read() == PICTURE
    assert counts(read_card(tmp_path / "train")) == ({"train": 4}, {})
    with pytest.raises(ConfigError, match="no split `train`"):
        read_card(tmp_path / "test")
    state = json.loads((tmp_path / "train" / "state.json").read_text())
    write_json(tmp_path / "train" / "state.json", {**state, "_indices_data_files": [{"filename": "i.arrow"}]})
    for read in (read_card, lambda path: entries_of(path, path)):
        with pytest.raises(ConfigError, match=r"no split `train`.*\(a selection of its rows"):
            read(tmp_path)


@pytest.mark.parametrize("packed", ["raw_data", "zip_data"])
def test_mosaics_shards_are_counted_and_refused_by_name(tmp_path, packed):
    for split, number in (("train", 5), ("val", 2)):
        shard = {"format": "mds", "samples": number, "column_names": ["x"], "raw_data": {"basename": "shard.00000.mds"}}
        shard["zip_data"] = {"basename": "shard.00000.mds.zstd"} if packed == "zip_data" else None
        write_json(tmp_path / split / "index.json", {"version": 2, "shards": [shard]})
        (tmp_path / split / shard[packed]["basename"]).write_bytes(b"\0")
    for read in (read_card, lambda path: entries_of(path, path)):
        with pytest.raises(ConfigError, match=r"this is an MDS folder.*as Parquet"):
            read(tmp_path)
    assert {part.split: part.num_rows for part in layout_of(tmp_path).parts} == {"train": 5, "val": 2}


def test_metadata_names_the_files_of_a_media_folder(tmp_path):
    pictures(tmp_path, "train/a.jpg", "train/b.jpg", "val/c.jpg")
    (tmp_path / "train" / "metadata.csv").write_text('file_name,text\na.jpg,"A red, wide\nsquare."\nb.jpg,Green.\n')
    jsonl_of([{"file_name": "c.jpg", "text": "Blue."}], tmp_path / "val" / "metadata.jsonl")
    card = read_card(tmp_path)
    assert counts(card) == ({"train": 2}, {"validation": 1})
    first = dataset(card).sample(0)
    assert [ref.path for ref in first.media] == ["a.jpg"]
    assert [turn.text for turn in first.turns] == ["<image>", "A red, wide\nsquare."]


def test_tables_of_speech_name_their_clips(tmp_path):
    head = "client_id\tpath\tsentence\tup_votes\n"
    for name, number in (("train", 2), ("dev", 1), ("test", 1)):
        lines = [f'x\tcommon_{name}_{n}.mp3\t"Yes, he said\t2\n' for n in range(number)]
        (tmp_path / f"{name}.tsv").write_text(head + "".join(lines))
    card = read_card(tmp_path)
    assert counts(card) == ({"train": 2}, {"validation": 1, "test": 1})
    assert dataset(card).sample(1).turns[1].text == '"Yes, he said'
    (tmp_path / "sounds").mkdir()
    (tmp_path / "sounds" / "train.csv").write_text("audiocap_id,youtube_id,start_time,caption\n1,abc,30,A dog barks\n")
    with pytest.raises(ConfigError, match=r"train\.csv: .*no media.*audiocap_id, youtube_id, start_time"):
        read_card(tmp_path / "sounds")


def test_folders_by_class_are_named(tmp_path):
    pictures(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", "test/cat/2.jpg")
    with pytest.raises(ConfigError, match=r"2 media files in folders cat, dog and no text about them.*metadata\.csv"):
        read_card(tmp_path)


def test_llama_factorys_columns_and_tags_are_followed(tmp_path):
    shop = [
        {"dialog": [{"who": "customer", "says": "<image>Colour?"}, {"who": "clerk", "says": "Red."}], "pics": ["a.jpg"]}
    ]
    write_json(tmp_path / "shop.json", shop * 3)
    write_json(tmp_path / "alpaca.json", [{"ask": "Q", "more": "I", "say": "A", "noise": 1}])
    write_json(tmp_path / "holdout.json", shop)
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "customer", "assistant_tag": "clerk"}
    sharegpt = {"formatting": "sharegpt", "columns": {"messages": "dialog", "images": "pics"}, "tags": tags}
    write_json(tmp_path / "dataset_info.json", {
        "shop": {"file_name": "shop.json", **sharegpt},
        "plain": {"file_name": "alpaca.json", "columns": {"prompt": "ask", "query": "more", "response": "say"}},
        "shop_eval": {"file_name": "holdout.json", **sharegpt},
        "pairs": {"file_name": "alpaca.json", "ranking": True},
        "far": {"hf_hub_url": "someone/far"}, "gone": {"file_name": "gone.json"},
    })  # fmt: skip
    card = read_card(tmp_path)
    assert [of.name for of in card.taken] == ["shop", "plain"]
    assert {of.name: of.problem for of in card.left} == {
        "shop_eval": "", "pairs": "preference data", "far": "is elsewhere, hf_hub_url someone/far",
        "gone": f"no file `{tmp_path / 'gone.json'}`",
    }  # fmt: skip
    read = dataset(card)
    assert [[(t.role, t.text) for t in read.sample(n).turns] for n in (2, 3)] == [
        [("user", "<image>Colour?"), ("assistant", "Red.")], [("user", "Q\nI"), ("assistant", "A")],
    ]  # fmt: skip
    assert [ref.path for ref in read.sample(0).media] == ["a.jpg"]
    assert [of.name for of in read_card(tmp_path, "plain,shop_eval").taken] == ["plain", "shop_eval"]
    assert len(dataset(read_card(tmp_path, "plain"))) == 1


def test_internvls_meta_file_gives_roots_and_repeats(tmp_path):
    pictures(tmp_path, "x/a.jpg")
    for name in "ab":
        jsonl_of(
            [chat("<image>\nq", "a", id=f"{name}{n}", image="a.jpg") for n in range(4)], tmp_path / f"{name}.jsonl"
        )
    meta = {
        "a": {"root": str(tmp_path / "x"), "annotation": str(tmp_path / "a.jsonl"), "repeat_time": 2, "length": 4},
        "b": {"root": "x", "annotation": "b.jsonl", "repeat_time": 0.5, "data_augment": True},
    }
    write_json(tmp_path / "meta.json", meta)
    card = read_card(tmp_path)
    assert (card.annotations, card.num_rows) == (str(tmp_path / "meta.json"), 10)
    assert [line for line in card.lines() if line.startswith("b:")] == [
        "b: repeat_time 0.5 takes that share of the rows, the first ones", "b: `data_augment` is not followed"
    ]  # fmt: skip
    read = dataset(card, tmp_path)
    assert [read.sample(n).sample_id for n in range(10)] == [f"a{n}" for n in (0, 1, 2, 3) * 2] + ["b0", "b1"]
    assert read.open_media(9, read.sample(9).media[0]) == tmp_path / "x" / "a.jpg"
    for times in (1.5, 0, -1, "2", True, float("inf"), float("nan")):
        meta["b"]["repeat_time"] = times
        write_json(tmp_path / "meta.json", meta)
        with pytest.raises(ConfigError, match=f"`b` has repeat_time {times!r}"):
            read_card(tmp_path / "meta.json")
    meta["b"]["repeat_time"] = 1e-12
    write_json(tmp_path / "meta.json", meta)
    assert read_card(tmp_path / "meta.json").num_rows == 9, "no share is rounded to nothing"


def test_a_mixture_may_name_folders_with_a_split(tmp_path):
    save_to_disk(tmp_path / "saved", {"train": 4, "test": 2})
    (tmp_path / "mix.yaml").write_text("datasets:\n  - {path: saved}\n  - {path: saved, split: test}\n")
    assert read_card(tmp_path / "mix.yaml").num_rows == 6


@pytest.mark.parametrize(
    ("entry", "reason"),
    [({"train": {"annotation": 3}}, "damaged"), ({"train": {"annotation": "none.jsonl"}}, "no file")],
)
def test_a_damaged_index_says_so(tmp_path, entry, reason):
    write_json(tmp_path / "meta.json", entry)
    with pytest.raises(ConfigError, match=reason):
        read_card(tmp_path)


def test_what_is_read_in_another_way_is_another_dataset(tmp_path):
    """A profile is found by the fingerprint: other columns of the same file are other samples."""
    write_json(tmp_path / "rows.json", [{"a": "Q", "b": "A", "c": "B"}])
    found = set()
    for answer in "bc":
        columns = {"prompt": "a", "response": answer}
        write_json(tmp_path / "dataset_info.json", {"x": {"file_name": "rows.json", "columns": columns}})
        found.add(dataset(read_card(tmp_path)).fingerprint())
    assert len(found) == 2
