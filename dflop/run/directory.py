"""The run directory: every file of a run has one name, and jobs find their inputs here and nowhere else.

run.json               which run this is and how it stands
driver.lock, driver/   who drives it, see driver_lock.py
claims/                which job trains or compares, see training_claim.py
config.resolved.yaml   the configuration with every default filled in
jobs.jsonl, jobs/      journal of submissions; logs and results per job
shapes.parquet         healthy samples in training order of the annotation file
cost_tables.json       tables the plan was made from (training falls back on them; the scheduler reads the store)
plan.json              the plan that runs; changes only while no training job does
plans/                 the plans that ran before it, numbered from 1
replanning             there while a training job makes way for another plan
cancelled              there from `dflop cancel` until the run is taken up again
checkpoints/           see train/checkpoint.py
model/                 files beside the model's weights that an export writes again, see model_files.py
report.html
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop import files
from dflop.config import Config, load_config
from dflop.cost.identity import tables_of_json
from dflop.data.card import entries_of
from dflop.data.dataset_profile import DatasetRef
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError
from dflop.models import GENERIC, cache_of_models, load_family
from dflop.models.family import Family
from dflop.models.generic.family import GenericFamily
from dflop.records import CostTable, Plan, SampleShape, from_dict, parse_json, to_dict
from dflop.train.manifest import read_latest

_STATE = {"run_id": str, "owner": str, "run_dir": str, "config_key": str, "backend": str, "state": str, "trains": bool,
          "num_steps": int, "by": dict}  # fmt: skip
"""Keys of run.json, each of which may be missing, and their types."""


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths and typed reads and writes of one run directory."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def config_file(self) -> Path:
        return self.path / "config.resolved.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def model_files(self) -> Path:
        """What ships with the model beside its weights, see `model_files.py`."""
        return self.path / "model"

    @property
    def report_file(self) -> Path:
        return self.path / "report.html"

    def job_folder(self, name: str) -> Path:
        return self.path / "jobs" / name

    def config(self) -> Config:
        return load_config(self.config_file)

    def state(self) -> dict[str, Any]:
        """Content of run.json; empty for a directory that has none.

        Raises:
            ConfigError: it is damaged, or cannot be read.
        """
        path = self.path / "run.json"
        try:
            data = parse_json(path.read_bytes())
            if not isinstance(data, dict):
                raise ValueError("an object is expected")
            for name, kind in _STATE.items():
                if not isinstance(data.get(name, kind()), kind):
                    raise ValueError(f"`{name}` is {data[name]!r}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            hint = "restore the file, or begin another run: this one is not resumed"
            raise ConfigError(f"run.json is damaged: {error}", where=str(path), hint=hint) from None
        return data

    def write_state(self, state: Mapping[str, Any]) -> None:
        _write(self.path / "run.json", json.dumps(state, indent=2))

    def plan(self) -> Plan:
        with _named(self.path / "plan.json", "the run is planned again"):
            return from_dict(Plan, parse_json((self.path / "plan.json").read_bytes()))

    def write_plan(self, plan: Plan, tables: Sequence[CostTable]) -> None:
        """Make this the plan that runs, and keep the one before it."""
        if self.has_plan() and self.plan() != plan:
            folder = self.path / "plans"
            folder.mkdir(exist_ok=True)
            number = 1 + len(list(folder.glob("plan-*.json")))
            _write(folder / f"plan-{number}.json", (self.path / "plan.json").read_text())
        _write(self.path / "cost_tables.json", json.dumps([to_dict(t) for t in tables], indent=2))
        _write(self.path / "plan.json", json.dumps(to_dict(plan), indent=2))

    def has_plan(self) -> bool:
        return (self.path / "plan.json").is_file() and (self.path / "cost_tables.json").is_file()

    def mark_replanning(self, is_replanning: bool) -> None:
        """Note that the training job is to make way for another plan, or that the plan has been changed."""
        self._mark("replanning", is_replanning)

    def is_replanning(self) -> bool:
        return (self.path / "replanning").exists()

    def mark_cancelled(self, is_cancelled: bool) -> None:
        """Note that no more jobs are to be submitted, or that the run is taken up again."""
        self._mark("cancelled", is_cancelled)

    def is_cancelled(self) -> bool:
        return (self.path / "cancelled").exists()

    def _mark(self, name: str, is_set: bool) -> None:
        if is_set:
            _write(self.path / name, "")
        else:
            (self.path / name).unlink(missing_ok=True)

    def next_step(self) -> int:
        """First step that the newest checkpoint does not hold."""
        latest = read_latest(self.checkpoints)
        return int(latest["next_step"]) if latest else 0

    def cost_tables(self) -> list[CostTable]:
        with _named(self.path / "cost_tables.json", "the run is planned again"):
            return tables_of_json((self.path / "cost_tables.json").read_bytes())

    def shapes(self) -> list[SampleShape]:
        """Healthy samples in training order.

        Raises:
            ConfigError: the file is missing or damaged.
        """
        import pyarrow.parquet as pq

        from dflop.store import schema

        with _named(self.path / "shapes.parquet", "it is rebuilt from the store"):
            return schema.from_table(SampleShape, pq.read_table(self.path / "shapes.parquet"))

    def write_shapes(self, shapes: Sequence[SampleShape]) -> None:
        import pyarrow.parquet as pq

        from dflop.store import schema

        with files.replacing(self.path / "shapes.parquet") as temporary:
            pq.write_table(schema.to_table(SampleShape, list(shapes)), temporary)

    def profile_key(self) -> str:
        """Data profile the run's samples come from."""
        import pyarrow.parquet as pq

        with _named(self.path / "shapes.parquet", "it is rebuilt from the store"):
            keys = pq.read_table(self.path / "shapes.parquet", columns=["profile_key"]).column(0)
        return str(keys[0]) if len(keys) else ""


def _write(path: Path, text: str) -> None:
    files.replace(path, text, is_durable=True)


@contextlib.contextmanager
def _named(path: Path, what_then: str) -> Iterator[None]:
    """A file of a run that is missing or cannot be understood is named, with what becomes of the run without it."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"the run has no {path.name}", where=str(path), hint=f"start the run again: {what_then}"
        ) from error
    except (OSError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
        # Parsers raise any of these on damaged bytes. Arrow has the last for types and codecs that it does not read,
        # ValueErrors, and OSErrors without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk fails, which says nothing of the file
        raise ConfigError(
            f"{path.name} of the run is damaged: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            where=str(path),
            hint=f"remove it: {what_then} when the run is started again",
        ) from error


def dataset_ref(config: Config) -> DatasetRef:
    """The dataset as the data room takes it."""
    d = config.dataset
    entries = entries_of(d.annotations, d.media_root, d.split, d.ignored_keys)
    return DatasetRef(
        entries, d.tokenizer, d.max_llm_tokens, d.chat_template, d.overlong, d.min_side_px, d.seed, d.special_tokens
    )


def family_of(config: Config, vocab_size: int | None = None) -> Family:
    """The model family of a run; its embedding has rows for `vocab_size` tokens, which profiles of data do not need."""
    model = config.model
    if model.family == GENERIC:  # its vocabulary is the model's
        found = GenericFamily(model.hf_config, model.media, model.processor, cache_of_models(config.store))
        found.check_vocabulary(vocab_size or 0)
        return found
    hf_config = dict(model.hf_config)
    # Weights come with a vocabulary, which may have room for more tokens than the tokenizer knows; a configuration may
    # state one that has.
    if vocab_size is not None and model.weights is None:
        text = hf_config.get("text_config") or {}
        hf_config["text_config"] = {**text, "vocab_size": max(vocab_size, text.get("vocab_size") or 0)}
    return load_family(model.family, hf_config, model.media)


def tokenizer_of(config: Config) -> ChatTokenizer:
    """The dataset's tokenizer with its chat template, bound to the family's special tokens."""
    d = config.dataset
    return ChatTokenizer(d.tokenizer, family_of(config), d.chat_template, d.special_tokens)


def open_run(path: str | Path) -> RunDir:
    """An existing run directory.

    Raises:
        ConfigError: there is no run at `path`.
    """
    run_dir = RunDir(Path(path).absolute())
    if not run_dir.config_file.is_file():
        raise ConfigError("not a run directory: config.resolved.yaml is missing", where=str(path))
    return run_dir
