"""Simulated steps of large plans, for documents."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`packing-simulated`: what the search takes off a balance of all modules, on the largest batches."""
    cells = content["cells"]
    size = max(cell["num_samples"] for cell in cells)
    cells = [cell for cell in cells if cell["num_samples"] == size]
    taken = [100 * statistics.mean(cell["reduction"]["full"]) for cell in cells]
    cpu_s = statistics.median(ms for cell in cells for ms in cell["cpu_ms"]["full"]) / 1e3
    rows = "real sample sizes" if content["real_sizes"] else "generated samples"
    num_seeds = len(cells[0]["gap_frac"])
    return {
        "packing-simulated": f"**Simulated** on the A100's data sheet, {size:,} samples a global batch, {rows}: a "
        f"step is {min(taken):.0f} to {max(taken):.0f} % shorter than under a balance of all modules (means of "
        f"{num_seeds} batches, {len(cells)} plans), found in {cpu_s:.2f} s of one core (median)."
    }  # fmt: skip
