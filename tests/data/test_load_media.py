import gc
import weakref

import av
import numpy as np
import pytest

from dflop.data import load_media
from dflop.data.decode import decode_frames, decode_video
from dflop.data.headers import read_header
from dflop.models import load_family
from tests.data.media_files import write_clip


@pytest.mark.parametrize(("name", "limits"), [("qwen2_5_vl", {"video_min_frames": 40}), ("internvl", {})])
def test_a_video_is_made_small_frame_by_frame_and_equals_all_at_once(tmp_path, monkeypatch, name, limits):
    """Full-size frames alive at once are counted: all of a long video in HD would be gigabytes."""
    path = write_clip(tmp_path / "x.mp4", 40)
    family, header = load_family(name, {}, limits), read_header("video", path)
    item = header.item("x", family.place(header))
    alive: list[int] = []

    def counted(*given):
        arrays = weakref.WeakValueDictionary()
        for number, (index, frame) in enumerate(decode_frames(*given)):
            arrays[index] = frame
            if number % 8 == 7:  # to look through all objects of a large process takes a quarter of a second
                alive.append(len(arrays) + sum(isinstance(thing, av.VideoFrame) for thing in gc.get_objects()))
            yield index, frame

    monkeypatch.setattr(load_media, "decode_frames", counted)
    gc.collect()
    gc.disable()  # what only the collector frees can pile up before it runs
    try:
        array = load_media.load_item(path, item, family)
    finally:
        gc.enable()
    indices = family.frame_indices(40, header.duration_s)
    assert len(alive) == len(set(indices)) // 8 > 3
    assert max(alive) <= 10
    frames = load_media.resize(decode_video(path, indices), *family.frame_sizes_px(item))
    assert np.array_equal(array, family.array_of(item, [frames]))
