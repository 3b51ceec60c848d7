"""`dflop replan`: whether a run should go on under another plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.cli.common import Form, Json, Quiet, form_of, talk


def replan(
    run_dir: Annotated[Path, Parameter(help="Run directory.")],
    *,
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say whether a run, as it stands now, should stop and go on under another plan; nothing is changed.

    A run decides by itself where `replan.mode` is `act`. Seconds are simulated, on the batches that are to come, with
    what the run has learnt; the cost is what its own starts took. Example: dflop replan runs/demo-20261120-120000
    """
    import os

    from dflop.launch.kernels import kernel_environment

    os.environ |= kernel_environment(os.environ)  # before anything is imported that has kernels

    from dflop.errors import ConfigError
    from dflop.jobs.replan import advise_now
    from dflop.jobs.rundir import open_run
    from dflop.report.rows import print_rows
    from dflop.report.tables import layout_text
    from dflop.store.freshen import freshen

    run, say = open_run(run_dir), talk(quiet)
    config = run.config()
    if num_waiting := freshen(config.store, run.run_id):
        say(f"{num_waiting} files of the run wait to be ingested: dflop store ingest --store {config.store}")
    advice = advise_now(run, config, say) if run.has_plan() else None
    if advice is None:
        raise ConfigError("no step of this run's training is in the store", where=str(run_dir), hint="wait for one")
    found = advice.decision
    row = {
        "verdict": found.verdict,
        "step": found.step,
        "num_steps_left": found.num_steps_left,
        "plan": layout_text(run.plan()),
        "new_plan": layout_text(advice.plans[0]) if advice.plans else None,
        "step_s": found.measured,
        "new_step_s": found.expected,
        "gain_s": found.gain_s,
        "cost_s": found.cost_s,
    }
    print_rows(tuple(row), [tuple(row.values())], form_of(form, as_json))
