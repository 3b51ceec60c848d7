"""`dflop init`: a commented configuration to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dflop.cli.common import Quiet, check_folder, talk, writing


def init(
    *,
    model: Annotated[
        Path, Parameter(help="config.json of a Hugging Face model, or its folder; what lies there is used.")
    ],
    data: Annotated[Path, Parameter(help="File of training data, or the folder it is in.")],
    gpus: Annotated[int | None, Parameter(help="Make the global batch for so many GPUs, not this machine's.")] = None,
    out: Annotated[Path | None, Parameter(help="File to write; stdout without it.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a commented configuration for a model and a dataset.

    What was found, what was not and what must be edited is said.

    Example: dflop init --model InternVL3-1B-hf/config.json --data my_data --out my.yaml
    """
    from dflop.errors import ConfigError
    from dflop.starter.starter import make_starter

    if out is not None and out.exists():
        raise ConfigError("there is something there already", where=str(out), hint="name a new file")
    check_folder(out)
    say, made = talk(quiet), make_starter(model, data, gpus)
    if out is None:
        print(made.text, end="")
    else:
        with writing(out):
            out.write_text(made.text, encoding="utf-8")
        print(out)
    for line in made.found:
        say(f"found  {line}")
    for line in made.to_edit:
        say(f"edit   {line}")
    file, planned = out or "FILE", f" --gpus {gpus}" if gpus else ""
    say(f"then   dflop config validate {file}; dflop plan {file} --device h100{planned}")
