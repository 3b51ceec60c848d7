"""The configuration that a command is given: a YAML file, or a model and its data, for which one is made."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import Parameter

from dflop.cli.common import check_source, writing
from dflop.run.messages import Say

if TYPE_CHECKING:
    from dflop.compare.batches import AtBatch
    from dflop.compare.outlook import Outlook
    from dflop.config import Config
    from dflop.records import ClusterSpec

T = TypeVar("T")
ConfigOrModel = Annotated[
    Path,
    Parameter(
        help="Run configuration, or with DATA a model: Hugging Face config.json, its folder, or a model's YAML.",
        validator=check_source,
    ),
]
Data = Annotated[
    tuple[Path, ...],
    Parameter(
        help="Training data for that model: a file of rows, or its folder; several: a mixture.", validator=check_source
    ),
]
Download = Annotated[bool, Parameter(help="Fetch models and data named as on the Hugging Face hub.")]
Split = Annotated[
    str, Parameter(help="Split of the data to train on, or several with commas; default: the one for training.")
]
Batch = Annotated[str, Parameter(help="Samples of a global batch; several, such as 128,256,512, are compared.")]
MADE = Path(".dflop/configurations")
"""Where configurations are kept that were made for a model and its data."""


def batch_sizes(text: str) -> tuple[int, ...]:
    """The sizes of `--batch`, each once, ascending.

    Raises:
        ConfigError: they are no whole numbers above 0.
    """
    from dflop.errors import ConfigError

    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"`{text}` is no list of global batch sizes", where="--batch", hint="--batch 128,256,512")
    return tuple(sorted(set(map(int, words))))


def show_batches(ranked: Sequence[AtBatch[T]], form: str, say: Say, *, is_data: bool = True) -> None:
    """A row per global batch size, on stderr where stdout is for something else, and which one is best."""
    from rich.console import Console

    from dflop.compare.batches import batch_table, batch_verdict
    from dflop.report.rows import print_rows
    from dflop.report.table_text import print_table

    table = batch_table(ranked)
    if form == "table" or not is_data:
        print_table(table, Console(stderr=not is_data))
    else:
        print_rows(table.header, table.rows, form)
    say(batch_verdict(ranked))


def configured(
    given: Path, data: Sequence[Path], say: Say, *, gpus: int | None, overrides: Sequence[str], split: str = "",
    download: bool = False,
) -> tuple[Config, Path]:  # fmt: skip
    """(configuration, its file).

    Args:
        given: Configuration file, or with `data` a model.
        data: None with a configuration file; several are a mixture.
        say: Receives lines on what was found and assumed.
        gpus: That the global batch is for where a configuration is made.
        overrides: `key=value`s.
        split: Of the data; empty: the one for training.
        download: Whether to fetch what is on the Hugging Face hub.

    Raises:
        ConfigError: the configuration is wrong, or a model has no data; the model is not known, or there is no data.
    """
    from dflop.config import load_config
    from dflop.errors import ConfigError
    from dflop.starter.hub_files import local

    given = local(given, say, is_dataset=False, downloads=download)
    data = [local(path, say, is_dataset=True, downloads=download) for path in data]
    if not data:
        if given.is_dir() or given.name == "config.json":
            raise ConfigError(
                f"`{given}` is a model, and a plan depends on its data", hint=f"name the data: {given} DATA"
            )
        loaded = load_config(given, [*overrides, *([f"dataset.split={split}"] if split else [])])
        show_card(loaded, say)
        return loaded, given
    path = _made(given, data, say, gpus, split, {x.partition("=")[0] for x in overrides})
    say(f"configuration: {path}, for `dflop run` and `dflop config show`; change any key: --set KEY=VALUE")
    return load_config(path, overrides), path


@dataclass(frozen=True, slots=True)
class Given:
    """What a plan or a comparison is asked of, in words and numbers of a command line."""

    config: Path
    """Or a model, with data."""
    data: tuple[Path, ...] = ()
    split: str = ""
    download: bool = False
    batch: str = ""
    device: str = ""
    gpus: int | None = None
    gpus_per_node: int | None = None
    overrides: tuple[str, ...] = ()

    def looked_at(self, say: Say) -> LookedAt:
        """Configuration, cluster and costs; the dataset is profiled if need be.

        Raises:
            ConfigError: as `configured`, `batch_sizes` and `planned_cluster`.
            CostError: measured costs are wanted and the store has none.
        """
        from dflop.compare.outlook import look_ahead
        from dflop.compare.planned_cluster import planned_cluster

        sizes = batch_sizes(self.batch)
        sized = (*self.overrides, *(f"plan.global_batch_size={size}" for size in sizes[:1]))
        config, file = configured(
            self.config, self.data, say, gpus=self.gpus, overrides=sized, split=self.split, download=self.download
        )
        cluster = planned_cluster(
            config, say, device=self.device, gpus=self.gpus, gpus_per_node=self.gpus_per_node, overrides=sized
        )
        return LookedAt(config, file, cluster, sizes, asyncio.run(look_ahead(config, self.device, cluster, say)))


@dataclass(frozen=True, slots=True)
class LookedAt:
    """What a plan is made from."""

    config: Config
    file: Path
    """Where the configuration lies."""
    cluster: ClusterSpec
    sizes: tuple[int, ...]
    """Global batches to compare; empty: the configured one."""
    outlook: Outlook


def show_card(config: Config, say: Say) -> None:
    """What a configuration trains on, in lines for people; where none of it can be read, its profile says why."""
    from dflop.data.card import read_card
    from dflop.errors import DflopError

    with contextlib.suppress(DflopError):
        for line in read_card(config.dataset.annotations, config.dataset.split).lines():
            say(f"data     {line}")


def _made(model: Path, data: Sequence[Path], say: Say, gpus: int | None, split: str, by_hand: Collection[str]) -> Path:
    """File of a configuration of which some keys are set by hand."""
    from dflop.errors import ConfigError
    from dflop.starter.starter import make_starter

    made = make_starter(model, *((data[0], gpus, split) if len(data) == 1 else (_mixture(data, split), gpus)))
    if made.tokenizer_problem and not {"dataset.tokenizer", "dataset.chat_template"} & set(by_hand):
        raise ConfigError(
            made.tokenizer_problem, where="dataset.tokenizer",
            hint="--set dataset.tokenizer=PATH/tokenizer.json, or --set dataset.chat_template=FILE",
        )  # fmt: skip
    for line in made.found:
        say(f"found    {line}")
    for line in made.to_edit:
        if line.partition(":")[0] not in by_hand:
            say(f"assumed  {line}")
    return _keep(made.name, made.text)


def _mixture(data: Sequence[Path], split: str) -> Path:
    """File of a mixture of all rows of some data, each with the folder that its media were found in."""
    from dflop.config import dump_yaml
    from dflop.starter.dataset import find_dataset

    found = [find_dataset(path, split) for path in data]
    entries = [
        {"path": of.card.annotations, "split": of.card.written_split, "media_root": str(of.media_root)} for of in found
    ]
    return _keep("mixture", "# Shares of its files: docs/formats.md.\n" + dump_yaml({"datasets": entries}))


def _keep(name: str, text: str) -> Path:
    """A file with the text, whose name has its content in it, so that nothing that a person edited is lost."""
    from dflop import files

    path = MADE / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            files.replace(path, text)
    return path
