"""`dflop replan`: whether a run should go on under another plan."""

from __future__ import annotations

from dflop.cli.common import RUNS, Form, Json, Quiet, Run, Runs, form_of, talk


def replan(
    run: Run,
    *,
    runs: Runs = RUNS,
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say whether a run should now stop and go on under another plan.

    Nothing is changed. A run decides by itself where `replan.mode` is `act`. Seconds are simulated, on the batches that
    are to come, with what the run has learnt; the cost is what its own starts took.

    Example: dflop replan latest
    """
    import os

    from dflop.launch.kernels import kernel_environment

    os.environ |= kernel_environment(os.environ)  # before anything is imported that has kernels

    from dflop.errors import ConfigError
    from dflop.report.rows import print_rows
    from dflop.report.tables import layout_text
    from dflop.run.find import find_run
    from dflop.steps.replanning import advise_now
    from dflop.store.freshen import freshen

    found, say = find_run(run, runs), talk(quiet)
    config = found.config()
    if num_waiting := freshen(config.store, found.run_id):
        say(f"{num_waiting} files of the run wait to be ingested: dflop store ingest --store {config.store}")
    advice = advise_now(found, config, say) if found.has_plan() else None
    if advice is None:
        raise ConfigError("no step of this run's training is in the store", where=str(found.path), hint="wait for one")
    decided = advice.decision
    row = {
        "verdict": decided.verdict,
        "step": decided.step,
        "num_steps_left": decided.num_steps_left,
        "plan": layout_text(found.plan()),
        "new_plan": layout_text(advice.plans[0]) if advice.plans else None,
        "step_s": decided.measured,
        "new_step_s": decided.expected,
        "gain_s": decided.gain_s,
        "cost_s": decided.cost_s,
    }
    print_rows(tuple(row), [tuple(row.values())], form_of(form, as_json))
