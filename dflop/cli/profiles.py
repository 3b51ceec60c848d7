"""`dflop data`, `dflop profile` and `dflop cost`: what a dataset costs every module, what a module costs here."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from dflop.cli.common import (
    DEFAULT_STORE,
    ConfigFile,
    DryRun,
    Form,
    Json,
    Overrides,
    Quiet,
    Store,
    at_least,
    form_of,
    talk,
)
from dflop.cli.configured import ConfigOrModel, Data, Split
from dflop.cli.plan import Device
from dflop.errors import printable
from dflop.run.messages import Say

if TYPE_CHECKING:
    from dflop.config import Config

cost = App(name="cost", help="Cost tables: seconds and bytes of every module, with their errors.")
data = App(name="data", help="Data profiles: tokens of every sample per module, from headers alone.")

Key = Annotated[str, Parameter(help="Profile key, or the first digits of one; the newest profile without it.")]
Output = Annotated[Path | None, Parameter(help="Write a chart to this .png, .svg or .pdf instead.")]


def profile(
    config: ConfigFile,
    *,
    overrides: Overrides = (),
    dry_run: DryRun = False,
    device: Annotated[str, Parameter(help="With -n: seconds by the data sheet of a100, h100, ...")] = "",
    as_json: Annotated[bool, Parameter(name="--json", help="With -n: one JSON object per probe.")] = False,
    quiet: Quiet = False,
) -> None:
    """Time the modules of a model over its dataset; print the profile's key.

    Skipped where the store has the profile. Probes run as jobs of the configured cluster. With -n they are
    listed instead.

    Example: dflop profile configs/demo.yaml; dflop profile configs/demo.yaml -n --device h100
    """
    from dflop.config import load_config

    loaded = load_config(config, overrides)
    say = talk(quiet)
    if dry_run:
        _show_probes(loaded, device, "json" if as_json else "table", say)
        return
    from dflop.steps.session import profile_modules

    key = asyncio.run(profile_modules(loaded, say))
    say(f"dflop cost show {key}")
    print(key)


def _show_probes(config: Config, device: str, form: str, say: Say) -> None:
    from dflop.compare.outlook import look_at_probes
    from dflop.report.rows import print_rows
    from dflop.units import seconds

    probes = asyncio.run(look_at_probes(config, device, say))
    rows = [
        (p.module, p.way.name, p.tp, p.num_layers, p.group, p.num_samples, p.load.num_tokens,
         "" if p.seconds is None else seconds(p.seconds))
        for p in probes
    ]  # fmt: skip
    print_rows(("module", "way", "tp", "layers", "group", "samples", "tokens", "all repeats"), rows, form)
    known = [p.seconds for p in probes if p.seconds is not None]
    if known:
        say(
            f"{len(probes)} probes, {seconds(sum(known))} by the data sheet; building the modules takes additional time"
        )


@cost.command(name="show")
def show_cost(
    key: Key = "",
    /,
    *,
    store: Store = DEFAULT_STORE,
    output: Output = None,
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the cost tables of a model profile: fit errors, measurement noise, curves, residuals.

    Example: dflop cost show --output cost.svg
    """
    from dflop.records import Measurement
    from dflop.report import cost_plots as plots
    from dflop.report.rows import print_rows
    from dflop.store.profile_frames import find_profile
    from dflop.store.reader import Reader

    found = find_profile(store, key, "model")
    with Reader(store) as reader:
        tables = reader.latest_cost_tables(found["profile_key"])
        measurements = reader.records(Measurement, where={"profile_key": found["profile_key"]})
    pairs = plots.fitted(tables, measurements)
    title = f"{found['model_family']} on {found['hardware']}, profile {found['profile_key']}"
    if output is not None:
        plots.save_cost_plots(pairs, output, title)
        print(output)
        return
    shown = form_of(form, as_json)
    if shown == "table":
        talk(quiet)(title)
    print_rows(plots.COLUMNS, plots.table_rows(pairs), shown)
    if shown == "table":
        print_rows(plots.RESIDUAL_COLUMNS, [row for pair in pairs for row in plots.residual_rows(pair)], shown)


@cost.command(name="published")
def published_cost(
    config: ConfigOrModel,
    data: Data = (),
    *,
    device: Device = "",
    overrides: Overrides = (),
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what each term of a model's costs is by a data sheet, by measurement, and in plans; and published trainings.

    Terms are of every tensor-parallel degree that has costs, and of messages. JSON and CSV have the terms alone, in
    seconds and bytes.

    Example: dflop cost published my.yaml; dflop cost published my.yaml --device h100
    """
    from rich.console import Console

    from dflop.cli.configured import Given
    from dflop.cost.devices import sheet_of
    from dflop.cost.terms import cost_terms
    from dflop.records import RunMode
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table
    from dflop.report.terms_table import published_table, terms_table

    say, shown = talk(quiet), form_of(form, as_json)
    outlook = Given(config, data, device=device, overrides=overrides).looked_at(say).outlook
    problem, source = outlook.problem, outlook.source
    degrees = sorted({(table.module, table.tp) for table in problem.cost.tables})
    modes = [(spec, RunMode(tp)) for spec in problem.specs for module, tp in degrees if module == spec.module]
    terms = cost_terms(problem.cost, modes, problem.cluster)
    say(f"costs {source}")
    if shown != "table":
        names = "name", "unit", "sheet", "measured", "used"
        print_rows(names, [tuple(getattr(term, name) for name in names) for term in terms], shown)
        return
    print_table(terms_table(terms), Console())
    if sheet := sheet_of(problem.cost.tables[0].hardware):
        print_table(published_table(sheet), Console())
    else:
        say(f"{problem.cost.tables[0].hardware} has no data sheet; --device h100 shows one")


@cost.command(name="drift")
def cost_drift(
    before: Annotated[str, Parameter(help="Key of a model profile, or its first digits, or a run.")],
    after: Annotated[str, Parameter(help="The other profile or run.")],
    /,
    *,
    store: Store = DEFAULT_STORE,
    threshold: Annotated[
        float, Parameter(help="Relative change that counts as drift, 0.1: 10 %.", validator=at_least(0))
    ] = 0.1,
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare the costs of two model profiles: of modules with their corrections, and of links.

    Exit code 1 when one changed by more than the threshold and twice the median error of its fits. Modules: seconds
    of a layer per million tokens, in microbatches of 8 sequences of 1024 tokens. Links: seconds per 64 MiB.
    `dflop sql cost_history` shows the fits of one module over time.

    Example: dflop cost drift 1f0c 77ab
    """
    from dflop.report.rows import print_rows
    from dflop.store.console import named_query, query
    from dflop.store.profile_frames import profile_of_costs

    found = [profile_of_costs(store, name) for name in (before, after)]
    params = {name: p["profile_key"] for name, p in zip(("before", "after"), found, strict=True)}
    columns, rows = query(store, named_query("cost_drift").sql, params)
    drifts = [dict(zip(columns, row, strict=True)) for row in rows]
    for row in drifts:
        least = max(threshold, 2 * row["median_error_frac"])
        row["drifted"] = row["change_ratio"] is not None and abs(row["change_ratio"] - 1) > least
    names, shown = [*columns, "drifted"], form_of(form, as_json)
    if shown == "table":  # machines stand above it
        names = [name for name in names if name != "what" and not name.startswith("hardware")]
        for word, p in zip(("before", "after"), found, strict=True):
            talk(quiet)(f"{word}: {p['profile_key']}, {p['hardware']}, {p['created_at']:%Y-%m-%d %H:%M} UTC")
    print_rows(names, [tuple(row[name] for name in names) for row in drifts], shown)
    if any(row["drifted"] for row in drifts):
        sys.exit(1)


@data.command(name="card")
def show_card(
    path: Annotated[
        Path, Parameter(help="Data: a file, a pattern of several, a folder, or an index such as a mixture.")
    ],
    /,
    *,
    split: Split = "",
    form: Form = "table",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what lies at a path: layout, splits, rows, formats and columns, and what a run would train on.

    Exit code 2 when several parts could be meant; the message lists them.

    Example: dflop data card my_data; dflop data card my_data --split validation --json
    """
    from dflop.data.card import read_card
    from dflop.report.rows import print_rows

    card, shown = read_card(path, split), form_of(form, as_json)
    rows = [
        (of in card.taken, of.split, of.name, card.layout.kind, of.format, of.num_rows, of.is_estimate,
         len(of.entry.paths), of.repeats, ", ".join(of.columns), of.problem)
        for of in (*card.taken, *card.left)
    ]  # fmt: skip
    names = ("taken", "split", "name", "layout", "format", "rows", "estimate", "files", "repeats", "columns", "problem")
    print_rows(names, rows, shown)
    for line in card.lines():
        talk(quiet or shown != "table")(line)


@data.command(name="profile")
def profile_data(
    config: ConfigFile, *, overrides: Overrides = (), dry_run: DryRun = False, quiet: Quiet = False
) -> None:
    """Profile the dataset of a configuration; print the profile's key.

    Skipped where the store has the profile. Shards run as jobs of the configured cluster.

    Example: dflop data profile configs/demo.yaml
    """
    from dflop.config import load_with_origins
    from dflop.steps.dry_run import forecast_dataset
    from dflop.steps.preflight import with_every_limit
    from dflop.steps.session import profile_dataset

    given, say = load_with_origins(config, overrides), talk(quiet)
    loaded = given.config
    stated = loaded.model.media
    for key, value in with_every_limit(given).config.model.media.items():
        say(f"model.media.{key}: {value}, {given.origins.of('model', 'media', key) if key in stated else 'default'}")
    if dry_run:
        if key := forecast_dataset(loaded, say):
            print(key)
        return
    found = asyncio.run(profile_dataset(loaded, say))
    say(f"{found.num_rows} samples, {found.num_quarantined} skipped; dflop data show {found.profile_key}")
    print(found.profile_key)


@data.command(name="show")
def show_data(
    key: Key = "",
    /,
    *,
    store: Store = DEFAULT_STORE,
    output: Output = None,
    form: Form = "table",
    as_json: Json = False,
) -> None:
    """Show a profile's distribution: quantiles, histograms, LLM against encoder tokens.

    Example: dflop data show --output data.svg
    """
    from rich.console import Console
    from rich.text import Text

    from dflop.data.distribution import summary, tokens_of
    from dflop.report.data_plots import Profile, print_plots, save_plots
    from dflop.report.rows import print_rows
    from dflop.store.profile_frames import find_profile, profile_frame

    found = find_profile(store, key)
    frame = profile_frame(store, found["profile_key"])
    table = summary(frame)
    title = f"{Path(found['annotations'] or '?').name}, {found['model_family']}, profile {found['profile_key']}"
    weights = frame["weight"].to_numpy()
    drawn = Profile(title, frame["group"].to_list(), tokens_of(frame), weights * (len(weights) / weights.sum()))
    if output is not None:
        save_plots(drawn, output)
        print(output)
        return
    if (shown := form_of(form, as_json)) != "table":
        print_rows(table.columns, table.rows(), shown)
        return
    console = Console()
    changed = frame.filter((frame["media_level"] > 0) | (frame["num_cut_tokens"] > 0)).height
    # Plain text: the name of a file may look like console markup.
    console.print(Text(printable(title)))
    console.print(f"{frame.height} samples, {changed} of them shortened, {found['num_quarantined']} skipped")
    print_rows(table.columns, table.rows(), "table")
    print_plots(drawn, console)


@data.command
def drift(
    before: Annotated[str, Parameter(help="Profile key, or the first digits of one.")],
    after: Annotated[str, Parameter(help="Key of the other profile.")],
    /,
    *,
    store: Store = DEFAULT_STORE,
    threshold: Annotated[float, Parameter(help="Distance that counts as drift, 0..1.", validator=at_least(0))] = 0.1,
    form: Form = "table",
    as_json: Json = False,
) -> None:
    """Compare two profiles: has the data drifted?

    Exit code 1 when their distance exceeds both chance and the threshold. Distances are Kolmogorov-Smirnov
    (tokens) and total variation (groups), 0..1.

    Example: dflop data drift 1f0c 77ab
    """
    from dflop.data.distribution import drift as measure
    from dflop.report.rows import print_rows
    from dflop.store.profile_frames import find_profile, profile_frame

    keys = [find_profile(store, key)["profile_key"] for key in (before, after)]
    found = measure(*(profile_frame(store, key) for key in keys))
    beyond = found.beyond(threshold)
    rows = [(s.quantity, s.distance, s.chance, s.mean_ratio, s in beyond) for s in found.shifts]
    print_rows(("quantity", "distance", "chance", "mean_ratio", "drifted"), rows, form_of(form, as_json))
    if beyond:
        sys.exit(1)
