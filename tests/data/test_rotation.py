import io
import struct

import numpy as np
import pytest

from dflop.data.decode import decode_frames, decode_video
from dflop.data.headers import BadMedia, read_header
from dflop.data.rotation import states_a_turn
from tests.data.media_files import cut_clip, write_clip

ONE = 1 << 16
MATRICES = [(a * ONE, b * ONE, c * ONE, d * ONE) for s in (1, -1) for t in (1, -1)
            for a, b, c, d in ((s, 0, 0, t), (0, s, t, 0))]  # fmt: skip


def matrix(a: int, b: int, c: int, d: int) -> tuple[int, ...]:
    return a, b, 0, c, d, 0, 0, 0, 1 << 30


# Matroska states a roll, no mirror.
ROLLS = [m for m in MATRICES if m[0] * m[3] - m[1] * m[2] > 0]


@pytest.mark.parametrize(("abcd", "suffix"), [*((m, ".mp4") for m in MATRICES), *((m, ".mkv") for m in ROLLS)])
def test_frames_are_turned_and_mirrored_as_players_show_them(tmp_path, abcd, suffix):
    a, b, c, d = (value // ONE for value in abcd)
    path = write_clip(tmp_path / f"x{suffix}", 3, matrix=matrix(*abcd))
    header = read_header("video", path)
    assert (header.width_px, header.height_px) == ((64, 48) if a else (48, 64))
    (frame,) = decode_video(path, [0])
    assert frame.shape == (header.height_px, header.width_px, 3)
    # The white quarter lies up and to the left of the middle as it is stored: (x, y) becomes (a x + c y, b x + d y).
    right, down = -a - c > 0, -b - d > 0
    height_px, width_px = header.height_px // 2, header.width_px // 2
    quarters = {
        (is_right, is_down): frame[is_down * height_px :][:height_px, is_right * width_px :][:, :width_px].mean()
        for is_right in (0, 1)
        for is_down in (0, 1)
    }
    assert max(quarters, key=lambda where: quarters[where]) == (right, down)


def test_other_angles_are_refused_and_zeros_or_a_scale_are_none(tmp_path):
    path = write_clip(tmp_path / "x.mp4", 3, matrix=matrix(46340, -46340, 46340, 46340))
    for read in (lambda: read_header("video", path), lambda: decode_video(path, [0])):
        with pytest.raises(BadMedia, match="turns the picture by 45 degrees"):
            read()
    for plain in (matrix(0, 0, 0, 0), matrix(2 * ONE, 0, 0, ONE)):
        assert decode_video(write_clip(tmp_path / "x.mp4", 3, matrix=plain), [0]).shape == (1, 48, 64, 3)


def test_the_turn_of_a_copied_clip_is_kept_and_frames_come_in_rising_order(tmp_path):
    whole = write_clip(tmp_path / "whole.mp4", 20, gop=50, matrix=matrix(0, ONE, -ONE, 0))
    cut = cut_clip(whole, tmp_path / "cut.mp4", hide_s=0.2)
    header = read_header("video", cut)
    frames = list(decode_frames(cut, [9, 2, 2]))
    assert [index for index, _ in frames] == [2, 9]
    assert (header.num_frames, frames[0][1].shape) == (14, (64, 48, 3))
    assert np.array_equal(frames[1][1], decode_video(cut, [9, 2])[0])


def test_a_movie_of_endless_boxes_is_asked_for_a_frame_instead():
    box = struct.pack(">I4s", 8, b"free")
    assert states_a_turn(io.BytesIO(box * 20_000), "mov,mp4,m4a,3gp,3g2,mj2")
    assert not states_a_turn(io.BytesIO(box * 200 + b"\0\0\0\1moov"), "mov,mp4,m4a,3gp,3g2,mj2")
    assert not states_a_turn(io.BytesIO(struct.pack(">I4s", 0, b"moov") * 200), "mov,mp4,m4a,3gp,3g2,mj2")
