"""What a container holds, counted, for where its header is known to lie or only guesses.

Headers count what is stored, not what is shown: an edit list hides frames, files written in fragments state the first
one only. There packets are counted, 1-5 us each. What only a decoder knows is decoded: a clip cut in the middle of a
group of pictures begins with frames that nothing can decode, and ADTS, MP3 and others state no length, FFmpeg guesses
one from the first bit rate, which is wrong by any factor where the bit rate varies. Where the header is right, nothing
of this runs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, BinaryIO

import av
import av.error
import numpy as np
import numpy.typing as npt
from av.container import InputContainer
from av.packet import Packet

_STATE_LENGTHS = ("mov", "wav", "w64", "flac", "ogg", "aiff", "au")
"""Demuxers that read an audio stream's length rather than guess it or take it from another stream."""
_BACK_S = 0.1
"""Decoding times that fall by more begin another file: transport streams and such may be joined end to end."""
_ID3_BYTES, _ID3V1_BYTES = 10, 128
_MAX_TAGS = 100
"""One after the other; a file of nothing else would be looked through for minutes."""
_INVALID_DATA = 1094995529
"""FFmpeg's number for a broken file."""
_MP3_HEAD_BYTES = 512

Times = npt.NDArray[np.float64]
"""`[items, 3]` as `_stated` gives them."""


def count_video(container: InputContainer, stream: av.VideoStream) -> tuple[int, float] | None:
    """Frames that decoding gives, and seconds that they are shown; None where both are as the header says.

    Raises:
        FFmpegError: the file is broken.
    """
    packets = (packet for packet in container.demux(stream) if packet.size)
    start = list(islice(packets, 2))
    shown = [packet.pts for packet in start if packet.pts is not None]
    # A second picture that is shown before the first one needs what was cut away.
    is_whole = not start or (start[0].is_keyframe and shown == sorted(shown))
    if is_whole and _index_agrees(stream):
        return None
    every = chain(start, packets)
    found: Iterable[Any] = (packet for packet in every if not packet.is_discard)
    if not is_whole:
        found = (frame for packet in chain(every, [None]) for frame in stream.decode(packet))
    times = np.fromiter(map(_stated, found), (np.float64, 3))
    return len(times), _covered_s(times, float(stream.time_base or 0))


def _index_agrees(stream: av.VideoStream) -> bool:
    """Whether the index, which knows edit lists and fragments, has the frames that the header states."""
    index = stream.index_entries
    if stream.frames <= 0 or len(index) != stream.frames:
        return False
    return all(entry.size > 0 and not entry.is_discard for entry in index)


def states_audio_length(container: InputContainer, stream: av.AudioStream, file: BinaryIO) -> bool:
    """Whether an audio stream's length is stated for what is there; `file` is the content of its container."""
    name = container.format.name.split(",")[0]
    return bool(stream.duration) and (name in _STATE_LENGTHS or (name == "mp3" and _states_bytes(file)))


def count_audio(container: InputContainer, stream: av.AudioStream) -> float:
    """Seconds of sound that decoding gives: of Matroska by its packets, of others by decoding.

    Raises:
        FFmpegError: the file is broken.
    """
    packets = audio_packets(container, stream)
    if not container.format.name.startswith("matroska"):
        return sum(frame.samples / frame.sample_rate for packet in packets for frame in stream.decode(packet))
    stated = ((*_stated(p), *_skipped(p)) for p in packets if p.size and not p.is_discard)
    table = np.fromiter(stated, (np.float64, 5))
    times, (at_start, at_end), time_base_s = table[:, :3], table[:, 3:].T, float(stream.time_base or 0)
    durations, usual = times[:, 2], times[:, 2].max(initial=0)
    covered_s, total_s = _covered_s(times, time_base_s), np.where(durations, durations, usual).sum() * time_base_s
    # Durations in whole milliseconds add up to some per cent too little; there may be none at all.
    is_rounding = not usual or abs(covered_s - total_s) <= len(times) * time_base_s
    # The last packet may have been shortened by what is to be dropped of it, or not.
    rest_s = np.maximum(0, at_end / (stream.rate or 1) - (usual - durations) * time_base_s)
    return float((covered_s if is_rounding else total_s) - at_start.sum() / (stream.rate or 1) - rest_s.sum())


def audio_packets(container: InputContainer, stream: av.AudioStream) -> Iterator[Packet[av.AudioStream]]:
    """Packets of an audio stream, the last one empty, without the tags that stand between joined MP3 files.

    Raises:
        FFmpegError: the file is broken, or an MP3 in which something else stands between the frames.
    """
    is_mp3, tag_end = container.format.name == "mp3", 0
    for packet in container.demux(stream):
        if is_mp3 and packet.size and packet.pos is not None:
            content = bytes(packet)
            begin = _after_tags(io.BytesIO(content), max(0, tag_end - packet.pos))
            if begin >= len(content):
                tag_end = packet.pos + begin
                continue
            if content[begin] != 0xFF:
                # A tag can hold what looks like a frame, and the real one after it is then cut in two.
                raise av.error.InvalidDataError(_INVALID_DATA, "MP3 with bytes that are neither audio nor a tag")
            if begin:
                rest: Packet[Any] = av.Packet(content[begin:])
                rest.stream, rest.time_base, rest.duration = stream, packet.time_base, packet.duration
                packet = rest
        yield packet


def _states_bytes(file: BinaryIO) -> bool:
    """Whether the first frame of an MP3 states as many bytes as there are."""
    begin = _after_tags(file, 0)
    file.seek(begin)
    start = file.read(_MP3_HEAD_BYTES)
    at = max(start.find(b"Xing"), start.find(b"Info"))
    if not 0 <= at < 64 or len(start) < at + 16 or start[at + 7] & 3 != 3:
        return False
    stated = int.from_bytes(start[at + 12 : at + 16], "big")
    return abs(file.seek(0, 2) - begin - stated) <= _ID3V1_BYTES


def _after_tags(file: BinaryIO, at: int) -> int:
    """Where the tags that begin at a place of an MP3, and the zeros behind them, end."""
    for _ in range(_MAX_TAGS):
        file.seek(at)
        head = file.read(_MP3_HEAD_BYTES)
        num_bytes = len(head) - len(head.lstrip(b"\0"))
        if head[:3] == b"TAG":
            num_bytes = _ID3V1_BYTES
        elif head[:3] == b"ID3" and len(head) >= _ID3_BYTES:
            a, b, c, d = (byte & 127 for byte in head[6:_ID3_BYTES])
            has_footer = bool(head[5] & 0x10)
            num_bytes = (a << 21 | b << 14 | c << 7 | d) + _ID3_BYTES * (1 + has_footer)
        if not num_bytes:
            break
        at += num_bytes
    return at


def _stated(item: Any) -> tuple[float, float, float]:
    """When a packet or frame is shown and decoded, and how long it lasts; NaN where that is not stated."""
    dts = math.nan if item.dts is None else item.dts
    return dts if item.pts is None else item.pts, dts, item.duration or 0


def _skipped(packet: Packet[Any]) -> tuple[int, int]:
    """Samples to drop at the start and at the end of a packet."""
    data = bytes(packet.get_sidedata("skip_samples")) if packet.has_sidedata("skip_samples") else b""
    return int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")


def _covered_s(times: Times, time_base_s: float) -> float:
    """Seconds that packets or frames cover, in runs of rising decoding times."""
    known = np.flatnonzero(~np.isnan(times[:, 1]))
    falls = known[1:][np.diff(times[known, 1]) * time_base_s < -_BACK_S]
    total = 0.0
    for run in np.split(times, falls):
        run = run[~np.isnan(run[:, 0])]
        if len(run):
            last = run[:, 0].argmax()
            covered = run[last, 0] - run[:, 0].min()
            # Some containers give the last frame no duration: it lasts as long as the others.
            total += covered + (run[last, 2] or covered / max(1, len(run) - 1))
    return float(total * time_base_s)
