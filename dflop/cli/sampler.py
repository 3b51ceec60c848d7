"""`dflop sampler`: what the sampler alone would gain a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from dflop.cli.common import Form, Json, Quiet, at_least, form_of, prepare_kernels, talk

app = App(name="sampler", help="The sampler alone, in another trainer: what it would gain.")


@app.command
def estimate(
    lengths: Annotated[Path, Parameter(help="Of all samples: .txt, .csv, .json, .jsonl, .parquet, .npy, or .npz.")],
    /,
    *,
    ranks: Annotated[int, Parameter(help="Data-parallel ranks.")],
    batch: Annotated[int | None, Parameter(help="Samples per optimizer step over all ranks; 8 each without.")] = None,
    microbatches: Annotated[int, Parameter(help="Per rank and step: gradient accumulation.")] = 1,
    padded: Annotated[bool, Parameter(help="The collator pads to the longest of a microbatch.")] = False,
    sync: Annotated[
        Literal["step", "microbatch"], Parameter(help="Where ranks wait: DDP once per step, FSDP per microbatch.")
    ] = "step",
    window: Annotated[
        int | None, Parameter(help="Global batches that dflop's window sorts together; as group_by_length without.")
    ] = None,
    max_steps: Annotated[int, Parameter(help="Steps that are simulated.", validator=at_least(1))] = 200,
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Estimate what waiting for the slowest rank costs, under the usual orders and with dflop's sampler; a verdict.

    A file has numbers, a `length` or `input_ids` column, and a `cost` column where cost is more than tokens; .npz is
    what `media_costs(...).save` wrote. Simulated: no communication, and ranks equally fast.

    Example: dflop sampler estimate lengths.txt --ranks 8 --microbatches 4 --padded
    """
    prepare_kernels()
    from rich.console import Console

    from dflop import units
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table
    from dflop.report.tables import make_table
    from dflop.sampler.estimate import RANDOM, Setting, costs_of_file, estimate_waiting, verdict

    say, shown = talk(quiet), form_of(form, as_json)
    costs = costs_of_file(lengths, say)
    setting = Setting(ranks, 8 * ranks * microbatches if batch is None else batch, microbatches, padded, sync, window)
    found = estimate_waiting(costs, setting, max_steps=max_steps)
    by_order = {of.order: of.step_cost for of in found}
    if shown != "table":
        header = ("order", "waiting_frac", "padding_frac", "speedup", "num_steps")
        rows = [(w.order, w.waiting_frac, w.padding_frac, by_order[RANDOM] / w.step_cost, w.num_steps) for w in found]
        print_rows(header, rows, shown)
        say(verdict(found))
        return
    table = make_table(
        f"Waiting, simulated: {ranks} ranks x {units.counted(microbatches, 'microbatch', 'microbatches')}, "
        f"{setting.batch_size} samples a step",
        found,
        {
            "order": lambda of: of.order,
            "waiting": lambda of: units.percent(of.waiting_frac),
            "padding": lambda of: units.percent(of.padding_frac),
            "step time": lambda of: units.percent(of.step_cost / by_order[RANDOM]),
            "speedup": lambda of: units.ratio(by_order[RANDOM] / of.step_cost),
        },
        {"order"},
        "Waiting: 1 - mean / longest of the ranks' times. Step time: over random order.",
    )
    print_table(table, Console())
    print(verdict(found))
