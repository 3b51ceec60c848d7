"""Stage times that somebody measured on one device, as costs for planner and simulator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dflop.cost.analytic import analytic_link_costs
from dflop.cost.devices import A100, Device, find_device
from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.models import load_family
from dflop.models.family import Family
from dflop.records import Measurement
from dflop.store import schema

NUM_GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Times:
    """What `tests/gpu/real_steps.py` wrote for one model.

    Args:
        path: `MODEL.parquet`; `MODEL.stages.parquet` and `MODEL.json` lie beside it.
    """

    path: Path

    @cached_property
    def told(self) -> dict[str, Any]:
        """The model, and what the times depend on."""
        found: dict[str, Any] = json.loads(self.path.with_suffix(".json").read_text())
        return found

    @cached_property
    def family(self) -> Family:
        model = self.told["model"]
        return load_family(model["family"], model.get("hf_config", {}), model.get("media", {}))

    @property
    def device(self) -> Device:
        """The data sheet whose links, and memory where none was told, stand for what one device cannot show."""
        try:
            return find_device(self.told["hardware"])
        except CostError:
            return A100

    @property
    def memory_bytes(self) -> int:
        return int(self.told["memory_bytes"] or self.device.memory_bytes)

    def cost(self, num_nodes: int) -> CostModel:
        """Costs fitted to the times of shallow modules, over links of the data sheet."""
        specs = self.family.specs()
        links = analytic_link_costs(
            self.device, num_nodes=num_nodes, num_processes_per_node=NUM_GPUS_PER_NODE, profile_key="replay"
        )
        tables = fit_cost_tables(_rows(self.path), specs)
        return CostModel(tables, specs=specs, links=links, extrapolate=True)

    def stage_errors(self) -> Iterator[tuple[str, int, float]]:
        """(module, layers, median of measured over predicted seconds) of the deep stages, which no fit has seen."""
        cost, rows = self.cost(1), _rows(self.path.with_suffix(".stages.parquet"))
        for module, num_layers in dict.fromkeys((m.module, m.num_layers) for m in rows):
            ratios = [
                (m.forward_s + m.backward_s)
                / float(
                    sum(
                        cost.module_seconds(
                            module, m.num_items, m.num_tokens, m.sum_sq_tokens, num_layers=num_layers, edge=True
                        )
                    )
                )
                for m in rows
                if m.module == module and m.status == "ok"
            ]
            if ratios:
                yield module, num_layers, float(np.median(ratios))


def _rows(path: Path) -> list[Measurement]:
    return schema.from_table(Measurement, pq.read_table(path))
