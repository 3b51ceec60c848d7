"""What a container holds, counted packet by packet, for where its header is known to lie or only guesses.

Headers count what is stored, not what is shown: an edit list hides frames, a clip cut in the middle of a group of
pictures begins with frames nothing can decode, files written in fragments state the first one only. ADTS and MP3 state
no length; FFmpeg guesses one from the first bit rate, which is wrong by any factor where the bit rate varies. Counting
demuxes the whole file, 1-5 us a packet, and decodes nothing but the first frame of a clip that does not begin with one
that stands alone. Where the header is right, nothing of this runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice
from typing import Any, BinaryIO

import av
import av.error
from av.container import InputContainer
from av.packet import Packet

_STATE_LENGTHS = ("mov", "wav", "w64", "flac", "ogg", "aiff", "au")
"""Demuxers that read an audio stream's length rather than guess it or take it from another stream."""
_BACK_S = 0.1
"""Decoding times that fall by more begin another file: transport streams and such may be joined end to end."""
_SKIPPED = slice(0, 4), slice(4, 8)
"""Of the side data `skip_samples`: samples to drop at the start and at the end of a packet, little-endian."""
_ID3_BYTES, _ID3V1_BYTES = 10, 128
_MAX_TAGS = 100
"""One after the other; a file of nothing else would be looked through for minutes."""
_INVALID_DATA = 1094995529
"""FFmpeg's number for a broken file."""
_MP3_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a stream a decoder gives."""

    num_frames: int
    duration_s: float


def count_video(container: InputContainer, stream: av.VideoStream) -> Extent | None:
    """Frames that decoding gives, and how long they are shown; None where both are as the header says.

    Raises:
        FFmpegError: the file is broken.
    """
    packets = (packet for packet in container.demux(stream) if packet.size)
    start = list(islice(packets, 2))
    needs_earlier = bool(start) and (not start[0].is_keyframe or _leads(start))
    if not needs_earlier and _index_agrees(stream):
        return None
    rest, shown_from = chain(start, packets), None
    if needs_earlier:
        shown_from, read = _first_shown(stream, rest)
        rest = chain(read, rest)
        if shown_from is None:
            return Extent(0, 0.0)
    span = _Span(float(stream.time_base or 0))
    for packet in rest:
        is_shown = shown_from is None or packet.pts is None or packet.pts >= shown_from
        if is_shown and not packet.is_discard:
            span.add(packet)
    return Extent(span.num_packets, span.total_s())


def _index_agrees(stream: av.VideoStream) -> bool:
    """Whether the index, which knows edit lists and fragments, has the frames that the header states."""
    index = stream.index_entries
    if stream.frames <= 0 or len(index) != stream.frames:
        return False
    return all(entry.size > 0 and not entry.is_discard for entry in index)


def states_audio_length(container: InputContainer, stream: av.AudioStream, source_start: bytes, num_bytes: int) -> bool:
    """Whether an audio stream's length is stated for what is there.

    Args:
        container: The file.
        stream: Of it.
        source_start: First bytes of an MP3 after its tag, for the count of bytes that encoders leave there.
        num_bytes: From there to its end.
    """
    if not stream.duration:
        return False
    name = container.format.name.split(",")[0]
    if name == "mp3":
        stated = _mp3_bytes(source_start)
        return stated is not None and abs(num_bytes - stated) <= _ID3V1_BYTES
    return name in _STATE_LENGTHS


def count_audio(container: InputContainer, stream: av.AudioStream) -> float:
    """Seconds of sound that decoding gives, without what its codec says to skip at either end.

    Raises:
        FFmpegError: the file is broken.
    """
    time_base, rate = stream.time_base or Fraction(0), stream.rate or 1
    span, total, usual, skipped_s, num_unknown = _Span(float(time_base)), 0, 0, 0.0, 0
    for packet in audio_packets(container, stream):
        if not packet.size or packet.is_discard:
            continue
        span.add(packet)
        ticks = packet.duration or 0
        usual = max(usual, ticks)
        num_unknown += not ticks
        total += ticks
        skips = packet.get_sidedata("skip_samples") if packet.has_sidedata("skip_samples") else None
        if skips is not None:
            at_start, at_end = (int.from_bytes(bytes(skips)[part], "little") / rate for part in _SKIPPED)
            # Some demuxers shorten the last packet by what is to be dropped of it, others do not.
            skipped_s += at_start + max(0.0, at_end - float((usual - ticks) * time_base))
    total_s = float((total + num_unknown * usual) * time_base)
    # Durations in whole milliseconds, as Matroska and FLV have them, add up to some per cent too little.
    is_rounding = abs(span.total_s() - total_s) <= span.num_packets * time_base
    return (span.total_s() if is_rounding else total_s) - skipped_s


def audio_packets(container: InputContainer, stream: av.AudioStream) -> Iterator[Packet[av.AudioStream]]:
    """Packets of an audio stream, the last one empty, without the tags that stand between joined MP3 files.

    Raises:
        FFmpegError: the file is broken, or an MP3 in which something else stands between the frames.
    """
    is_mp3, tag_end = container.format.name == "mp3", 0
    for packet in container.demux(stream):
        if is_mp3 and packet.size and packet.pos is not None:
            content, num_cut = bytes(packet), max(0, tag_end - packet.pos)
            sound = content[num_cut:].lstrip(b"\0")
            for _ in range(_MAX_TAGS):
                size = _tag_bytes(sound)
                if not size:
                    break
                num_cut = len(content) - len(sound) + size
                sound = content[num_cut:].lstrip(b"\0")
            tag_end = max(tag_end, packet.pos + num_cut)
            if not sound:
                continue
            if sound[:1] != b"\xff":
                # A tag can hold what looks like a frame, and the real one after it is then cut in two.
                raise av.error.InvalidDataError(_INVALID_DATA, "MP3 with bytes that are neither audio nor a tag")
            if len(sound) < len(content):
                rest: Packet[Any] = av.Packet(sound)
                rest.stream, rest.time_base, rest.duration = stream, packet.time_base, packet.duration
                packet = rest
        yield packet


def after_mp3_tag(file: BinaryIO) -> tuple[bytes, int]:
    """Where sound begins in an MP3: the first bytes behind its tags, and how many there are to the end."""
    at = 0
    for _ in range(_MAX_TAGS):
        at += _tag_bytes(_read_at(file, at, _ID3_BYTES))
    return _read_at(file, at, _MP3_HEAD_BYTES), file.seek(0, 2) - at


@dataclass(slots=True)
class _Span:
    """Time that packets of a video cover, in runs of rising decoding times."""

    time_base_s: float
    num_packets: int = 0
    closed_s: float = 0.0
    num_in_run: int = 0
    first: int | None = None
    last: int = 0
    last_duration: int = 0
    dts: int | None = None

    def add(self, packet: Packet[Any]) -> None:
        self.num_packets += 1
        if packet.dts is not None:
            if self.dts is not None and (self.dts - packet.dts) * self.time_base_s > _BACK_S:
                self.closed_s, self.num_in_run, self.first = self.total_s(), 0, None
            self.dts = packet.dts
        time = packet.dts if packet.pts is None else packet.pts
        if time is None:
            return
        self.num_in_run += 1
        if self.first is None or time < self.first:
            self.first = time
        if self.num_in_run == 1 or time >= self.last:
            self.last, self.last_duration = time, packet.duration or 0

    def total_s(self) -> float:
        if self.first is None:
            return self.closed_s
        shown = self.last - self.first
        # Some containers give the last frame no duration: it lasts as long as the others.
        last = self.last_duration or (shown / (self.num_in_run - 1) if self.num_in_run > 1 else 0)
        return self.closed_s + (shown + last) * self.time_base_s


def _leads(start: list[Packet[av.VideoStream]]) -> bool:
    """Whether the second packet is shown before the first: pictures that need what was cut away."""
    times = [packet.pts for packet in start]
    return len(times) == 2 and times[0] is not None and times[1] is not None and times[1] < times[0]


def _first_shown(
    stream: av.VideoStream, packets: Iterator[Packet[av.VideoStream]]
) -> tuple[int | None, list[Packet[av.VideoStream]]]:
    """Time of the first frame that can be decoded, and the packets that were read to find it."""
    read = []
    for packet in packets:
        read.append(packet)
        for frame in packet.decode():
            if frame.pts is not None:
                return frame.pts, read
    held_back = [frame.pts for frame in stream.decode(None) if frame.pts is not None]
    return (held_back[0] if held_back else None), read


def _read_at(file: BinaryIO, offset: int, num_bytes: int) -> bytes:
    file.seek(offset)
    return file.read(num_bytes)


def _tag_bytes(content: bytes) -> int:
    """Length of an ID3 tag that `content` begins with; 0 where it begins with none."""
    if content[:3] == b"TAG":
        return _ID3V1_BYTES
    if content[:3] != b"ID3" or len(content) < _ID3_BYTES:
        return 0
    size = 0
    for byte in content[6:_ID3_BYTES]:
        size = size << 7 | byte & 127
    has_footer = content[5] & 0x10
    return _ID3_BYTES + size + (_ID3_BYTES if has_footer else 0)


def _mp3_bytes(start: bytes) -> int | None:
    """Bytes of sound that the first frame of an MP3 states; None where it states none."""
    at = max(start.find(b"Xing"), start.find(b"Info"))
    has_counts = 0 <= at < 64 and len(start) >= at + 16 and start[at + 7] & 3 == 3
    return int.from_bytes(start[at + 12 : at + 16], "big") if has_counts else None
