"""The configuration that a command is given: a YAML file, or a model and its data, for which one is made."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dflop.cli.common import writing
from dflop.run.messages import Say

if TYPE_CHECKING:
    from dflop.config import Config

ConfigOrModel = Annotated[
    Path, Parameter(help="Run configuration, or with DATA a Hugging Face model: its config.json or folder.")
]
Data = Annotated[Path | None, Parameter(help="Training data for that model: a file of rows, or its folder.")]
MADE = Path(".dflop/configurations")
"""Where configurations are kept that were made for a model and its data."""


def configured(
    given: Path, data: Path | None, say: Say, *, gpus: int | None, overrides: Sequence[str]
) -> tuple[Config, Path]:
    """(configuration, its file).

    Args:
        given: Configuration file, or with `data` a model.
        data: None with a configuration file.
        say: Hears what was found and what was assumed.
        gpus: That the global batch is for where a configuration is made.
        overrides: `key=value`s.

    Raises:
        ConfigError: the configuration is wrong, or a model has no data; the model is not known, or there is no data.
    """
    from dflop.config import load_config
    from dflop.errors import ConfigError

    if data is None:
        if given.is_dir() or given.name == "config.json":
            raise ConfigError(
                f"`{given}` is a model, and a plan depends on its data", hint=f"name the data: {given} DATA"
            )
        return load_config(given, overrides), given
    path = _made(given, data, say, gpus, has_tokenizer=any(x.startswith("dataset.tokenizer=") for x in overrides))
    say(f"configuration: {path}, for `dflop run` and `dflop config show`; change any key: --set KEY=VALUE")
    return load_config(path, overrides), path


def _made(model: Path, data: Path, say: Say, gpus: int | None, *, has_tokenizer: bool) -> Path:
    """File of a configuration, whose name has its content in it, so that nothing that a person edited is lost."""
    from dflop import files
    from dflop.errors import ConfigError
    from dflop.starter.starter import make_starter

    made = make_starter(model, data, gpus)
    if made.tokenizer_problem and not has_tokenizer:
        raise ConfigError(
            made.tokenizer_problem, where="dataset.tokenizer", hint="--set dataset.tokenizer=PATH/tokenizer.json"
        )
    digest = hashlib.sha256(made.text.encode()).hexdigest()[:8]
    path = MADE / f"{made.name}-{digest}.yaml"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            files.replace(path, made.text)
    for line in made.found:
        say(f"found    {line}")
    for line in made.to_edit:
        say(f"assumed  {line}")
    return path
