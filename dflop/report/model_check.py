"""Whether stages train a model as transformers does: tables of the check, and its section of a run's page."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dflop.models.generic.exactness import KeptCheck, MediumCheck
from dflop.report.html_page import Section
from dflop.report.tables import Table, make_table


def check_section(check: KeptCheck | None, note: str, software: str) -> Section:
    """What is known of the model of a run with this software; without a check the note."""
    if check is None:
        return Section("model-check", "Model check", text=note)
    other = f"; the run has {software}, for which it was not checked" * (check.software != software)
    at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(check.checked_at_s))
    facts = (
        ("stages", "exact" if check.exactness.is_exact else "not exact"),
        ("compared with", check.software + other),
        ("checked", f"{at}, by dflop {check.code_rev}"),
        *((f"{medium} refused", why) for medium, why in check.refused),
    )
    tables = exactness_table(check.exactness.checks), module_table(check.exactness.checks)
    return Section("model-check", "Model check", facts=facts, tables=tables)


def exactness_table(checks: Sequence[MediumCheck]) -> Table:
    """A row per medium: its verdict, and the worst module or why it was not checked."""
    return make_table(
        "Gradients of two steps of training, a shrunk random copy in two stages against plain transformers",
        checks,
        {
            "samples": lambda of: of.medium,
            "verdict": _verdict,
            "error": lambda of: _error(of.error),
            "in float64": lambda of: _error(of.float64_error),
            "worst module, or the reason": lambda of: of.problem or of.errors[0][0],
        },
        {"samples", "verdict", "worst module, or the reason"},
        "Relative error of a module's gradients in float32; exact: up to 1e-5, or rounding alone by float64.",
    )


def module_table(checks: Sequence[MediumCheck]) -> Table:
    """The float32 error of every module of the copy in samples of each medium, worst first."""
    found = {of.medium: dict(of.errors) for of in checks if of.errors}
    modules = sorted({module for errors in found.values() for module in errors})
    modules.sort(key=lambda module: -max(errors.get(module, 0.0) for errors in found.values()))
    rows = tuple((module, *(_error(errors.get(module)) for errors in found.values())) for module in modules)
    title, note = "Relative error of gradients by module and medium", "Float32 on a CPU. Empty: no gradient."
    return Table(title, ("module", *found), rows, frozenset({"module"}), note, num_shown=5)


def _verdict(of: MediumCheck) -> str:
    if of.is_exact:
        return "exact"
    return "differs" if of.errors else "fails" if of.medium == "text" else "not checked"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"
