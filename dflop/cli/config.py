"""`dflop config`: what a configuration says, whether it could run, and its schema for editors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from dflop.cli.common import ConfigFile, Json, Overrides
from dflop.run.messages import say

if TYPE_CHECKING:
    from dflop.errors import DflopError

app = App(name="config", help="Run configurations: show one resolved, check one, describe them to an editor.")


@app.command
def show(
    config: ConfigFile,
    *,
    overrides: Overrides = (),
    plain: Annotated[
        bool, Parameter(negative="--origins", help="Without the comments that say where values come from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a configuration with every default, and where each value comes from.

    That is a file and line, or --set; media limits that no file states have the family's defaults. What
    is printed is a configuration itself, but for passwords and keys in it, which are shown as ***.

    Example: dflop config show configs/demo.yaml --set train.num_steps=20
    """
    from dflop.config import annotated, load_with_origins, shown_config, shown_keys
    from dflop.steps.preflight import with_every_limit

    loaded = load_with_origins(config, overrides)
    if not plain:
        loaded = with_every_limit(loaded)
    if as_json:
        for key in shown_keys(loaded):
            print(json.dumps(key._asdict()))
        return
    print(shown_config(loaded.config) if plain else annotated(loaded), end="")


@app.command
def schema(
    kind: Annotated[
        Literal["run", "model", "cluster", "dataset"], Parameter(help="A whole run, or a section in its own file.")
    ] = "run",
    /,
) -> None:
    """Print the JSON schema of a kind of configuration file, for editors.

    They complete and check YAML with it. Name it in the first line of a file: # yaml-language-server:
    $schema=dflop.schema.json

    Example: dflop config schema > dflop.schema.json
    """
    from dflop.config import json_schema

    print(json.dumps(json_schema(kind), indent=2))


@app.command
def validate(config: ConfigFile, *, overrides: Overrides = (), as_json: Json = False) -> None:
    """Check what a run would check before it starts anything.

    Every problem is a line with file, line and key. Exit code 2 when there are problems. What only this machine lacks,
    such as sbatch, is a warning.

    Example: dflop config validate configs/demo.yaml
    """
    from dflop.config import load_problems, load_with_origins
    from dflop.steps.preflight import problems, remarks

    found: list[DflopError] = [*load_problems(config, overrides)]
    if not found:
        loaded = load_with_origins(config, overrides)
        for problem in problems(loaded.config, loaded.origins):
            if problem.is_of_machine:
                say(f"on this machine: {_line(problem.error)}")
            else:
                found.append(problem.error)
        for remark in () if found else remarks(loaded.config, loaded.origins):
            say(f"warning: {_line(remark)}")
    for error in found:
        print(json.dumps({"where": error.where, "what": error.what, "hint": error.hint}) if as_json else _line(error))
    if found:
        say(f"dflop: {len(found)} problem{'s' * (len(found) > 1)} in {config}")
        raise SystemExit(found[0].exit_code)
    if not as_json:
        print(f"{config}: ok")


def _line(error: DflopError) -> str:
    """One line, as compilers write it, so that editors and grep find the place."""
    what = " ".join(f"{error.what}{f' ({error.hint})' if error.hint else ''}".split())
    return f"{error.where}: {what}" if error.where else what
