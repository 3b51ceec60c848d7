"""What people are shown of a run: its report, and of profiles and plan rows, words and a picture."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dflop.data.distribution import summary
from dflop.errors import DflopError
from dflop.plan.verdict import proven
from dflop.records import Measurement, Plan, PlanProgram
from dflop.report.cost_plots import COLUMNS, fitted, table_rows
from dflop.report.history_table import history_table
from dflop.report.summary import RunSummary
from dflop.report.table_text import markdown_table
from dflop.report.tables import plan_table, program_table
from dflop.report.terminal import markdown_summary
from dflop.run.directory import RunDir
from dflop.run.plan_scope import basis_of
from dflop.steps import planning
from dflop.store.ingest import freshen
from dflop.store.profile_frames import profile_frame
from dflop.store.reader import Reader
from dflop.units import num_bytes
from dflop.views import run_results
from dflop.views.explain_plan import save_plan_picture

MAX_PICTURE_BYTES = 400_000
"""A picture travels inside its page and is kept in the server's database."""
MAX_SHOWN_PLANS = 8

Rows = list[dict[str, object]]


def summary_page(run: RunDir, summary: RunSummary) -> str:
    """The summary in Markdown, and where the report lies: a browser follows no link from a server's page to a file."""
    return f"{markdown_summary(summary)}\n[report.html]({run.report_file.as_uri()})\n\n`{run.report_file}`\n"


def history_page(run: RunDir) -> str:
    """What was noticed and decided so far, in Markdown."""
    return markdown_table(history_table(run_results.load_history(run.config().store, run.run_id)))


def data_rows(run: RunDir) -> Rows:
    """Quantiles of tokens per kind of sample and module."""
    return list(summary(profile_frame(run.config().store, run.profile_key())).iter_rows(named=True))


def cost_rows(run: RunDir) -> Rows:
    """One row per cost table of the run's model profile; empty before tables are fitted."""
    config = run.config()
    key, *_ = planning.model_profile_key(config)
    with Reader(config.store) as reader:
        tables = reader.latest_cost_tables(key)
        measurements = reader.records(Measurement, where={"profile_key": key})
    return [dict(zip(COLUMNS, row, strict=True)) for row in table_rows(fitted(tables, measurements))]


def plan_page(run: RunDir, plans: Sequence[Plan]) -> str:
    """A plan in Markdown: a step as a picture, runners-up, what is proven; why it was chosen stands above it."""
    store = run.config().store
    freshen(store, run.run_id)
    with Reader(store) as reader:
        programs = reader.records(PlanProgram, where={"run_id": run.run_id, "plan_id": plans[0].plan_id})
    shown = plans[:MAX_SHOWN_PLANS]
    parts = [picture_of_plan(run), markdown_table(plan_table(shown))]
    if len(shown) < len(plans):
        parts.append(f"{len(plans) - len(shown)} more: `dflop sql plan_candidates --param run_id={run.run_id}`\n")
    if programs:
        parts += [*proven(programs), markdown_table(program_table(programs))]
    return "\n\n".join(parts)


def picture_of_plan(run: RunDir) -> str:
    """A step of the plan, data-blind and balanced, as a Markdown image that loads nothing; or words why there is none.

    Nothing depends on it.
    """
    try:
        table, first = run.cost_tables()[0], basis_of(run).from_step or None
        task = planning.run_task(run, run.config(), table.profile_key, lambda _: None, from_step=first)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.png"
            save_plan_picture(task.problem, run.plan(), f"measured on {table.hardware}", path)
            content = path.read_bytes()
    except (DflopError, OSError, ArithmeticError, LookupError, ValueError) as error:
        return f"No picture: {type(error).__name__}: {' '.join(str(error).split())}"
    if len(content) > MAX_PICTURE_BYTES:
        return f"No picture, it would take {num_bytes(len(content))}."
    return f"![one step of the plan, simulated](data:image/png;base64,{base64.b64encode(content).decode()})"
