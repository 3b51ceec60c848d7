"""Plans and cost tables as files: written by hand, by another program, by a dflop that died."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from dflop.plan.emit.json_plan import emit_json, read_plan
from dflop.records import to_dict
from dflop.sampler.batch_sampler import BalancedBatchSampler
from dflop.sampler.costs import SampleCosts, sample_costs_from_tables
from dflop.sampler.plans import warm_up
from tests.builders import make_cluster, make_sample, make_table
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt
from tests.report.detailed import SPLIT


def sound_plan() -> Any:
    """A plan document as `emit_json` writes it."""
    return json.loads(emit_json(SPLIT, make_cluster(SPLIT.num_processes)))


def _documents() -> st.SearchStrategy[Any]:
    return hostile.broken(sound_plan()) | hostile.broken_bytes([json.dumps(sound_plan()).encode()])


def _as_text(example: Any) -> str:
    return example.decode("utf-8", "replace") if isinstance(example, bytes) else json.dumps(example)


def _read(folder: Path) -> Callable[[Any], None]:
    def check(example: Any) -> None:
        plan = attempt(read_plan, _as_text(example))
        if plan is not None:
            again = emit_json(plan, make_cluster(plan.num_processes))
            assert json.loads(emit_json(read_plan(again), make_cluster(plan.num_processes))) == json.loads(again)
            assert plan.num_processes > 0

    return check


def sound_tables() -> list[dict[str, Any]]:
    """Cost tables as `cost_tables.json` has them."""
    return [to_dict(make_table(module)) for module in ("vision", "llm")]


def _costs(folder: Path) -> Callable[[Any], None]:
    path, shapes = folder / "cost_tables.json", [make_sample(0, 10, [("vision", 40)]), make_sample(1, 30)]

    def check(example: Any) -> None:
        path.write_bytes(example if isinstance(example, bytes) else json.dumps(example).encode())
        found = attempt(sample_costs_from_tables, path, shapes)
        if found is not None:
            assert len(found) == 2

    return check


def _saved() -> bytes:
    out = io.BytesIO()
    np.savez(
        out, fixed_s=np.array(0.5), origin=np.array("x"), seconds=np.array([1.0, 2.0, 3.0]), tokens=np.array([3, 4, 5]),
        index=np.array([0, 1, 2]),
    )  # fmt: skip
    return out.getvalue()


def _costs_file(folder: Path) -> Callable[[Any], None]:
    path = folder / "costs.npz"
    for sync in ("step", "microbatch"):
        warm_up(sync)

    def check(example: bytes) -> None:
        path.write_bytes(example)
        costs = attempt(SampleCosts.load, path)
        if costs is not None:
            sampler = attempt(BalancedBatchSampler, costs, global_batch_size=2, num_replicas=1, rank=0)
            if sampler is not None:
                assert next(iter(sampler))

    return check


TARGETS = (
    Target("plan-json", "plan documents with values of any type", _documents, _read),
    Target(
        "cost-tables",
        "`cost_tables.json` with values of any type",
        lambda: hostile.broken(sound_tables()) | hostile.broken_bytes([json.dumps(sound_tables()).encode()]),
        _costs,
    ),
    Target("sample-costs", "bytes of saved sample costs broken", lambda: hostile.broken_bytes([_saved()]), _costs_file),
)
