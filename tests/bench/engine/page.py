"""The engine beside plain Hugging Face, for documents."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from tests.bench.markdown import percent, ratio, span, table

LAYOUTS = {"inline dp2": "inline, two replicas", "vision | llm": "vision and LLM on their own"}
ROWS = (
    ("plain, 4 padded samples at a time", "balanced", "plain data parallel, 4 padded samples at a time / dflop"),
    ("plain, one sample at a time", "balanced", "plain data parallel, one sample at a time / dflop"),
    ("plain, one sample at a time", "arrival", "plain, one at a time / the engine in arrival order"),
)


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`engine`: the race; what the engine itself takes, and a checkpoint."""
    wall = {(r["slower"], r["faster"]): r["wall"] for r in content["race"]["ratios"]}
    rows = [
        (name, *(ratio(wall[plain, f"engine, {layout}, {policy}"]) for layout in LAYOUTS))
        for plain, policy, name in ROWS
    ]
    head = ("step time of plain Hugging Face / engine", *LAYOUTS.values())
    return {"engine": f"{table(head, rows)}\n\n{_notes(content)}"}


def _notes(content: Mapping[str, Any]) -> str:
    size, stall, modules = content["size"], content["stall"], content["overhead"]["modules"]
    noise = [r["noise_frac"] for r in content["race"]["ratios"]]
    beside = stall["step_beside_write_s"] / stall["step_s"] - 1
    return (
        f"Samples: {content['samples']}; "
        f"{size['num_rounds']} rounds of {size['num_batches']} global batches of {size['num_samples']} samples in "
        f"turn; noise of a ratio is {percent(min(noise))} to {percent(max(noise))}. "
        f"Beside {span([1e3 * m['modules_s'] for m in modules], '.0f')} ms of modules a microbatch takes "
        f"{span([1e3 * m['overhead_s'] for m in modules], '.1f')} ms of the engine's own processor time "
        f"({100 * statistics.mean(m['overhead_frac'] for m in modules):.1f} %). "
        f"A checkpoint of {stall['state_bytes'] / 1e6:.0f} MB holds training up for "
        f"{1e3 * stall['asynchronous_s']:.0f} ms, {1e3 * stall['synchronous_s']:.0f} ms if it waited; the step "
        f"beside the write is {percent(beside)} longer, since there is no core to spare."
    )  # fmt: skip
