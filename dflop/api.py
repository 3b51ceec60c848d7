"""Four answers as values, for notebooks and scripts: what the commands of these names print.

    from dflop import api

    api.plan("my.yaml", device="h100", gpus=64).best

Heavy imports are inside the functions. (`dflop.plan` itself is the package that makes plans.)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from dflop.compare.contest import Contest
    from dflop.config import Config
    from dflop.cost.throughput import Throughput
    from dflop.records import CostTable, Plan
    from dflop.sampler.estimate import Waiting

T = TypeVar("T")
AnyPath = str | os.PathLike[str]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """Plans of a cluster for a model and its data, the best first."""

    plans: tuple[Plan, ...]
    speed: Throughput
    """Throughput of the best plan, simulated."""
    costs: str
    """Where the costs come from."""
    config: Config
    config_file: Path
    """For `dflop run`; made for a model and its data, where those were given."""

    @property
    def best(self) -> Plan:
        """The plan that a run would have."""
        return self.plans[0]


@dataclass(frozen=True, slots=True)
class Compared:
    """dflop next to what experts run, on the same held-out global batches."""

    rows: tuple[Mapping[str, Any], ...]
    """As `dflop compare --json` prints them."""
    verdict: str
    contest: Contest
    costs: str
    """Where the costs come from."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """Cost tables of a model's modules on the configured cluster."""

    key: str
    cost_tables: tuple[CostTable, ...]


def plan(
    model: AnyPath, *data: AnyPath, device: str = "", gpus: int | None = None, gpus_per_node: int | None = None,
    batch: int | None = None, split: str = "", overrides: Mapping[str, object] | None = None, download: bool = False,
    say: Say | None = None,
) -> Planned:  # fmt: skip
    """The layouts for a model and its data, or for a configuration, without running anything.

    Example: `api.plan("my.yaml", device="h100", gpus=64).best.predicted_step_s`

    Args:
        model: A configuration file; or with data a model: `config.json`, its folder, or a model's YAML.
        data: Training data of that model; several are a mixture.
        device: Costs by the data sheet of `a100`, `a100-40`, `h100`, `h200` or `b200`; empty: measured ones.
        gpus: To plan for; None: the configured cluster's.
        gpus_per_node: None: 8 with a data sheet.
        batch: Samples of a global batch; None: the configured one.
        split: Of the data; empty: the one for training.
        overrides: Keys of the configuration, `{"train.num_steps": 20}`.
        download: Whether to fetch what is named as on the Hugging Face hub.
        say: Receives lines of progress; None: they are dropped.

    Raises:
        ConfigError: an argument or the configuration is wrong.
        CostError: measured costs are wanted and the store has none.
        InfeasiblePlanError: nothing fits in memory.
    """
    from dflop.cli.plan import ranked_plans

    given = _given(model, data, device, gpus, gpus_per_node, batch, split, overrides, download)
    at, ranked = _run(lambda: ranked_plans(given, say or _nobody))
    first = ranked[0]
    return Planned(tuple(first.found), first.speed, first.outlook.source, at.config, at.file)


def compare(
    model: AnyPath, *data: AnyPath, device: str = "", gpus: int | None = None, gpus_per_node: int | None = None,
    batch: int | None = None, split: str = "", overrides: Mapping[str, object] | None = None, download: bool = False,
    num_batches: int = 8, policies: Sequence[str] = (), num_steps: int = 10_000, usd_per_gpu_hour: float = 0.0,
    say: Say | None = None,
) -> Compared:  # fmt: skip
    """Dflop's plan beside those of baseline trainers, simulated on held-out global batches.

    Example: `api.compare("my.yaml", device="h100", gpus=64).verdict`

    Args:
        model: As of `plan`, and so are arguments that are not listed here.
        data: As of `plan`.
        device: As of `plan`.
        gpus: As of `plan`.
        gpus_per_node: As of `plan`.
        batch: As of `plan`.
        split: As of `plan`.
        overrides: As of `plan`.
        download: As of `plan`.
        num_batches: Held-out global batches.
        policies: Under which dflop's plan is simulated, too: `token_lpt`, `token_kk`, `length_grouped`, `bottleneck`,
            `program`.
        num_steps: Of the training whose cost is estimated.
        usd_per_gpu_hour: Price of a GPU-hour in US dollars.
        say: As of `plan`.

    Raises:
        ConfigError, CostError, InfeasiblePlanError: as `plan`.
    """
    from dflop.cli.compare import contests
    from dflop.compare.trainers import COLUMNS, comparison_rows, verdict

    given = _given(model, data, device, gpus, gpus_per_node, batch, split, overrides, download)
    _, ranked = _run(lambda: contests(given, say or _nobody, num_batches, policies))
    first = ranked[0]
    rows = comparison_rows(first.found, num_steps, usd_per_gpu_hour)
    named = tuple(dict(zip(COLUMNS, row, strict=True)) for row in rows)
    return Compared(named, verdict(first.found), first.found, first.outlook.source)


def estimate(
    lengths: AnyPath | Sequence[int], *, ranks: int, batch: int | None = None, microbatches: int = 1,
    padded: bool = False, sync: Literal["step", "microbatch"] = "step", window: int | None = None, max_steps: int = 200,
    say: Say | None = None,
) -> tuple[Waiting, ...]:  # fmt: skip
    """What ranks wait for the slowest one under the usual orders of samples and with dflop's sampler, simulated.

    Example: `api.estimate([120, 80, 4000, 300] * 64, ranks=4)[0].waiting_frac`

    Args:
        lengths: A file as `dflop sampler estimate` reads it, or the numbers.
        ranks: Data-parallel ranks.
        batch: Samples per optimizer step over all ranks; None: 8 for each microbatch of each rank.
        microbatches: Per rank and step.
        padded: Whether the collator pads to the longest of a microbatch.
        sync: Where ranks wait.
        window: Global batches that dflop's window sorts together; None: as group_by_length.
        max_steps: Steps that are simulated.
        say: As of `plan`.

    Raises:
        ConfigError: a file cannot be read, or the numbers do not go together.
    """
    from dflop.sampler.estimate import Setting, costs_of_file, estimate_waiting
    from dflop.sampler.lengths import costs_of_lengths

    if isinstance(lengths, str | os.PathLike):
        costs = costs_of_file(Path(lengths), say or _nobody)
    else:
        costs = costs_of_lengths(list(lengths))
    setting = Setting(ranks, 8 * ranks * microbatches if batch is None else batch, microbatches, padded, sync, window)
    return tuple(estimate_waiting(costs, setting, max_steps=max_steps))


def profile(
    config: AnyPath, *, overrides: Mapping[str, object] | None = None, say: Say | None = None
) -> Profiled:  # fmt: skip
    """Time the modules of a configuration's model on its cluster, unless the store knows them.

    Example: `api.profile("my.yaml", overrides={"model_profile.budget_s": 2}).cost_tables[0].module`

    Args:
        config: Configuration file.
        overrides: As of `plan`.
        say: As of `plan`.

    Raises:
        DflopError: as `dflop profile`.
    """
    from dflop.config import load_config
    from dflop.steps.session import profile_modules
    from dflop.store.reader import Reader

    loaded = load_config(Path(config), _words(overrides))
    key = _run(lambda: asyncio.run(profile_modules(loaded, say or _nobody)))
    with Reader(loaded.store) as reader:
        return Profiled(key, tuple(reader.latest_cost_tables(key)))


def _given(
    model: AnyPath, data: Sequence[AnyPath], device: str, gpus: int | None, gpus_per_node: int | None,
    batch: int | None, split: str, overrides: Mapping[str, object] | None, download: bool,
) -> Any:  # fmt: skip
    from dflop.cli.common import prepare_kernels
    from dflop.cli.configured import Given

    prepare_kernels()
    size = "" if batch is None else str(batch)
    paths = tuple(map(Path, data))
    return Given(Path(model), paths, split, download, size, device, gpus, gpus_per_node, _words(overrides))


def _words(overrides: Mapping[str, object] | None) -> tuple[str, ...]:
    import json

    return tuple(f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items())


def _run(work: Callable[[], T]) -> T:
    """The result of work that starts an event loop: run in another thread where one runs already, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _nobody(_line: str) -> None:
    """Drops a line."""
