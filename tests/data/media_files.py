"""Small videos and sounds of the kinds whose headers do not say what a decoder gives."""

import struct
from pathlib import Path
from typing import Any

import av
import numpy as np

RATE = 30
SAMPLE_RATE_HZ = 16_000


def write_clip(
    path: Path, num_frames: int, *, codec: str = "libx264", gop: int = 8, sound_s: float = 0.0, bframes: int = 2,
    matrix: tuple[int, ...] | None = None, **options: str,
) -> Path:  # fmt: skip
    """A video of 64 x 48 px at `RATE`: brighter frame by frame, its top left quarter white."""
    with av.open(str(path), "w", options=options) as out:
        stream = out.add_stream(codec, rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size, stream.codec_context.max_b_frames = gop, bframes
        if matrix is not None:
            stream.set_display_matrix(matrix)
        sound = out.add_stream("aac", rate=48_000, layout="mono") if sound_s else None
        for i in range(num_frames):
            pixels = np.full((48, 64, 3), 180 * i // num_frames, np.uint8)
            pixels[:24, :32] = 255
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        out.mux(stream.encode(None))
        if sound is not None:
            frame = av.AudioFrame.from_ndarray(np.zeros((1, int(48_000 * sound_s)), np.float32), "fltp", "mono")
            frame.sample_rate = 48_000
            out.mux([*sound.encode(frame), *sound.encode(None)])
    return path


def cut_clip(source: Path, path: Path, *, skip: int = 0, hide_s: float = 0.0) -> Path:
    """Copies packets without encoding: the first `skip` are left out, an edit list hides `hide_s` of the rest."""
    with av.open(str(source)) as given, av.open(str(path), "w") as out:
        stream = given.streams.video[0]
        copied: Any = out.add_stream_from_template(stream)
        for packet in [p for p in given.demux(stream) if p.size][skip:]:
            packet.stream = copied
            packet.pts -= int(hide_s / packet.time_base)
            packet.dts -= int(hide_s / packet.time_base)
            out.mux(packet)
    return path


def write_sound(
    path: Path, duration_s: float, codec: str, *, quiet_s: float = 0.0, quality: int = 0, **options: str
) -> Path:
    """Noise after `quiet_s` of silence, which a codec of variable bit rate hardly spends a bit on."""
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 0.2, int(duration_s * SAMPLE_RATE_HZ)).astype(np.float32)
    samples[: int(quiet_s * SAMPLE_RATE_HZ)] = 0
    with av.open(str(path), "w", options=options) as out:
        stream = out.add_stream(codec, rate=SAMPLE_RATE_HZ, layout="mono")
        if quality:
            stream.options = {"flags": "+qscale", "global_quality": str(quality)}
        resampler = av.AudioResampler(stream.codec_context.format.name, "mono", stream.rate)
        frame = av.AudioFrame.from_ndarray(samples[None], "flt", "mono")
        frame.sample_rate = SAMPLE_RATE_HZ
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            out.mux(stream.encode(part))
        out.mux(stream.encode(None))
    return path


def state_avi_frames(path: Path, num_frames: int) -> None:
    """Lets an AVI's headers state a number of frames."""
    content = bytearray(path.read_bytes())
    for name, offset in ((b"strh", 40), (b"avih", 24)):
        at = content.index(name) + offset
        content[at : at + 4] = struct.pack("<I", num_frames)
    path.write_bytes(content)
