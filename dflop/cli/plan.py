"""`dflop plan`: which layout a cluster would give a model on a dataset, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import say
from dflop.cli.pipeline import Overrides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dflop.config import Config
    from dflop.plan.space import Problem
    from dflop.records import Plan

Device = Annotated[str, Parameter(help="Plan from the data sheet of a100, h100 or h200 instead of measured costs.")]
Form = Annotated[Literal["table", "csv", "json"], Parameter(name="--format")]


def plan(
    config: Path,
    *,
    device: Device = "",
    gpus: Annotated[int, Parameter(help="Plan for so many GPUs instead of the cluster's.")] = 0,
    explain: Annotated[bool, Parameter(help="Say what binds, where time goes, and what a node more would do.")] = False,
    emit: Annotated[str, Parameter(help="Print the plan for another program: megatron-mimo, torchrun, json.")] = "",
    picture: Annotated[Path | None, Parameter(help="Draw a step, data-blind and balanced: .svg, .png, .pdf.")] = None,
    overrides: Overrides = (),
    form: Form = "table",
) -> None:
    """Choose the layout for a configuration without running it; profiles the dataset where that is not done.

    Example: dflop plan configs/demo.yaml --device h100 --gpus 16 --explain
    """
    import asyncio
    from dataclasses import replace

    from dflop.jobs.outlook import look_ahead
    from dflop.plan.emit import RULES, emitter
    from dflop.plan.search import plan_problem
    from dflop.report.rows import print_rows
    from dflop.report.tables import plan_table

    write = emitter(emit) if emit else None
    loaded = _load(config, overrides, gpus)
    found = asyncio.run(look_ahead(loaded, device, say))
    problem = replace(found.problem, space=replace(found.problem.space, rules=RULES.get(emit)))
    plans = plan_problem(problem, top=loaded.plan.top, progress=say)
    say(f"{len(found.shapes)} samples, {problem.cluster.num_processes} processes; simulated, costs {found.source}")
    say(plans[0].reason)
    if write is not None:
        print(write(plans[0], problem.cluster), end="")
    elif explain:
        _explain(problem, plans, found.source, form)
    else:
        table = plan_table(plans)
        print_rows(table.header, table.rows, form)
    if picture is not None:
        from dflop.jobs.explain import save_plan_picture

        save_plan_picture(problem, plans[0], picture)


def _load(path: Path, overrides: tuple[str, ...], gpus: int) -> Config:
    """The configuration, on another number of GPUs where one is asked for."""
    from dflop.config import load_config
    from dflop.errors import ConfigError

    loaded = load_config(path, overrides)
    if not gpus:
        return loaded
    each = min(loaded.cluster.num_processes_per_node, gpus)
    if gpus < 0 or gpus % each:
        raise ConfigError(
            f"{gpus} GPUs are not whole nodes of {each}",
            where="--gpus",
            hint=f"a multiple of {each}, or other nodes: --set cluster.num_processes_per_node=...",
        )
    nodes = {"cluster.num_nodes": gpus // each, "cluster.num_processes_per_node": each}
    return load_config(path, (*overrides, *(f"{key}={value}" for key, value in nodes.items())))


def _explain(problem: Problem, plans: Sequence[Plan], source: str, form: Literal["table", "csv", "json"]) -> None:
    """Tables on stdout, sentences on stderr."""
    from dflop.jobs.explain import explain_plan, explanation_tables
    from dflop.report.rows import print_rows

    found = explain_plan(problem, plans, say)
    for sentence in (*found.constraints, found.paragraph):
        say(sentence)
    for name, columns, rows in explanation_tables(found):
        say(f"{name} (simulated, costs {source}):")
        print_rows(columns, rows, form)
