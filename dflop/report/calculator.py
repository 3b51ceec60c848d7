"""The calculator of a page: its fields, where their first values come from, and what comes out of those."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from dflop import units
from dflop.report.worth import WorthInputs, amount, duration, worth

SCRIPT = "calculator.js"
USD_PER_GPU_HOUR = 2.5
"""Where nobody has named a price; a guess, and said to be one."""


@dataclass(frozen=True, slots=True)
class Field:
    """An input."""

    name: str
    label: str
    unit: str
    value: str
    """Empty where it is not known."""
    origin: str
    """Where the value comes from."""


@dataclass(frozen=True, slots=True)
class Output:
    """A result; `value` has it in full, for programs."""

    name: str
    label: str
    unit: str
    text: str
    value: float


@dataclass(frozen=True, slots=True)
class Calculator:
    """What the template shows."""

    fields: tuple[Field, ...]
    outputs: tuple[Output, ...]


def make_calculator(given: WorthInputs, origins: Mapping[str, str], device: str = "GPU") -> Calculator:
    """A calculator that starts from what a run or a simulation says.

    Args:
        given: First values.
        origins: Per name of an input, where its first value comes from.
        device: What hours are counted of: `GPU`, or `process` where there are none.
    """
    labels = {
        "num_gpus": (f"{device}s" if device == "GPU" else "processes", ""),
        "num_steps": ("optimizer steps", "steps"),
        "step_s": ("step, balanced", "s"),
        "speedup": ("speed-up over data-blind", "times"),
        "speedup_low": ("speed-up, at least", "times"),
        "speedup_high": ("speed-up, at most", "times"),
        "usd_per_gpu_hour": (f"price of a {device}-hour", "USD"),
        "once_gpu_hours": ("spent once, on profiling", f"{device}-hours"),
    }
    values = {name: _text(value) for name, value in asdict(given).items()}
    fields = tuple(Field(name, *label, values[name], origins.get(name, "")) for name, label in labels.items())
    # Of the values that are shown: the page's script has no others.
    shown = replace(given, **{name: float(text) if text else math.nan for name, text in values.items()})
    return Calculator(fields, _outputs(shown, device))


def _outputs(given: WorthInputs, device: str) -> tuple[Output, ...]:
    hours = f"{device}-hours"
    found = asdict(worth(given))
    rows = (
        ("blind_gpu_hours", "training, data-blind", hours),
        ("gpu_hours", "training, balanced", hours),
        ("saved_gpu_hours", "saved", hours),
        ("saved_low_gpu_hours", "saved, at least", hours),
        ("saved_high_gpu_hours", "saved, at most", hours),
        ("saved_frac", "saved, of the data-blind training", ""),
        ("saved_s", "saved, by the clock", ""),
        ("saved_usd", "saved, in money", "USD"),
        ("net_gpu_hours", "saved, less what was spent once", hours),
        ("net_usd", "the same in money", "USD"),
        ("break_even_steps", "what was spent once is back after", "steps"),
    )
    texts = {"saved_frac": units.percent, "saved_s": duration}
    return tuple(
        Output(name, label, unit, texts.get(name, amount)(found[name]), found[name]) for name, label, unit in rows
    )


def _text(value: float) -> str:
    """As a field shows it; what is no number is left for the reader to fill in."""
    if not math.isfinite(value):
        return ""
    return f"{value:.0f}" if value == round(value) else f"{value:.6g}"
