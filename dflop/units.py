"""The only place that turns numbers into text for people. SI decimal for counts, binary for bytes."""

from __future__ import annotations

import math


def seconds(value_s: float) -> str:
    """`0.00042 -> '420 us'`, `0.0213 -> '21.3 ms'`, `75 -> '1 min 15 s'`; `-` for NaN and infinity."""
    if not math.isfinite(value_s):
        return "-"
    if value_s < 0:
        return f"-{seconds(-value_s)}"
    if value_s < 1e-3:
        return f"{value_s * 1e6:.0f} us"
    if value_s < 1:
        return f"{value_s * 1e3:.1f} ms"
    if value_s < 60:
        return f"{value_s:.2f} s"
    minutes, rest_s = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s} s"
    return f"{minutes // 60} h {minutes % 60} min"


def clock(value_s: float) -> str:
    """`3725.4 -> '1:02:05'`: time since something began."""
    minutes, rest_s = divmod(round(value_s), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest_s:02d}"


def num_bytes(value_bytes: float) -> str:
    """`1536 -> '1.5 KiB'`."""
    size = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def count(value: float) -> str:
    """`1234567 -> '1.23M'`."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.3g}{suffix}"
    return f"{value:g}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 layout`, `2 layouts`; `plural` where it is not the noun with an s."""
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def ratio(value: float) -> str:
    """`1.234 -> '1.23x'`."""
    return "-" if math.isnan(value) else f"{value:.2f}x"


def speedup(mean: float, low: float, high: float) -> str:
    """`1.0523, 1.01, 1.1 -> '1.052x (95 % interval 1.010x to 1.100x)'`; without the interval where that is NaN."""
    if math.isnan(mean):
        return "-"
    return f"{mean:.3f}x" + ("" if math.isnan(low) else f" (95 % interval {low:.3f}x to {high:.3f}x)")


def interval(low: float, high: float) -> str:
    """`1.01, 1.1 -> '1.010-1.100'`, empty for NaN."""
    return "" if math.isnan(low) else f"{low:.3f}-{high:.3f}"


def percent(value_frac: float) -> str:
    """`0.123 -> '12.3 %'`."""
    return "-" if math.isnan(value_frac) else f"{value_frac * 100:.1f} %"
