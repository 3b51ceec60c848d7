import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from dflop.data.annotations import BadSample, MediaRef, Turn
from dflop.data.formats.source import open_source
from dflop.data.formats.tar_shard import TarShard
from dflop.data.media_value import EXTENSIONS
from dflop.errors import DataError
from tests.data.containers import ROWS, content_of, jsonl_of, tar_of, write_tar
from tests.data.helpers import chat


def one_row(tmp_path: Path, members: dict[str, bytes]) -> TarShard:
    shard = TarShard(write_tar(tmp_path / "x.tar", list(members.items())))
    assert len(shard) == 1
    return shard


def as_json(row: object) -> bytes:
    return json.dumps(row).encode()


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_a_shard_gives_the_same_samples_as_jsonl(tmp_path, media_root, format):
    plain = open_source(jsonl_of(ROWS, tmp_path / "a.jsonl"))
    shard = open_source(tar_of(ROWS, media_root, tmp_path / "a.tar", format=format))
    assert len(shard) == len(plain)
    for index in (3, 0, 4, 1, 2):
        assert content_of(shard, tmp_path / "nowhere", index) == content_of(plain, media_root, index)
    names = [ref.path for index in range(len(shard)) for ref in shard.sample(index).media]
    assert names[:3] == ["a.tar/0.0.png", "a.tar/1.0.mp4", "a.tar/1.0.png"]
    assert len(set(names)) == len(names)


def test_members_of_a_row_need_not_be_neighbours_and_keep_the_order_of_the_tar(tmp_path):
    members = [("s/b.jpg", b"B"), ("s/a.jpg", b"A"), ("./s/b.txt", b"bee"), ("s/a.txt", b"ay"), ("t/a.txt", b"tea")]
    shard = TarShard(write_tar(tmp_path / "x.tar", members))
    assert [shard.sample(i).sample_id for i in range(len(shard))] == ["s/b", "s/a", "t/a"]
    assert [shard.sample(i).turns[-1].text for i in range(3)] == ["bee", "ay", "tea"]


def test_a_caption_is_what_the_assistant_says_about_the_media(tmp_path):
    sample = one_row(tmp_path, {"k.jpg": b"x", "k.txt": "é".encode()}).sample(0)
    assert sample.turns == (Turn("user", "<image>"), Turn("assistant", "é"))
    assert sample.media == (MediaRef("image", "x.tar/k.jpg"),)
    assert one_row(tmp_path, {"k.txt": b"alone"}).sample(0).turns == (Turn("text", "alone"),)


@pytest.mark.parametrize(
    "members", [{"k.txt": b"cap", "k.json": b'{"url": "u"}'}, {"k.json": b'{"caption": "cap", "image": "http://u"}'}]
)
def test_metadata_of_a_crawl_is_not_a_conversation(tmp_path, members):
    sample = one_row(tmp_path, {"k.jpg": b"x", **members}).sample(0)
    assert [t.text for t in sample.turns] == ["<image>", "cap"]


@pytest.mark.parametrize(
    ("named", "order"),
    [
        (["b.png", "a.jpg"], "BA"), (["s/k.b.png", "s/k.a.jpg"], "BA"), (["k.b.png"], "B"),
        (["images/1.jpg", "images/2.jpg"], "AB"), (None, "AB"),
    ],
)  # fmt: skip
def test_files_a_row_names_are_found_among_its_members(tmp_path, named, order):
    row = chat("x", "y", images=named)
    shard = one_row(tmp_path, {"s/k.a.jpg": b"A", "s/k.json": as_json(row), "s/k.b.png": b"B"})
    assert "".join(c.decode() for _, c in content_of(shard, tmp_path, 0)[3]) == order


def test_files_a_row_names_are_beside_the_shard_if_it_holds_none(tmp_path, media_root):
    shard = one_row(tmp_path, {"k.json": as_json(chat("x", "y", image="cat.png"))})
    assert content_of(shard, media_root, 0)[3] == [("image", (media_root / "cat.png").read_bytes())]


@pytest.mark.parametrize(
    "turns",
    [
        [{"from": "human", "value": "<image>\nx"}, {"from": "gpt", "value": "y"}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        [{"user": "x", "assistant": "y"}],
    ],
)
def test_a_json_member_may_be_the_list_of_turns_itself(tmp_path, turns):
    shard = one_row(tmp_path, {"k.jpg": b"A", "k.json": as_json(turns), "k.txt": b"not this"})
    index, key, said, media = content_of(shard, tmp_path, 0)
    assert (index, key, media) == (0, "k", [("image", b"A")])
    assert [(turn.role, turn.text) for turn in said] == [("user", "<image>\nx"), ("assistant", "y")]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"k.jpg": b"x"}, "neither a conversation"),
        ({"k.json": b"{", "k.jpg": b"x"}, "member k.json is not JSON"),
        ({"k.json": b"[]"}, "not a JSON object but a list"),
        ({"k.txt": b"\xff"}, "caption is not UTF-8"),
        ({"k.opusx": b"x", "k.txt": b"cap"}, r"member k\.opusx has an unknown extension"),
        ({"k.jpg": b"x", "k.txt": b"cap", "k.depth.npy": b"x"}, r"`depth\.npy`"),
        ({"k.jpg": b"x", "k.json": as_json(chat("x", "y")), "k.pdf": b"x"}, r"member k\.pdf"),
        ({"k.jpg": b"x", "k.txt": b"cap", "k": b"x"}, "member k has an unknown extension"),
        ({"k.jpg": b"x", "k.txt": b"cap", "k.seg.json": b"{}"}, r"member k\.seg\.json"),
        ({"k.json": as_json({"text": "x", "rejected": "y"}), "k.jpg": b"x"}, "`rejected`"),
        ({"k.jpg": b"x", "k.json": as_json(chat("x", "y", image=["1.jpg", "2.jpg"]))}, "names 2 image files, its 1"),
        (
            {"k.a.jpg": b"x", "k.b.jpg": b"y", "k.json": as_json(chat("x", "y", image=["a.jpg", "z.jpg"]))},
            "its 2 members match 1",
        ),
        ({"k.jpg": b"x", "k.json": as_json(chat("x", "y", video="v.mp4"))}, "names other files"),
    ],
)
def test_bad_rows_say_why(tmp_path, members, reason):
    with pytest.raises(BadSample, match=reason):
        one_row(tmp_path, members).sample(0)


@pytest.mark.parametrize(("kind", "extension"), [(k, e) for k, of_kind in EXTENSIONS.items() for e in of_kind])
def test_members_of_every_known_extension_are_media(tmp_path, kind, extension):
    sample = one_row(tmp_path, {f"k.{extension}": b"x", "k.txt": b"\xef\xbb\xbfsee <image>", "k.cls": b"3"}).sample(0)
    assert sample.media == (MediaRef(kind, f"x.tar/k.{extension}"),)
    assert sample.turns[1].text == "see <image>"


def test_members_that_may_be_ignored_are_named_by_their_extension(tmp_path):
    path = write_tar(tmp_path / "x.tar", [("k.jpg", b"x"), ("k.txt", b"cap"), ("k.depth.npy", b"x")])
    for name in ("npy", "depth.npy"):
        assert len(TarShard(path, (name,)).sample(0).media) == 1


def test_members_that_are_no_plain_files(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("README", "._k.jpg", "folder.d"):
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name == "folder.d" else tarfile.REGTYPE
            tar.addfile(info)
        link = tarfile.TarInfo("k.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        caption = tarfile.TarInfo("k.txt")
        caption.size = 3
        tar.addfile(caption, io.BytesIO(b"cap"))
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("l.txt"))
    shard = TarShard(tmp_path / "x.tar")
    assert len(shard) == 2
    with pytest.raises(BadSample, match="not a plain file in the shard"):
        shard.open_media(0, shard.sample(0).media[0], tmp_path)
    with pytest.raises(BadSample, match=r"occurs twice: l\.txt"):
        shard.sample(1)
    for path, reason in {"x.tar/../y": "no such member", "../y": "leaves the media root"}.items():
        with pytest.raises(BadSample, match=reason):
            shard.open_media(0, MediaRef("image", path), tmp_path)


def test_a_shard_cut_off_or_damaged_is_refused_and_never_shorter(tmp_path, media_root):
    whole = tar_of(ROWS, media_root, tmp_path / "a.tar").read_bytes()
    opened = TarShard(tmp_path / "a.tar")
    end = len(whole.rstrip(b"\0"))
    cut = tmp_path / "cut.tar"
    for size in [0, 1, 511, 512, 513, *range(600, end, end // 40), end]:
        cut.write_bytes(whole[:size])
        with pytest.raises(DataError, match="shard cannot be read"):
            TarShard(cut)
    for offset in range(0, len(whole) - 10240, 512):
        if whole[offset + 257 : offset + 262] == b"ustar":
            cut.write_bytes(whole[:offset] + b"\xff" * 300 + whole[offset + 300 :])
            with pytest.raises(DataError, match="shard cannot be read"):
                TarShard(cut)
    cut.write_bytes(whole[: end // 2])  # cut off after it was opened
    opened.path = cut
    with pytest.raises(BadSample, match="cut off"):
        opened.sample(len(opened) - 1)


def test_opening_reads_headers_and_holds_little(tmp_path):
    rows = [(f"{i:06d}.{end}", b"x" * 20_000) for i in range(1000) for end in ("jpg", "txt")]  # 40 MB
    path = write_tar(tmp_path / "a.tar", rows)
    tracemalloc.start()
    shard = TarShard(path)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(shard) == 1000
    assert held < 300_000
    assert peak < 10_000_000


def test_fingerprint_changes_with_the_file(tmp_path):
    shard = one_row(tmp_path, {"k.txt": b"a"})
    before = shard.fingerprint()
    assert shard.fingerprint() == before
    write_tar(tmp_path / "x.tar", [("k.txt", b"b")])
    assert shard.fingerprint() != before


@pytest.mark.parametrize("names", [
    [f"k.{n}.jpg" for n in range(12)], [f"k.page{n}.jpg" for n in range(12)], [f"k.v2_{n}.jpg" for n in range(8, 12)],
    ["k.jpg", *(f"k.{n}.jpg" for n in range(1, 12))], [f"k.{a}.{b}.jpg" for a in (9, 10) for b in (2, 11)],
])  # fmt: skip
def test_members_that_differ_in_a_number_are_in_its_order(tmp_path, names):
    sample = one_row(tmp_path, {**{name: b"x" for name in sorted(names)}, "k.txt": b"y"}).sample(0)
    assert [ref.path.partition("/")[2] for ref in sample.media] == names


def test_members_that_differ_in_words_stay_in_order_of_the_tar(tmp_path):
    sample = one_row(tmp_path, {"k.right.jpg": b"x", "k.left.jpg": b"x", "k.txt": b"y"}).sample(0)
    assert [ref.path.rpartition("/")[2] for ref in sample.media] == ["k.right.jpg", "k.left.jpg"]
