"""A validator of the Chrome trace event format, of those of its parts that we use, as Google's document describes it.

What Perfetto's importer says to a trace that breaks these rules: slices that overlap without nesting lose their ends,
arrows without a slice at either end are dropped, and NaN is no JSON at all.
"""

import json
from collections import defaultdict
from typing import Any

PHASES = {"X", "M", "s", "f"}
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
EPS_US = 1e-6
"""Times have three decimals."""


def problems_of(trace: Any) -> list[str]:
    """What is wrong with a trace; empty where nothing is."""
    try:
        trace = json.loads(json.dumps(trace, allow_nan=False))
    except ValueError as error:
        return [f"no JSON: {error}"]
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list of traceEvents"]
    found = [] if trace.get("displayTimeUnit") in ("ms", "ns") else ["displayTimeUnit is neither ms nor ns"]
    events = trace["traceEvents"]
    for number, event in enumerate(events):
        found += [f"event {number}: {problem}" for problem in _of_event(event)]
    if not found:
        found += _nesting(events) + _arrows(events) + _names(events)
    return found


def _of_event(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["no object"]
    found = []
    if event.get("ph") not in PHASES:
        found.append(f"phase {event.get('ph')!r}")
    if not isinstance(event.get("name"), str) or not event["name"]:
        found.append("no name")
    for key in ("pid", "tid"):
        if not isinstance(event.get(key), int):
            found.append(f"no {key}")
    if not _is_time(event.get("ts")):
        found.append(f"ts {event.get('ts')!r}")
    if event.get("ph") == "X" and not (_is_time(event.get("dur")) and isinstance(event.get("args", {}), dict)):
        found.append(f"dur {event.get('dur')!r}")
    if event.get("ph") == "M":
        key, kind = METADATA.get(event.get("name", ""), ("", str))
        if not key or not isinstance(event.get("args", {}).get(key), kind):
            found.append(f"metadata {event.get('name')!r} with {event.get('args')!r}")
    if event.get("ph") in ("s", "f") and not (isinstance(event.get("id"), int) and event.get("cat")):
        found.append("an arrow without id or category")
    return found


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _nesting(events: list[dict[str, Any]]) -> list[str]:
    """Slices of a track follow one another or lie inside one another."""
    found = []
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for track, slices in tracks.items():
        open_ends: list[float] = []
        for one in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= one["ts"] + EPS_US:
                open_ends.pop()
            end = one["ts"] + one["dur"]
            if open_ends and end > open_ends[-1] + EPS_US:
                found.append(f"track {track}: `{one['name']}` at {one['ts']} overlaps its neighbour")
            open_ends.append(end)
    return found


def _arrows(events: list[dict[str, Any]]) -> list[str]:
    """Every arrow has one beginning and one end behind it, each inside a slice of its track."""
    found = []
    ends: dict[tuple[str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            if event["ph"] in ends[event["cat"], event["id"]]:
                found.append(f"arrow {event['id']} has two `{event['ph']}`")
            ends[event["cat"], event["id"]][event["ph"]] = event
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for (_, number), pair in ends.items():
        if set(pair) != {"s", "f"}:
            found.append(f"arrow {number} has only `{'`, `'.join(pair)}`")
            continue
        if pair["f"]["ts"] < pair["s"]["ts"]:
            found.append(f"arrow {number} leads into the past")
        if pair["s"]["name"] != pair["f"]["name"]:
            found.append(f"arrow {number} has two names")
        for event in pair.values():
            if not any(a <= event["ts"] <= b for a, b in slices[event["pid"], event["tid"]]):
                found.append(f"arrow {number}: `{event['ph']}` at {event['ts']} is in no slice")
    return found


def _names(events: list[dict[str, Any]]) -> list[str]:
    """Whatever has a slice has a name."""
    named = {(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    return [
        *(f"track {track} has no name" for track in sorted(used) if ("thread_name", *track) not in named),
        *(
            f"process {pid} has no name"
            for pid in sorted({p for p, _ in used})
            if ("process_name", pid, 0) not in named
        ),
    ]
