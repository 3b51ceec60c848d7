"""A timeline as SVG that a page can zoom, and as JSON of what its script tells about each bar.

Places are percentages of the width, so that text keeps its size however wide the drawing is made; zooming is making it
wider inside a box that scrolls. Names of lanes stand in a drawing of their own, which does not scroll away. Without
scripts everything is there but the zoom and what is told about a bar.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from dataclasses import dataclass

from dflop import units
from dflop.records import MediaItem, SampleShape
from dflop.report.html_page import json_block
from dflop.report.timeline import BACKWARD, FORWARD, UPDATE, Bar, Lane, Timeline, Track

CLASSES = {FORWARD: "f", BACKWARD: "b", UPDATE: "u"}
"""Of bars, in the page's style."""
KINDS = (FORWARD, BACKWARD, UPDATE)
BAR_PX, THIN_PX, LANE_PX, TITLE_PX, AXIS_PX, GAP_PX = 15, 5, 28, 24, 18, 10
CHAR_PX, MAX_NAME_PX = 6.4, 150
SHOWN_PX = 720
"""About how wide a drawing is; decides which microbatches have room for their number before a script has looked."""
LABEL_PX = 9
NUM_TICKS = 6
MAX_ITEMS = 12
"""Samples or media items of a bar that the page knows; more would not be read, and of large batches they fill it."""


@dataclass(frozen=True, slots=True)
class Gantt:
    """What a page needs to show a timeline."""

    names: str
    """`<svg>` with the names of the lanes."""
    drawing: str
    """`<svg>` with everything else."""
    data: str
    """JSON for the page's script."""
    note: str


def draw_gantt(found: Timeline) -> Gantt:
    """Draws a timeline, its tracks below one another on one axis."""
    bars: list[tuple[Lane, Bar]] = []
    names, drawn, top = [], [], 0.0
    for track in found.tracks:
        drawn.append(f'<text class="title" x="0" y="{top + 16:g}">{html.escape(_title(track))}</text>')
        top += TITLE_PX
        drawn += _axis(found.end_s, top, top + LANE_PX * len(track.lanes))
        for lane in track.lanes:
            names.append(f'<text x="0" y="{top + 12:g}">{html.escape(lane.name)}</text>')
            drawn += _lane(lane, top, found.end_s, bars)
            top += LANE_PX
        top += AXIS_PX + GAP_PX
    width = min(MAX_NAME_PX, CHAR_PX * max((len(n.name) for t in found.tracks for n in t.lanes), default=0) + 8)
    label = "Timeline of one global batch, data-blind above balanced: measured, below each bar simulated"
    return Gantt(
        names=f'<svg class="names" width="{width:.0f}" height="{top:g}" aria-hidden="true">{"".join(names)}</svg>',
        drawing=f'<svg class="drawing" height="{top:g}" role="img" aria-label="{label}">{"".join(drawn)}</svg>',
        data=json_block(_data(found, bars)),
        note=_note(found),
    )


def _title(track: Track) -> str:
    parts = [f"{track.policy}: {units.seconds(track.step_s)}", f"{units.percent(track.idle_frac)} idle, measured"]
    if not math.isnan(track.predicted_s):
        parts.append(f"forward + backward {units.seconds(track.predicted_s)} simulated")
    return ", ".join(parts)


def _note(found: Timeline) -> str:
    notes = []
    for track in found.tracks:
        if len(track.lanes) < track.num_ranks:
            notes.append(f"{track.policy}: the first {len(track.lanes)} of {track.num_ranks} processes.")
        if not any(lane.predicted for lane in track.lanes):
            notes.append(f"{track.policy}: no predictions are known.")
    return " ".join(notes)


def _lane(lane: Lane, top: float, end_s: float, bars: list[tuple[Lane, Bar]]) -> Iterator[str]:
    """Bars of a process; `bars` takes them, so that their number in it is their name."""
    place = {(bar.kind, bar.microbatch): len(bars) + i for i, bar in enumerate(lane.bars)}
    for op in lane.predicted:
        kind = FORWARD if op.phase == "F" else BACKWARD
        number = place.get((kind, op.microbatch))
        told = "" if number is None else f' data-bar="{number}"'
        yield _rect(f"p {CLASSES[kind]}", told, op.start_s, op.duration_s, end_s, top + BAR_PX + 1, THIN_PX)
    for bar in lane.bars:
        yield _rect(CLASSES[bar.kind], f' data-bar="{len(bars)}"', bar.start_s, bar.duration_s, end_s, top, BAR_PX)
        if bar.microbatch >= 0:
            middle = 100 * (bar.start_s + bar.duration_s / 2) / end_s
            hidden = "" if bar.duration_s / end_s * SHOWN_PX >= LABEL_PX else " hidden"
            ink = f"n {CLASSES[bar.kind]}{hidden}"
            share = f'data-share="{bar.duration_s / end_s:.5f}"'
            yield f'<text class="{ink}" {share} x="{middle:.3f}%" y="{top + 11.5:g}">{bar.microbatch + 1}</text>'
        bars.append((lane, bar))


def _rect(name: str, told: str, start_s: float, duration_s: float, end_s: float, top: float, height: float) -> str:
    start, width = 100 * start_s / end_s, 100 * duration_s / end_s
    return f'<rect class="{name}"{told} x="{start:.3f}%" y="{top:g}" width="{width:.3f}%" height="{height}"/>'


def _axis(end_s: float, top: float, bottom: float) -> Iterator[str]:
    """Lines and numbers; the script makes more of them when the drawing is wider."""
    yield f'<g class="axis" data-top="{top:g}" data-bottom="{bottom:g}">'
    every_s = tick_every_s(end_s / NUM_TICKS)
    for i in range(math.floor(end_s / every_s) + 1):
        x = 100 * i * every_s / end_s
        yield f'<line x1="{x:.3f}%" x2="{x:.3f}%" y1="{top:g}" y2="{bottom:g}"/>'
        if x <= 96:
            yield f'<text x="{x:.3f}%" y="{bottom + 12:g}">{tick_text(i * every_s)}</text>'
    yield "</g>"


def tick_every_s(least_s: float) -> float:
    """The first of 1, 2, 5, 10, ... (times a power of ten) that is not less."""
    if not least_s > 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least_s))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= least_s * (1 - 1e-9))


def tick_text(at_s: float) -> str:
    """`0.25 -> '250 ms'`."""
    return f"{at_s:.4g} s" if at_s >= 1 else f"{1e3 * at_s:.4g} ms"


def _data(found: Timeline, bars: list[tuple[Lane, Bar]]) -> dict[str, object]:
    lanes = [(track.policy, lane) for track in found.tracks for lane in track.lanes]
    number = {id(lane): i for i, (_, lane) in enumerate(lanes)}
    told = {position for _, bar in bars for position, _ in bar.items[:MAX_ITEMS]}
    return {
        "end_s": found.end_s,
        "num_microbatches": found.num_microbatches,
        "kinds": KINDS,
        "lanes": [(policy, lane.name) for policy, lane in lanes],
        "samples": [_sample(shape) if i in told else None for i, shape in enumerate(found.samples)],
        # Lists, not objects: names would be half of the page.
        "bars": [
            [
                number[id(lane)],
                KINDS.index(bar.kind),
                bar.microbatch,
                round(bar.start_s, 6),
                round(bar.duration_s, 6),
                round(bar.predicted_s, 6),
                round(bar.compute_s, 6),
                bar.num_tokens,
                len(bar.items),
                [n for item in bar.items[:MAX_ITEMS] for n in item],
            ]
            for lane, bar in bars
        ],
    }


def _sample(shape: SampleShape | None) -> list[object] | None:
    if shape is None:
        return None
    counts = [shape.num_text_tokens, shape.num_supervised_tokens, shape.num_llm_tokens]
    return [shape.sample_id, shape.sample_index, *counts, [_item(item) for item in shape.items]]


def _item(item: MediaItem) -> list[object]:
    return [item.module, item_text(item), item.num_tokens, item.num_rows]


def item_text(item: MediaItem) -> str:
    """`image 640 x 480 px`, `video 640 x 480 px, 32 frames, 3.20 s`, `audio 3.20 s`."""
    size = f"{item.width_px} x {item.height_px} px" if item.width_px else ""
    frames = f"{item.num_frames} frames" if item.num_frames > 1 else ""
    length = units.seconds(item.duration_s) if item.duration_s > 0 else ""
    return f"{item.kind} {', '.join(part for part in (size, frames, length) if part)}".strip()
