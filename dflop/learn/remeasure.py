"""Sizes of items that predictions are doubtful about: found in corrections, timed again, and judged.

A factor that strays from its module's level says that training and the cost table disagree about some sizes; it does
not say who is right. So a small job next to the training times just those sizes (`dflop/jobs/model_profile.py`). If it
agrees with the table, the reason lies in the run or its machine and the factor corrects it still. Where it does
not, the table is fitted anew, with the old probes of those sizes left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from dflop import files
from dflop.correct.drift_detector import DRIFT_COST, module_of
from dflop.cost.fit import fit_cost_tables
from dflop.cost.model import CostModel
from dflop.errors import CostError
from dflop.records import (
    ALL_TOKENS,
    LLM,
    Correction,
    CostTable,
    Decision,
    Measurement,
    ModuleSpec,
    SampleShape,
    from_dict,
    to_dict,
)
from dflop.run.directory import RunDir

Ranges = tuple[tuple[int, int], ...]
"""First tokens and first tokens beyond, ascending."""
DOUBTED = "doubted"
"""`Measurement.group` of probes of sizes that predictions were doubtful about."""
BUDGET_S = 10.0
FAR_FRAC = 0.15
"""A factor further from its module's level than this is worth a probe."""
AGREES_FRAC = 0.1
"""Probes within this of a table speak for the table."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Sizes of one module's items, and how the plan runs it."""

    module: str
    tp: int
    is_frozen: bool
    recompute: bool
    ranges: Ranges
    factor: float
    """Measured over predicted seconds of these sizes in training, relative to the module's level."""

    @property
    def subject(self) -> str:
        """For people and for `Decision`."""
        sizes = [f"{low} to {high - 1}" if high < ALL_TOKENS else f"{low} and more" for low, high in self.ranges]
        return f"{self.module} of {', '.join(sizes)} tokens"

    def holds(self, num_tokens: float) -> bool:
        """Whether an item is of these sizes."""
        return any(low <= num_tokens < high for low, high in self.ranges)


def find_doubts(
    corrections: Sequence[Correction], tables: Sequence[CostTable], decisions: Sequence[Decision]
) -> list[Doubt]:
    """Modules of a run with a cost drift of which some sizes are surely far from the level.

    The plan was made with `tables`; one that was derived from others has no probes to add to.
    """
    drifted = {module_of(d.subject) for d in decisions if d.kind == DRIFT_COST}
    found = []
    for table in tables:
        rows = [c for c in corrections if c.module == table.module and c.table_id == table.table_id]
        if table.module not in drifted or table.source == "derived" or not rows:
            continue
        newest_s = max(c.observed_at_s for c in rows)
        far = [c for c in rows if c.observed_at_s == newest_s and _is_far(c)]
        if far:
            factor = math.exp(float(np.mean([math.log(c.factor / c.level) for c in far])))
            ranges: list[tuple[int, int]] = []
            for low, high in sorted((c.min_tokens, c.max_tokens) for c in far):
                # Neighbours are one range.
                ranges.append((ranges.pop()[0], high) if ranges and ranges[-1][1] == low else (low, high))
            found.append(Doubt(table.module, table.tp, table.is_frozen, table.recompute, tuple(ranges), factor))
    return found


def samples_of(doubt: Doubt, shapes: Sequence[SampleShape]) -> list[SampleShape]:
    """Samples whose items of the module are all of the doubtful sizes: others are taken out of them, or they are."""
    if doubt.module == LLM:
        return [s for s in shapes if doubt.holds(s.num_llm_tokens)]
    kept = [
        replace(s, items=tuple(i for i in s.items if i.module == doubt.module and doubt.holds(i.num_tokens)))
        for s in shapes
    ]
    return [s for s in kept if s.items]


def new_doubts(run: RunDir, doubts: Sequence[Doubt]) -> list[Doubt]:
    """Doubts this run has not timed again yet, by module and sizes."""
    known = [d for file in sorted(_folder(run).glob("*.json")) for d in read_doubts(file)]
    timed = [(k.module, start, end) for k in known for start, end in k.ranges]
    return [
        d
        for d in doubts
        if not any(d.module == m and low < end and start < high for low, high in d.ranges for m, start, end in timed)
    ]


def write_doubts(run: RunDir, doubts: Sequence[Doubt]) -> Path:
    """What the probing job reads; also the note that these were asked about."""
    _folder(run).mkdir(exist_ok=True)
    file = _folder(run) / f"{1 + len(list(_folder(run).glob('*.json')))}.json"
    files.replace(file, json.dumps([to_dict(d) for d in doubts], indent=2), is_durable=True)
    return file


def read_doubts(file: str | Path) -> list[Doubt]:
    """Inverse of `write_doubts`."""
    return [from_dict(Doubt, d) for d in json.loads(Path(file).read_text())]


@dataclass(frozen=True, slots=True)
class Judged:
    """What probes say about a doubt."""

    doubt: Doubt
    measured_s: float
    """Mean seconds of the probes."""
    before_s: float
    """As the table in use predicts them."""
    after_s: float
    """As the new table does; of a table that was right the same as before."""
    tables: tuple[CostTable, ...]
    """New ones; empty where the old one was right."""

    @property
    def detail(self) -> str:
        """In words."""
        training = f"training takes {self.doubt.factor:.2f}x of it together with other sizes"
        probed = f"{self.doubt.subject}: probes take {self.measured_s / self.before_s:.2f}x of the prediction"
        if not self.tables:
            return f"{probed}, {training}: the table is right, the cause is in the run; factor kept"
        after = f"{self.measured_s / self.after_s:.2f}x of the refitted table"
        return f"{probed}, {training}; {after}"


def judge(doubt: Doubt, table: CostTable, measurements: Sequence[Measurement], spec: ModuleSpec) -> Judged:
    """Holds all measurements of a module, old and new, against the table in use, and fits it anew where it is wrong.

    Raises:
        CostError: there are no probes of these sizes, or they determine no table.
    """
    own = [m for m in measurements if (m.tp, m.is_frozen, m.recompute) == (doubt.tp, doubt.is_frozen, doubt.recompute)]
    of_sizes = [m for m in own if m.status == "ok" and doubt.holds(_length(m))]
    probes = [m for m in of_sizes if m.group == DOUBTED]
    if not probes:
        raise CostError(f"no probe of {doubt.subject} was timed", hint="see the log of the profiling job")
    num = len(probes)
    measured_s, before_s = sum(m.forward_s + m.backward_s for m in probes) / num, _predicted_s(table, probes) / num
    if abs(measured_s / before_s - 1) <= AGREES_FRAC:
        return Judged(doubt, measured_s, before_s, before_s, ())
    disproved = [m for m in of_sizes if m.group != DOUBTED]
    tables = tuple(fit_cost_tables([m for m in measurements if m not in disproved], [spec]))
    fitted = next(t for t in tables if (t.tp, t.is_frozen, t.recompute) == (table.tp, table.is_frozen, table.recompute))
    return Judged(doubt, measured_s, before_s, _predicted_s(fitted, probes) / num, tables)


def _length(m: Measurement) -> float:
    """Tokens of a probe's items, of the LLM weighted by tokens: how many samples it had is not in the row."""
    return m.sum_sq_tokens / m.num_tokens if m.module == LLM else m.num_tokens / max(m.num_items, 1)


def _predicted_s(table: CostTable, probes: Sequence[Measurement]) -> float:
    """Predicted seconds of all probes together, at their own depths."""
    cost, total_s = CostModel([table], extrapolate=True), 0.0
    for m in probes:
        load = m.num_items, m.num_tokens, m.sum_sq_tokens
        total_s += float(np.sum(cost.module_seconds(m.module, load, table.mode, num_layers=m.num_layers, edge=True)))
    return total_s


def _is_far(c: Correction) -> bool:
    return abs(math.log(c.factor / c.level)) > math.log1p(FAR_FRAC) and abs(c.factor - c.level) > 2 * c.sd_frac


def _folder(run: RunDir) -> Path:
    return run.path / "doubts"
