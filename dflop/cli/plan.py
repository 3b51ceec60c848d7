"""`dflop plan`: which layout a cluster would give a model on a dataset, simulated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dflop.cli.common import (
    Form,
    Json,
    Overrides,
    Quiet,
    UsdPerGpuHour,
    check_folder,
    command_line,
    form_of,
    prepare_kernels,
    talk,
    write_page,
)
from dflop.cli.configured import Batch, ConfigOrModel, Data, Download, Given, LookedAt, Split, show_batches
from dflop.run.messages import Meter, Say

if TYPE_CHECKING:
    from dflop.compare.batches import AtBatch
    from dflop.compare.outlook import Outlook
    from dflop.plan.space import Problem
    from dflop.records import Plan

Device = Annotated[str, Parameter(help="Costs by data sheet, not measured: a100, a100-40, a800, h100, h200, b200.")]
Gpus = Annotated[int | None, Parameter(help="Plan for this number of GPUs instead of the cluster's.")]
GpusPerNode = Annotated[int | None, Parameter(help="GPUs per node; 8 with a data sheet.")]


def plan(
    config: ConfigOrModel,
    data: Data = (),
    *,
    split: Split = "",
    download: Download = False,
    batch: Batch = "",
    device: Device = "",
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    explain: Annotated[
        bool, Parameter(help="Explain the plan: limits, where time goes, and what one node more or less would change.")
    ] = False,
    emit: Annotated[
        str,
        Parameter(
            help="Print the plan for another program: megatron-bridge, megatron-mimo, ms-swift, torchtitan, veomni, "
            "torchrun, json."
        ),
    ] = "",
    picture: Annotated[
        Path | None, Parameter(help="Draw a step in arrival order and balanced: .svg, .png, .pdf.")
    ] = None,
    html: Annotated[Path | None, Parameter(help="Write the explanation as a self-contained HTML page.")] = None,
    usd_per_gpu_hour: UsdPerGpuHour = 0.0,
    overrides: Overrides = (),
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Choose the layout for a model and its data, or for a configuration, without running it.

    Profiles the dataset's headers if needed, and keeps the plans in the store. With --emit an
    explanation goes to stderr.

    Example: dflop plan Qwen2.5-VL-7B/config.json my_data --device h100 --gpus 64; dflop plan my.yaml --explain
    """
    prepare_kernels()
    from dataclasses import replace

    from rich.console import Console

    from dflop.cost.devices import find_device
    from dflop.cost.published import certainty
    from dflop.emit import emitter
    from dflop.errors import ConfigError
    from dflop.plan.robust import encoder_regrets
    from dflop.records import LLM
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table
    from dflop.report.tables import plan_table, regret_text, throughput_text
    from dflop.units import num_bytes

    say, wanted = talk(quiet), form_of(form, as_json)
    write = emitter(emit) if emit else None
    if explain and wanted == "csv":
        raise ConfigError(
            "an explanation is several tables, and CSV holds one", where="--format csv", hint="--format table or json"
        )
    check_folder(html)
    if explain or picture is not None or html is not None:
        from dflop.report.explain_page import explanation_json, explanation_page, print_explanation
        from dflop.report.plan_picture import plan_steps, save_plan_steps
        from dflop.report.plots import check_suffix
        from dflop.views.explain_plan import explain_plan, typical_steps
    if picture is not None:
        check_suffix(picture)
    asked = Given(config, data, split, download, batch, device, gpus, gpus_per_node, overrides)
    at, ranked = ranked_plans(asked, say, emit)
    cluster, sizes, found = at.cluster, at.sizes, ranked[0].outlook
    plans, speed, problem = ranked[0].found, ranked[0].speed, _ruled(found.problem, emit)
    nodes = f"{cluster.num_nodes} node{'s' * (cluster.num_nodes > 1)} of {cluster.num_processes_per_node}"
    say(
        f"{len(found.shapes)} samples, {cluster.num_processes} processes; simulated, costs {found.source}\n{nodes}, "
        f"{num_bytes(cluster.memory_per_process_bytes)} each"
    )
    emitted = _emitted(found.problem, plans[0], emit, say) if write is not None else plans[0]
    if len(sizes) > 1:
        show_batches(ranked, wanted, say, is_data=write is None and not explain)
    if write is not None:
        print(write(emitted, problem.cluster), end="")
    elif not explain and (wanted == "table" or len(sizes) < 2):
        speeds = [found.workload.throughput(p.predicted_step_s, p) for p in plans]
        table = plan_table(plans, speeds, cluster.num_processes * (wanted == "table"))
        if wanted == "table":
            shown = table.without("reason", "arrival order simulated", "uniform simulated", "processes")
            more = f"Of {len(plans)}; all of them with --format csv." * (len(plans) > table.num_shown)
            print_table(replace(shown, rows=shown.rows[: table.num_shown], note=more), Console())
        else:
            print_rows(table.header, table.rows, wanted)
    say(f"simulated: {throughput_text(speed, found.workload.num_samples, usd_per_gpu_hour)}")
    likely, why = "", ""
    if device:
        parallel, step_s = plans[0].module(LLM).parallel, plans[0].predicted_step_s
        likely, why = certainty(problem.specs[-1], parallel, find_device(device), step_s)
        say(f"likely {likely} a step: {why}")
    explained = explain_plan(problem, plans, say) if explain or html is not None else None
    steps = typical_steps(problem, plans[0]) if html is not None or picture is not None else ()
    if html is not None and explained is not None:
        given = {
            "--batch": batch, "--device": device, "--gpus": gpus, "--gpus-per-node": gpus_per_node, "--emit": emit,
            "--usd-per-gpu-hour": usd_per_gpu_hour, "--set": overrides, "--html": html,
        }  # fmt: skip
        told = throughput_text(speed, found.workload.num_samples, usd_per_gpu_hour)
        value, _, remark = told.partition(", ")
        drawn = plan_steps(plans[0], steps)
        numbers = (("speed", value, remark), *([("likely step", likely, why)] if likely else []))
        again = command_line("dflop", "plan", str(at.file), **given)
        page = explanation_page(explained, found.source, again, numbers, drawn)
        write_page(html, page, say)
    if explain and explained is not None:
        out = Console(stderr=bool(emit))
        if wanted == "json":
            print(explanation_json(explained, found.source), file=out.file)
        else:
            print_explanation(explained, found.source, out)
    else:
        say(plans[0].reason)
    if device and write is None:
        for regret in encoder_regrets(problem, plans[0], say, Meter(say)):
            say(regret_text(regret))
    if picture is not None:
        save_plan_steps(plans[0], steps, found.source, picture)
        say(f"picture of a step: {picture}")


def ranked_plans(given: Given, say: Say, emit: str = "") -> tuple[LookedAt, list[AtBatch[Sequence[Plan]]]]:
    """What was looked at, and the plans at every global batch size, the best size first; the store keeps its plans.

    Args:
        given: What is asked.
        say: Receives lines on what happens.
        emit: Of which program the plans keep the rules; empty: all that dflop can run.

    Raises:
        ConfigError, CostError: as `Given.looked_at`.
        InfeasiblePlanError: nothing fits in memory at any size.
    """
    from dataclasses import replace

    from dflop.compare.batches import AtBatch, at_batches
    from dflop.steps.planning import find_plans, spool_plans
    from dflop.store.ingest import freshen

    at = given.looked_at(say)

    def look(outlook: Outlook) -> AtBatch[Sequence[Plan]]:
        plans = find_plans(replace(outlook.task, problem=_ruled(outlook.problem, emit)), at.config, say).plans
        step_s = plans[0].predicted_step_s
        return AtBatch(outlook, plans, plans[0], step_s, outlook.workload.throughput(step_s, plans[0]))

    ranked = at_batches(at.outlook, at.sizes, look, say)
    spool_plans(at.config, ranked[0].outlook.task, ranked[0].found)
    freshen(at.config.store, ranked[0].outlook.problem.run_id, say)
    return at, ranked


def _ruled(problem: Problem, emit: str) -> Problem:
    """A problem whose plans keep the rules of a program."""
    from dataclasses import replace

    from dflop.emit import RULES

    return replace(problem, space=replace(problem.space, rules=RULES.get(emit)))


def _emitted(problem: Problem, plan: Plan, target: str, say: Say) -> Plan:
    """The plan to emit for a program; says what it costs where it is not the best one.

    Args:
        problem: Without rules of another program.
        plan: The best one under the target's rules.
        target: Of `--emit`.
        say: Receives the line.
    """
    from dflop import units
    from dflop.compare.experts.other_trainers import TRAINERS, trainer_plan
    from dflop.emit import RULES
    from dflop.plan.search import plan_problem
    from dflop.report.tables import layout_text

    if target in TRAINERS:
        how = "in arrival order" if TRAINERS[target].has_stages else "in packs"
        best, emitted = plan, trainer_plan(problem, target)
    elif target in RULES:
        best, emitted, how = plan_problem(problem, at=Meter(say))[0], plan, "in arrival order"
    else:
        return plan
    say(
        f"emitted for `{target}`: {layout_text(emitted)}, {how}, "
        f"{units.ratio(emitted.predicted_step_s / best.predicted_step_s)} the step time of the best plan, "
        f"{layout_text(best)} with {best.num_microbatches} microbatches at {units.seconds(best.predicted_step_s)}"
    )
    return emitted
