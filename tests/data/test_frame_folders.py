"""Videos that lie as pictures: read as a video file of the same frames would be, or a reason that says what lacks."""

import base64
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dflop.data.annotations import BadSample, MediaRef
from dflop.data.decode import decode_image, decode_video
from dflop.data.frame_files import header_of_source
from dflop.data.header_cache import HeaderCache
from dflop.data.headers import BadMedia, read_header
from dflop.data.load_media import load_item
from dflop.data.mixture import Dataset, make_entry
from dflop.models import load_family
from dflop.models.media import MediaHeader
from tests.data.containers import jsonl_of, write_tar
from tests.data.helpers import chat, parse_row

NUM_FRAMES = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`v.avi` without loss at 4 frames per second; its frames as `7.png`, `8.png`, ... `18.png` in `clip`; oddities."""
    root = tmp_path_factory.mktemp("media")
    for name in ("clip", "gap", "two kinds", "none", "with sound", "twice", "sizes"):
        (root / name).mkdir()
    rng = np.random.default_rng(0)
    with av.open(str(root / "v.avi"), "w") as out:
        stream = out.add_stream("ffv1", rate=4)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "bgr0"
        for number in range(NUM_FRAMES):
            pixels = rng.integers(0, 255, (48, 64, 3), np.uint8)
            Image.fromarray(pixels).save(root / "clip" / f"{number + 7}.png")
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        out.mux(stream.encode(None))
    frame = (root / "clip" / "7.png").read_bytes()
    for name in (
        "gap/f1.png", "gap/f2.png", "gap/f4.png", "two kinds/rgb_1.png", "two kinds/depth_1.png", "with sound/1.png",
        "with sound/a.wav", "twice/1.png", "twice/01.png", "a.png", "clip/notes.txt",
    ):  # fmt: skip
        (root / name).write_bytes(frame)
    for number, size in enumerate([(8, 8), (8, 8), (8, 9)]):
        Image.new("RGB", size).save(root / "sizes" / f"{number}.png")
    return root


def in_part(**part: Any) -> dict[str, Any]:
    content = [{"type": "video", **part}, {"type": "text", "text": "what?"}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "noise"}]}


PATHS = [f"clip/{number}.png" for number in range(7, 7 + NUM_FRAMES)]
ROWS = {
    "nested list": chat("<video>what?", "noise", videos=[PATHS], fps=4),
    "list of pictures": chat("<video>what?", "noise", videos=PATHS, sample_fps=4),
    "one rate for each": chat("what?", "noise", video=[PATHS], video_fps=["4"]),
    "part": in_part(video=PATHS, sample_fps="4"),
    "part, objects": in_part(video=[{"path": path} for path in PATHS], fps=4.0, sample_fps=4),
    "part, addresses": in_part(video=[f"file://{path}" for path in PATHS], fps=4),
    "folder": chat("<video>what?", "noise", videos=["clip"], fps=4),
    "folder in a part": in_part(path="clip/", fps=4),
    "folder in a list": chat("what?", "noise", video=[["clip"]], fps=4),
}


def item_of(row: dict[str, Any], root: Path, family: Any, path: Path) -> tuple[MediaHeader, np.ndarray]:
    """Header and encoder input as profile and training see them."""
    dataset = Dataset.open([make_entry(str(path), root, folder=path.parent)])
    (ref,) = dataset.sample(0).media
    h = HeaderCache(dataset).read(0, ref)
    item = h.item(ref.path, family.place(h))
    return h, load_item(dataset.open_media(0, MediaRef("video", item.path)), item, family)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "internvl"])
def test_frames_are_the_video_of_the_same_frames(name, root, tmp_path):
    family = load_family(name, {}, {})
    recording, wanted = item_of(
        {}, root, family, jsonl_of([chat("what?", "noise", video="v.avi")], tmp_path / "v.jsonl")
    )
    for form, row in ROWS.items():
        header, array = item_of(row, root, family, jsonl_of([row], tmp_path / f"{form}.jsonl"))
        assert header == recording == MediaHeader("video", 64, 48, NUM_FRAMES, NUM_FRAMES / 4), form
        assert np.array_equal(array, wanted), form


def test_frames_whose_bytes_stand_in_a_row(root, tmp_path):
    family = load_family("qwen2_vl", {}, {})
    contents = [(root / path).read_bytes() for path in PATHS]
    recording, wanted = item_of({}, root, family, jsonl_of([ROWS["folder"]], tmp_path / "v.jsonl"))
    texts = [f"data:image/png;base64,{base64.b64encode(c).decode()}" for c in contents]
    row = chat("what?", "noise", videos=[texts], fps=4)
    columns = {"conversations": [row["conversations"]], "fps": [4.0],
               "videos": [[[{"bytes": content, "path": None} for content in contents]]]}  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    write_tar(tmp_path / "a.tar", [("k.json", json.dumps(row).encode())])
    for path in (jsonl_of([row], tmp_path / "a.jsonl"), tmp_path / "a.parquet", tmp_path / "a.tar"):
        header, array = item_of(row, root, family, path)
        assert header == recording, path
        assert np.array_equal(array, wanted), path


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (chat("a", "b", videos=[PATHS]), "12 frames of a video but no rate: set `sample_fps`"),
        (in_part(video=PATHS), "12 frames of a video but no rate"),
        (chat("a", "b", videos=["clip"]), "a folder of frames without a rate: set `sample_fps`"),
        (chat("a", "b", videos=["v.avi"], fps=4), "`fps` .* which is not supported"),
        (chat("a", "b", videos=[PATHS, "v.avi"], fps=4), "`fps` .* which is not supported"),
        (chat("a", "b", image=PATHS[:2], fps=4), "`fps` .* which is not supported"),
        (chat("a", "b", videos=[PATHS], fps=4, sample_fps=2), "`sample_fps` and `fps`, which differ"),
        (chat("a", "b", videos=[PATHS], fps=[4, 4]), "2 rates in `fps` for 1 videos"),
        *(
            (chat("a", "b", videos=[PATHS], fps=rate), "frames per second")
            for rate in (0, -1, "x", True, 1e9, "nan", {})
        ),
        (chat("a", "b", videos=[["a.png", None]], fps=1), "frame 1 of `videos` names no file"),
        (chat("a", "b", videos=[["a.png", {"path": "a.png", "start": 2}]], fps=1), "`start`"),
        (chat("a", "b", videos=[["a.png", "gone.png"]], fps=1), "frame 1: file not found"),
        (chat("a", "b", videos=[["a.png", "v.avi"]], fps=1), "frame 1: not an image"),
        (chat("a", "b", videos=[["a.png", "https://x/b.png"]], fps=1), "not from https: URLs"),
        (chat("a", "b", videos=[["a.png", "../b.png"]], fps=1), "leaves the media root"),
        (chat("a", "b", videos=["/etc"], fps=1), "leaves the media root"),
        (chat("a", "b", videos=["gone"], fps=1), "folder of frames cannot be read: No such file"),
        (chat("a", "b", videos=["none"], fps=1), "holds no pictures"),
        (chat("a", "b", videos=["with sound"], fps=1), "also holds a.wav"),
        (chat("a", "b", videos=["two kinds"], fps=1), "more than numbers: depth_#.png, rgb_#.png"),
        (chat("a", "b", videos=["twice"], fps=1), "the same number"),
        (chat("a", "b", videos=["gap"], fps=1), "missing between numbers 2 and 4"),
        (chat("a", "b", videos=["sizes"], fps=1), r"differ in size: 8 x 8 px, 8 x 9 px \(frame 2\)"),
    ],
)
def test_what_is_no_video_of_frames_says_why(row, reason, root, tmp_path):
    dataset = Dataset.open([make_entry(str(jsonl_of([row], tmp_path / "a.jsonl")), root, folder=tmp_path)])
    with pytest.raises((BadSample, BadMedia), match=reason):
        HeaderCache(dataset).read(0, dataset.sample(0).media[0])


def test_frames_are_upright_and_a_changed_one_is_noticed(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    for number in range(3):
        Image.new("RGB", (40, 20)).save(tmp_path / f"{number}.jpg", exif=turned)
    row = chat("a", "b", video=["0.jpg", "1.jpg", "2.jpg"], fps=1)
    dataset = Dataset.open([make_entry(str(jsonl_of([row], tmp_path / "a.jsonl")), tmp_path, folder=tmp_path)])
    (ref,) = dataset.sample(0).media
    assert HeaderCache(dataset).read(0, ref) == MediaHeader("video", 20, 40, 3, 3.0)
    before = dataset.media_fingerprint(0, ref)
    (tmp_path / "1.jpg").write_bytes((tmp_path / "0.jpg").read_bytes() + b"x")
    assert dataset.media_fingerprint(0, ref) != before
    (tmp_path / "1.jpg").unlink()
    assert dataset.media_fingerprint(0, ref) == "absent"


values = st.sampled_from(["clip", "a.png", "v.avi", "", "data:,x", None, [], ["a.png"], [["a.png"]], [None], 3, {}])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["video", "videos"]), st.lists(values, max_size=3) | values, values | st.sampled_from([1, [1]]))
def test_any_list_and_rate_is_a_video_or_a_reason(root, tmp_path, key, value, rate):
    path = jsonl_of([chat("a", "b", **{key: value}, fps=rate), in_part(video=value, fps=rate)], tmp_path / "a.jsonl")
    dataset = Dataset.open([make_entry(str(path), root, folder=tmp_path)])
    for index in range(2):
        with contextlib.suppress(BadSample, BadMedia):
            for ref in dataset.sample(index).media:
                assert header_of_source("video", dataset.open_media(index, ref)).num_frames > 0


def test_a_gif_is_a_video_where_it_stands_as_one_and_its_first_frame_where_it_stands_as_a_picture(tmp_path):
    frames = [Image.new("RGB", (30, 20), (60 * number,) * 3) for number in range(4)]
    path = tmp_path / "a.gif"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=[100, 300, 100, 100], loop=0)
    assert read_header("video", path) == MediaHeader("video", 30, 20, 4, 0.6)
    assert decode_video(path, range(4))[:, 0, 0, 0].tolist() == [0, 60, 120, 180]
    assert read_header("image", path) == MediaHeader("image", 30, 20, 1, 0.0)
    assert decode_image(path).max() == 0
    still = io.BytesIO()
    frames[1].save(still, "GIF")
    assert read_header("video", still).num_frames == 1


def test_a_developer_gives_the_system_prompt():
    said = [("developer", "be brief"), ("user", "hi"), ("assistant", "ok")]
    rows = [{"messages": [{"role": role.replace(*swap), "content": text} for role, text in said]}
            for swap in (("", ""), ("developer", "system"))]  # fmt: skip
    assert parse_row(rows[0], 0).turns == parse_row(rows[1], 0).turns
