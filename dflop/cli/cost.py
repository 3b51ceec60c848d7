"""`dflop profile` and `dflop cost`: what the modules of a model cost on this hardware."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from dflop.cli.common import DEFAULT_STORE, ConfigFile, DryRun, Form, Json, Overrides, Quiet, Store, form_of, talk
from dflop.run.messages import Say

if TYPE_CHECKING:
    from dflop.config import Config

app = App(name="cost", help="Cost tables: seconds and bytes of every module, and how sure they are.")

Key = Annotated[str, Parameter(help="Profile key, or the first digits of one; the newest profile without it.")]


def profile(
    config: ConfigFile,
    *,
    overrides: Overrides = (),
    dry_run: DryRun = False,
    device: Annotated[str, Parameter(help="With -n: seconds by the data sheet of a100, h100 or h200.")] = "",
    as_json: Annotated[bool, Parameter(name="--json", help="With -n: an object of JSON per probe.")] = False,
    quiet: Quiet = False,
) -> None:
    """Time the modules of a model over its dataset; print the profile's key.

    Nothing is timed where the store has the profile. Probes run as jobs of the configured cluster. With -n they are
    listed instead.

    Example: dflop profile configs/demo.yaml; dflop profile configs/demo.yaml -n --device h100
    """
    from dflop.cli.sigterm import run_driver
    from dflop.config import load_config

    loaded = load_config(config, overrides)
    say = talk(quiet)
    if dry_run:
        _show_probes(loaded, device, "json" if as_json else "table", say)
        return
    from dflop.steps.profiling import profile_modules

    key = run_driver(profile_modules(loaded, say))
    say(f"dflop cost show {key}")
    print(key)


def _show_probes(config: Config, device: str, form: str, say: Say) -> None:
    from dflop.cli.sigterm import run_driver
    from dflop.compare.outlook import look_at_probes
    from dflop.report.rows import print_rows
    from dflop.units import seconds

    probes = run_driver(look_at_probes(config, device, say))
    rows = [
        (p.module, p.way.name, p.tp, p.num_layers, p.group, p.num_samples, p.load.num_tokens,
         "" if p.seconds is None else seconds(p.seconds))
        for p in probes
    ]  # fmt: skip
    print_rows(("module", "way", "tp", "layers", "group", "samples", "tokens", "all repeats"), rows, form)
    known = [p.seconds for p in probes if p.seconds is not None]
    if known:
        say(f"{len(probes)} probes, {seconds(sum(known))} by the data sheet; building the modules comes on top")


@app.command
def show(
    key: Key = "",
    /,
    *,
    store: Store = DEFAULT_STORE,
    output: Annotated[Path | None, Parameter(help="Draw into this .png, .svg or .pdf instead.")] = None,
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the cost tables of a model profile: errors beside noise, curves, residuals.

    Example: dflop cost show --output cost.svg
    """
    from dflop.records import Measurement
    from dflop.report.cost_plots import (
        COLUMNS,
        RESIDUAL_COLUMNS,
        fitted,
        residual_rows,
        save_cost_plots,
        table_rows,
    )
    from dflop.report.rows import print_rows
    from dflop.store.profile_frames import find_profile
    from dflop.store.reader import Reader

    found = find_profile(store, key, "model")
    with Reader(store) as reader:
        tables = reader.latest_cost_tables(found["profile_key"])
        measurements = reader.records(Measurement, where={"profile_key": found["profile_key"]})
    pairs = fitted(tables, measurements)
    title = f"{found['model_family']} on {found['hardware']}, profile {found['profile_key']}"
    if output is not None:
        save_cost_plots(pairs, output, title)
        print(output)
        return
    shown = form_of(form, as_json)
    if shown == "table":
        talk(quiet)(title)
    print_rows(COLUMNS, table_rows(pairs), shown)
    if shown == "table":
        print_rows(RESIDUAL_COLUMNS, [row for pair in pairs for row in residual_rows(pair)], shown)
