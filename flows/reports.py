"""The report of a run, whatever its state: `flows/reports.py:report`."""

from __future__ import annotations

import asyncio

from driving import flow_run_name, page_of_run, show_history
from prefect import State, flow
from prefect.states import Failed

from dflop.errors import DflopError
from dflop.report.terminal import markdown_summary
from dflop.steps import parts


@flow(name="dflop-report", flow_run_name=flow_run_name)
async def report(run: str = "latest") -> str | State[str]:
    """Write report.html of a run from what the store knows now, and show summary and history.

    Args:
        run: Run directory, id, beginning of an id, or `latest`; somebody else may be driving it.

    Returns:
        Path of the report.
    """
    try:
        found, page, drive = page_of_run(run)
        summary = await (parts.report(drive) if drive else asyncio.to_thread(parts.report_again, found, page))
        await page.markdown("summary", markdown_summary(summary), summary.verdict)
        await show_history(found, page)
    except DflopError as error:
        return Failed(message=error.what, data=error)
    # A browser follows no link from a server's page to a file: the path is there to be copied.
    link = f"[report.html]({found.report_file.as_uri()})\n\n`{found.report_file}`\n"
    await page.markdown("report", link, f"report of run {found.run_id}")
    page(f"report: {found.report_file}")
    return str(found.report_file)
