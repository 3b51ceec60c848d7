"""`dflop compare`: is it worth it? Plans and policies side by side, simulated, on one's own data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import (
    Form,
    Json,
    Overrides,
    Quiet,
    UsdPerGpuHour,
    at_least,
    check_folder,
    command_line,
    form_of,
    talk,
    write_page,
)
from dflop.cli.configured import Batch, ConfigOrModel, Data, Download, Given, LookedAt, Split, show_batches
from dflop.cli.plan import Device, Gpus, GpusPerNode
from dflop.run.messages import Say

if TYPE_CHECKING:
    from dflop.compare.batches import AtBatch
    from dflop.compare.contest import Contest
    from dflop.compare.outlook import Outlook

Policy = Literal["token_lpt", "token_kk", "length_grouped", "bottleneck", "program"]


def compare(
    config: ConfigOrModel,
    data: Data = (),
    *,
    split: Split = "",
    download: Download = False,
    batch: Batch = "",
    device: Device = "",
    gpus: Gpus = None,
    gpus_per_node: GpusPerNode = None,
    num_batches: Annotated[int, Parameter(help="Held-out global batches to simulate.", validator=at_least(1))] = 8,
    policy: Annotated[
        tuple[Policy, ...],
        Parameter(help="Also simulate dflop's plan under this policy; `program`: the paper's, 5 s a batch."),
    ] = (),
    num_steps: Annotated[
        int, Parameter(help="Training steps used for the cost estimate.", validator=at_least(1))
    ] = 10_000,
    usd_per_gpu_hour: UsdPerGpuHour = 0.0,
    html: Annotated[Path | None, Parameter(help="Write a self-contained HTML page.")] = None,
    overrides: Overrides = (),
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Simulate baseline trainers, what experts run, and dflop.

    All get the same global batches; no GPU is needed.

    Example: dflop compare my.yaml --device h100 --num-steps 5000
    """
    from rich.console import Console

    from dflop.compare.trainers import COLUMNS, comparison_rows, comparison_table, data_page, verdict
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table

    check_folder(html)
    say, wanted = talk(quiet), form_of(form, as_json)
    asked = Given(config, data, split, download, batch, device, gpus, gpus_per_node, overrides)
    at, ranked = contests(asked, say, num_batches, policy)
    loaded, file, sizes = at.config, at.file, at.sizes
    outlook, contest = ranked[0].outlook, ranked[0].found
    if len(sizes) > 1:
        show_batches(ranked, wanted, say)
    if html is not None:
        given = {
            "--batch": batch, "--device": device, "--gpus": gpus, "--gpus-per-node": gpus_per_node,
            "--num-batches": num_batches, "--policy": policy, "--num-steps": num_steps,
            "--usd-per-gpu-hour": usd_per_gpu_hour, "--set": overrides, "--html": html,
        }  # fmt: skip
        again = command_line("dflop", "compare", str(file), **given)
        write_page(html, data_page(contest, loaded, again, num_steps, usd_per_gpu_hour), say)
    if wanted == "table":
        print_table(comparison_table(contest, num_steps, usd_per_gpu_hour), Console())
    elif len(sizes) < 2:
        print_rows(tuple(COLUMNS), comparison_rows(contest, num_steps, usd_per_gpu_hour), wanted)
    say(f"simulated on {num_batches} held-out batches; costs {outlook.source}")
    say(contest.ours.reason)
    say(verdict(contest))


def contests(
    given: Given, say: Say, num_batches: int, policies: Sequence[str] = ()
) -> tuple[LookedAt, list[AtBatch[Contest]]]:
    """What was looked at, and dflop next to baseline trainers at every global batch size, best size first.

    Args:
        given: What is asked.
        say: Receives lines on what happens.
        num_batches: Held-out global batches that are simulated.
        policies: Under which dflop's plan is simulated, too.

    Raises:
        ConfigError, CostError: as `Given.looked_at`.
        InfeasiblePlanError: nothing fits in memory at any size.
    """
    from dflop.compare.batches import AtBatch, at_batches
    from dflop.compare.contest import OURS
    from dflop.compare.trainers import compare_on_data

    at = given.looked_at(say)

    def look(outlook: Outlook) -> AtBatch[Contest]:
        found = compare_on_data(outlook, num_batches, at.config.train.seed + 1, say, policies)
        plan, step_s = found.ours, found.steps[OURS].mean_s
        return AtBatch(outlook, found, plan, step_s, found.setting.workload.throughput(step_s, plan))

    return at, at_batches(at.outlook, at.sizes, look, say)
