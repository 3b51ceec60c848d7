"""`dflop plan` and `dflop compare`: what a cluster would do with a dataset, simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import say
from dflop.cli.pipeline import Overrides

Device = Annotated[str, Parameter(help="Plan from the data sheet of a100, h100 or h200 instead of measured costs.")]
Form = Annotated[Literal["table", "csv", "json"], Parameter(name="--format")]


def plan(config: Path, *, device: Device = "", overrides: Overrides = (), form: Form = "table") -> None:
    """Choose the layout for a configuration without running it; profiles the dataset where that is not done.

    Example: dflop plan configs/demo.yaml --device h100 --set cluster.num_nodes=2
    """
    import asyncio

    from dflop.config import load_config
    from dflop.jobs.outlook import look_ahead
    from dflop.report.rows import print_rows
    from dflop.report.tables import plan_table

    found = asyncio.run(look_ahead(load_config(config, overrides), device, say))
    table = plan_table(found.plans)
    say(f"{len(found.shapes)} samples, {found.cluster.num_processes} processes; costs {found.source}")
    print_rows(table.header, table.rows, form)


def compare(
    config: Path, *, device: Device = "", num_batches: int = 20, overrides: Overrides = (), form: Form = "table"
) -> None:
    """Simulate global batches under the best plan, in arrival order and balanced.

    Example: dflop compare configs/demo.yaml --device h100
    """
    import asyncio

    from dflop.config import load_config
    from dflop.jobs.outlook import gain, gain_rows, look_ahead
    from dflop.report.rows import print_rows
    from dflop.report.tables import layout_text

    loaded = load_config(config, overrides)
    found = asyncio.run(look_ahead(loaded, device, say))
    gained = gain(found, num_batches, loaded.train.seed + 1)
    say(f"plan {layout_text(found.plans[0])}, {found.plans[0].num_microbatches} microbatches; costs {found.source}")
    print_rows(("policy", "mean_step_s", "worst_step_s"), gain_rows(gained), form)
    low, high = gained.interval
    say(f"speedup, simulated: {gained.speedup:.3f}x (95 % interval over {num_batches} batches {low:.3f} to {high:.3f})")
