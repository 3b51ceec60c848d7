"""What a run leaves: its report, its history, traces, advice whether to go on, and the trained model."""

from __future__ import annotations

import os
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import (
    DEFAULT_STORE,
    RUNS,
    Form,
    Json,
    Quiet,
    Run,
    Runs,
    Store,
    UsdPerGpuHour,
    at_least,
    check_folder,
    form_of,
    prepare_kernels,
    talk,
    writing,
)

if TYPE_CHECKING:
    from dflop.run.directory import RunDir


def report(
    run: Run = "latest", *, runs: Runs = RUNS, usd_per_gpu_hour: UsdPerGpuHour = 0.0, quiet: Quiet = False
) -> None:
    """Write report.html of a run from what the store knows now; print its path.

    Example: dflop report latest
    """
    from rich.console import Console

    from dflop.report.terminal import print_summary
    from dflop.run.find import find_run
    from dflop.store.ingest import freshen
    from dflop.views.run_results import write_report

    found = find_run(run, runs)
    freshen(found.config().store, found.run_id, talk(quiet))
    print_summary(write_report(found, usd_per_gpu_hour), Console())
    print(found.report_file)


def history(
    run: Annotated[str, Parameter(help="Run directory, id, beginning of one, `latest`; or an id in --store.")],
    *,
    runs: Runs = RUNS,
    store: Store = DEFAULT_STORE,
    form: Annotated[
        Literal["table", "markdown", "json", "csv"], Parameter(name="--format", help="Output format.")
    ] = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the event log of a run: what it noticed and what was done.

    Plans, corrections, drifts, slow ranks, restarts. Rows in the spool are ingested first, unless another process is
    ingesting. A run directory names its own store; --store has runs whose directory is gone, too.

    Example: dflop history latest
    """
    from rich.console import Console

    from dflop.report.history_table import COLUMNS, history_table
    from dflop.report.rows import print_rows
    from dflop.report.table_text import markdown_table, print_table
    from dflop.store.ingest import freshen
    from dflop.views.run_results import load_history

    run_id = run
    if (opened := _directory_of(run, runs)) is not None:
        run_id, store = opened.run_id, opened.config().store
    freshen(store, run_id, talk(quiet))
    entries = load_history(store, run_id)
    if (shown := form_of(form, as_json)) == "table":
        print_table(history_table(entries), Console())
    elif shown == "markdown":
        print(markdown_table(history_table(entries)))
    else:
        print_rows(COLUMNS, [astuple(entry) for entry in entries], shown)


def trace(
    run: Run = "latest",
    *,
    runs: Runs = RUNS,
    steps: Annotated[
        str | None, Parameter(help="A:B, steps from A up to but not including B, from 0; default: the last 20.")
    ] = None,
    job: Annotated[Literal["train", "compare"], Parameter(help="Training, or its comparison.")] = "train",
    out: Annotated[Path | None, Parameter(help=".json or .json.gz; default: trace.json in the run directory.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write steps of a run as a Chrome trace: predicted and measured times.

    Open it in ui.perfetto.dev.

    Example: dflop trace latest --steps 10:20
    """
    from dflop import units
    from dflop.run.find import find_run
    from dflop.store.ingest import freshen
    from dflop.views.trace_window import MANY_EVENTS, write_trace

    check_folder(out)
    found, say = find_run(run, runs), talk(quiet)
    freshen(found.config().store, found.run_id, say)
    with writing(out or found.path / "trace.json"):
        made = write_trace(found, out, job=job, window=steps)
    say(
        f"steps {made.first_step} to {made.last_step}: {made.num_steps} measured, {made.num_predicted} also predicted; "
        f"{made.num_events} events, {units.num_bytes(made.num_bytes)}"
    )
    if made.num_events > MANY_EVENTS:
        say("viewers are slow with this many events: choose fewer steps with --steps")
    print(made.path)


def replan(run: Run, *, runs: Runs = RUNS, form: Form = "table", as_json: Json = False, quiet: Quiet = False) -> None:
    """Check whether re-planning a run would pay off.

    Nothing is changed. A run decides by itself where `replan.mode` is `act`. Seconds are simulated, on the batches that
    are to come, with the run's corrections; the cost is what the run's starts took.

    Example: dflop replan latest
    """
    prepare_kernels()
    from dflop.errors import ConfigError
    from dflop.report.rows import print_rows
    from dflop.report.tables import layout_text
    from dflop.run.find import find_run
    from dflop.steps.replanning import advise_now
    from dflop.store.ingest import freshen

    found, say = find_run(run, runs), talk(quiet)
    config = found.config()
    freshen(config.store, found.run_id, say)
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


def export(
    run: Run,
    *,
    runs: Runs = RUNS,
    out: Annotated[Path, Parameter(help="Folder to write; must not exist yet.")],
    best: Annotated[bool, Parameter(help="The one with the lowest loss (validation.keep_best).", negative="")] = False,
    ema: Annotated[bool, Parameter(help="The weights' average over steps (train.ema_decay).", negative="")] = False,
    merged: Annotated[bool, Parameter(help="Merge adapters into the weights of their base.", negative="")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's newest checkpoint as a folder for transformers, vLLM and others.

    Weights, processor, tokenizer and chat template, these as training used them. Of a run with `train.lora` adapters
    alone, as a folder of peft.

    Example: dflop export latest --out models/demo
    """
    from dflop.jobs.weights import export_run
    from dflop.run.find import find_run
    from dflop.run.messages import Meter

    say = talk(quiet)
    step = export_run(find_run(run, runs), out, say, Meter(say), merges=merged, is_best=best, is_average=ema)
    say(f"model after {step} steps")
    print(out)


def chat(
    run: Annotated[str, Parameter(help="Run directory, id, beginning of one, `latest`; or a model's folder.")],
    question: Annotated[str, Parameter(help="What to ask.")],
    media: Annotated[tuple[Path, ...], Parameter(help="Pictures, videos or audio that the question is about.")] = (),
    /,
    *,
    runs: Runs = RUNS,
    max_tokens: Annotated[int, Parameter(help="Tokens of the answer, at most.", validator=at_least(1))] = 256,
    quiet: Quiet = False,
) -> None:
    """Ask a run's newest checkpoint, or the model in a folder, and print its answer.

    The prompt is made as in training. The answer is the most likely one (greedy).

    Example: dflop chat latest "What is in this picture?" cat.jpg
    """
    prepare_kernels()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # of what a config leaves out
    from dflop.jobs.chat import answer, is_model_folder, model_of_folder, model_of_run
    from dflop.run.find import find_run

    say = talk(quiet)
    model = model_of_folder(Path(run)) if is_model_folder(Path(run)) else model_of_run(find_run(run, runs), say)
    found = answer(model, question, media, max_tokens=max_tokens)
    end = "" if found.is_complete else "; cut there, see --max-tokens"
    say(f"{found.num_prompt_tokens} tokens of prompt, {found.num_tokens} of answer{end}")
    print(found.text)


def _directory_of(name: str, runs: Path) -> RunDir | None:
    """The run directory that is meant; None: the name is for the store."""
    from dflop.errors import ConfigError
    from dflop.run.find import LATEST, find_run

    try:
        return find_run(name, runs)
    except ConfigError:
        if name == LATEST or os.path.isdir(name):
            raise
        return None
