"""`dflop data`: what a dataset will cost every module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from dflop.cli.common import DEFAULT_STORE, ConfigFile, DryRun, Form, Json, Overrides, Quiet, Store, form_of, talk
from dflop.errors import printable

app = App(name="data", help="Data profiles: what every sample costs each module, from headers alone.")

Key = Annotated[str, Parameter(help="Profile key, or the first digits of one; the newest profile without it.")]


@app.command
def profile(config: ConfigFile, *, overrides: Overrides = (), dry_run: DryRun = False, quiet: Quiet = False) -> None:
    """Profile the dataset of a configuration; print the profile's key.

    Nothing is read where the store has the profile. Shards run as jobs of the configured cluster.

    Example: dflop data profile configs/demo.yaml
    """
    from dflop.cli.sigterm import run_driver
    from dflop.config import load_with_origins
    from dflop.steps.media_limits import limit_lines
    from dflop.steps.profiling import forecast_dataset, profile_dataset

    given, say = load_with_origins(config, overrides), talk(quiet)
    loaded = given.config
    for line in limit_lines(given):
        say(line)
    if dry_run:
        if key := forecast_dataset(loaded, say):
            print(key)
        return
    found = run_driver(profile_dataset(loaded, say))
    say(f"{found.num_rows} samples, {found.num_quarantined} quarantined; dflop data show {found.profile_key}")
    print(found.profile_key)


@app.command
def show(
    key: Key = "",
    /,
    *,
    store: Store = DEFAULT_STORE,
    output: Annotated[Path | None, Parameter(help="Draw into this .png, .svg or .pdf instead.")] = None,
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
    console.print(f"{frame.height} samples, {changed} of them made shorter, {found['num_quarantined']} left out")
    print_rows(table.columns, table.rows(), "table")
    print_plots(drawn, console)


@app.command
def drift(
    before: Annotated[str, Parameter(help="Profile key, or the first digits of one.")],
    after: Annotated[str, Parameter(help="Another one.")],
    /,
    *,
    store: Store = DEFAULT_STORE,
    threshold: Annotated[float, Parameter(help="Distance from which on it is a drift, 0..1.")] = 0.1,
    form: Form = "table",
    as_json: Json = False,
) -> None:
    """Compare two profiles: has the data moved?

    Exit code 1 when they are farther apart than chance and than the threshold. Distances are Kolmogorov-Smirnov
    (tokens) and total variation (groups), 0..1.

    Example: dflop data drift 1f0c 77ab
    """
    from dflop.data.profile_distance import drift as measure
    from dflop.report.rows import print_rows
    from dflop.store.profile_frames import find_profile, profile_frame

    keys = [find_profile(store, key)["profile_key"] for key in (before, after)]
    found = measure(*(profile_frame(store, key) for key in keys))
    beyond = found.beyond(threshold)
    rows = [(s.quantity, s.distance, s.chance, s.mean_ratio, s in beyond) for s in found.shifts]
    print_rows(("quantity", "distance", "chance", "mean_ratio", "drifted"), rows, form_of(form, as_json))
    if beyond:
        sys.exit(1)
