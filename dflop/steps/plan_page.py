"""What a page about a run shows of its profiles and its plan: rows, words and a picture."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflop.data.distribution import shapes_frame, summary
from dflop.errors import DflopError
from dflop.records import Measurement, Plan
from dflop.report.cost_plots import COLUMNS, fitted, table_rows
from dflop.report.terminal import markdown_plan
from dflop.run.directory import RunDir
from dflop.run.plan_scope import basis_of
from dflop.steps import planning
from dflop.store.reader import Reader
from dflop.units import num_bytes
from dflop.views.explain_plan import save_plan_picture

MAX_PICTURE_BYTES = 400_000
"""A picture travels inside its page and is kept in the server's database."""
MAX_SHOWN_PLANS = 8

Rows = list[dict[str, object]]


def data_rows(run: RunDir) -> Rows:
    """Quantiles of tokens per kind of sample and module."""
    return list(summary(shapes_frame(run.shapes())).iter_rows(named=True))


def cost_rows(run: RunDir) -> Rows:
    """One row per cost table of the run's model profile; empty before tables are fitted."""
    config = run.config()
    key, *_ = planning.model_profile_key(config)
    with Reader(config.store) as reader:
        tables = reader.latest_cost_tables(key)
        measurements = reader.records(Measurement, where={"profile_key": key})
    return [dict(zip(COLUMNS, row, strict=True)) for row in table_rows(fitted(tables, measurements))]


def plan_page(run: RunDir, plans: Sequence[Plan]) -> str:
    """A plan in Markdown: a step of it as a picture, and the runners-up; why it was chosen stands above it."""
    shown = plans[:MAX_SHOWN_PLANS]
    parts = [picture_of_plan(run), markdown_plan(shown)]
    if len(shown) < len(plans):
        parts.append(f"{len(plans) - len(shown)} more: `dflop sql plan_candidates --param run_id={run.run_id}`\n")
    return "\n\n".join(parts)


def picture_of_plan(run: RunDir) -> str:
    """A step of the run's plan, data-blind and balanced, as a Markdown image that loads nothing.

    The picture is for people and nothing depends on it: without one, words say why.
    """
    try:
        config, plan = run.config(), run.plan()
        key = run.cost_tables()[0].profile_key
        first = basis_of(run).from_step
        task = planning.planning_task(run, config, key, lambda _: None, from_step=first or None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.png"
            save_plan_picture(task.problem, plan, f"measured on {run.cost_tables()[0].hardware}", path)
            content = path.read_bytes()
    except (DflopError, OSError, ArithmeticError, LookupError, ValueError) as error:
        return f"No picture of it: {type(error).__name__}: {' '.join(str(error).split())}"
    if len(content) > MAX_PICTURE_BYTES:
        return f"No picture of it: it would take {num_bytes(len(content))}."
    return f"![one step of the plan, simulated](data:image/png;base64,{base64.b64encode(content).decode()})"
