"""Pixels and samples for training. What cannot be decoded in full raises `BadMedia`; nothing is patched up.

Decoders prefer to give something: a half-grey JPEG, a concealed frame, silence. A model trains on that without a
word, so every sign of damage the decoders do report is an error here, and the sample goes to quarantine.
Decoding is deterministic: same file, same library, same array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from dflop.data.headers import (
    BadMedia,
    MediaSource,
    audio_stream,
    check_depth,
    is_16_bit_grey,
    limit_frames,
    open_container,
    open_image,
    orientation,
    video_stream,
)
from dflop.data.packets import audio_packets
from dflop.data.rotation import OddAngle, Turn, turn_of

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode_image(source: MediaSource) -> npt.NDArray[np.uint8]:
    """RGB pixels of an image (first frame), upright; same size as its header.

    Transparency is laid on white and 16-bit grey scaled to 8 bits; 32-bit integers and floats are as Pillow shows them.

    Returns:
        uint8 of shape (height_px, width_px, 3).

    Raises:
        BadMedia: not an image, too large, truncated or otherwise undecodable.
    """
    with open_image(source) as image:
        turn = _TRANSPOSE.get(orientation(image))
        image.load()
        check_depth(image)
    # Outside `open_image`, which would report an error of ours as one of the file's.
    pixels = _to_rgb(image)
    return np.array(pixels.transpose(turn) if turn is not None else pixels, dtype=np.uint8)


def decode_video(source: MediaSource, frame_indices: Sequence[int]) -> npt.NDArray[np.uint8]:
    """RGB pixels of chosen frames of a video, upright, in the order asked for.

    Args:
        source: Video file.
        frame_indices: Frames in presentation order, from 0; repeats are allowed.

    Returns:
        uint8 of shape (len(frame_indices), height_px, width_px, 3).

    Raises:
        BadMedia: as `decode_frames`.
        ValueError: no frame is asked for, or one before the first.
    """
    frames = dict(decode_frames(source, frame_indices))
    return np.stack([frames[i] for i in frame_indices])


def decode_frames(source: MediaSource, frame_indices: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Chosen frames of a video one by one as they are decoded, so that only one of them need be held.

    Args:
        source: Video file.
        frame_indices: Frames in presentation order, from 0.

    Yields:
        (index, uint8 of shape (height_px, width_px, 3), upright), every index once, in rising order.

    Raises:
        BadMedia: no video stream, a damaged frame before the last one asked for, fewer frames than that, frames of
            different sizes, or a display matrix that is no quarter turn.
        ValueError: no frame is asked for, or one before the first.
    """
    if not frame_indices or min(frame_indices) < 0:
        raise ValueError(f"frame_indices must be non-empty and not negative: {list(frame_indices)[:8]}")
    wanted, last = set(frame_indices), max(frame_indices)
    number, first_size, turn = -1, None, None
    with open_container(source) as container:
        stream = video_stream(container)
        limit_frames(stream)
        # Sequential from the start: seeking by time is inexact for the variable-rate files people have.
        for number, frame in enumerate(container.decode(stream)):
            if frame.is_corrupt:
                raise BadMedia(f"video frame {number} is damaged")
            if number in wanted:
                turn = turn or _turn_of(frame)
                pixels = turn.upright(np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8))
                size = pixels.shape[1], pixels.shape[0]
                first_size = first_size or size
                if size != first_size:
                    sizes = ", ".join(f"{w} x {h} px" for w, h in (first_size, size))
                    raise BadMedia(f"video changes its size: {sizes}")
                yield number, pixels
            if number == last:
                break
    if number < last:
        raise BadMedia(f"video ends after {number + 1} frames, frame {last} was requested")


def _turn_of(frame: av.VideoFrame) -> Turn:
    try:
        return turn_of(frame)
    except OddAngle as error:
        raise BadMedia(str(error)) from error


def decode_audio(
    source: MediaSource, sample_rate_hz: int, *, max_duration_s: float = math.inf
) -> npt.NDArray[np.float32]:
    """Mono samples of an audio file (or of a video's sound track) at the rate asked for.

    Args:
        source: File.
        sample_rate_hz: Of the result.
        max_duration_s: What is longer is refused, before more of it is held: a megabyte can hold days of silence.

    Returns:
        float32 of shape (num_samples,), nominally in -1..1; num_samples is within a resampler's rounding of
        duration_s * sample_rate_hz.

    Raises:
        BadMedia: no audio stream, no samples, too many of them, or a damaged packet.
    """
    num_left = max_duration_s * sample_rate_hz
    resampler = av.AudioResampler(format="flt", layout="mono", rate=sample_rate_hz)
    chunks: list[npt.NDArray[np.float32]] = []
    with open_container(source) as container:
        stream = audio_stream(container)
        for frame in (frame for packet in audio_packets(container, stream) for frame in stream.decode(packet)):
            if frame.is_corrupt:
                raise BadMedia("audio frame is damaged")
            made = [out.to_ndarray()[0] for out in resampler.resample(frame)]
            chunks += made
            num_left -= sum(map(len, made))
            if num_left < 0:
                raise BadMedia(f"audio is longer than {max_duration_s:.1f} s")
        if chunks:
            chunks += [out.to_ndarray()[0] for out in resampler.resample(None)]
    if not sum(len(chunk) for chunk in chunks):
        raise BadMedia("no audio samples")
    return np.concatenate(chunks).astype(np.float32, copy=False)


def _to_rgb(image: Image.Image) -> Image.Image:
    if is_16_bit_grey(image):
        # Pillow clips 16-bit grey to 255 (all white) instead of scaling it.
        grey = np.clip(np.asarray(image, dtype=np.int64) >> 8, 0, 255)
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        opaque = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, opaque).convert("RGB")
    return image.convert("RGB")
