"""What every sample of a dataset costs: all that balancing needs to know, and three ways to get it.

A function of one line is enough to begin with. A cost table that dflop fitted on the hardware knows attention, the
encoders and the fixed part of a microbatch. A store knows, beside that, every sample's shape and what training runs
have corrected since. Nothing of dflop's store, and no torch, is imported before it is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dflop.balance.media_costs import read_tables
from dflop.balance.numbers import finite_numbers, whole_numbers
from dflop.cost.model import CostModel, Floats
from dflop.errors import ConfigError, DataError
from dflop.records import LLM, CostTable, RunMode, SampleShape

Ints = npt.NDArray[np.int64]
_LOADS = ("num_items", "num_tokens", "sum_sq_tokens")
Loads = Mapping[str, Ints]
"""By module: `[3, samples]` as `_LOADS` of `ModuleLoad`."""

TYPICAL_SAMPLES = 8
"""Average samples in the microbatch whose fixed part is taken for all."""


_FIELDS = {
    "seconds": finite_numbers, "tokens": whole_numbers, "supervised": whole_numbers, "index": whole_numbers,
    "weights": finite_numbers,
}  # fmt: skip
"""Fields of `SampleCosts`, one number per sample each."""


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """Costs of N samples."""

    seconds: Floats
    """`[N]` each adds to the microbatch it is in. Any unit will do: only proportions count."""
    tokens: Ints
    """`[N]` length of the sequence, media included."""
    supervised: Ints | None = None
    """`[N]` tokens that carry loss; None: unknown, and counted from the labels when the loss is scaled."""
    index: Ints | None = None
    """`[N]` position of each in the dataset; None: 0..N-1. A profile leaves out samples that cannot be trained on."""
    weights: Floats | None = None
    """`[N]` how often a mixture draws each; None: all alike."""
    fixed_s: float = 0.0
    """What a microbatch costs beside its samples, in the unit of `seconds`."""
    origin: str = "given"
    """For people: where the costs come from."""

    def __post_init__(self) -> None:
        n = len(self.seconds)
        if not n:
            raise ConfigError("there are no samples", where="SampleCosts")
        for name, check in _FIELDS.items():
            if (values := getattr(self, name)) is not None:
                if values.shape != (n,):
                    raise ConfigError(f"`{name}` has shape {values.shape}, there are {n} costs", where="SampleCosts")
                check(name, values, "SampleCosts")
        finite_numbers("fixed_s", [self.fixed_s], "SampleCosts")
        if self.supervised is not None and (over := self.supervised > self.tokens).any():
            bad = int(np.flatnonzero(over)[0])
            raise ConfigError(
                f"supervised of sample {bad} is {self.supervised[bad]}, it has {self.tokens[bad]} tokens",
                where="SampleCosts",
            )
        if self.index is not None and len(np.unique(self.index)) < n:
            raise ConfigError(
                "index names a sample twice", where="SampleCosts", hint="weights draw a sample more often"
            )

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def key(self) -> str:
        """Hash of all the numbers: ranks whose keys differ would plan different steps."""
        digest = hashlib.sha256(repr(self.fixed_s).encode())
        for values in (getattr(self, name) for name in _FIELDS):
            digest.update(b"-" if values is None else np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: Path | str) -> None:
        """Writes an `.npz` file; made once, it saves every rank the reading of a store."""
        arrays = {name: getattr(self, name) for name in _FIELDS}
        with open(path, "wb") as file:
            np.savez(
                file, allow_pickle=False, fixed_s=np.array(self.fixed_s), origin=np.array(self.origin),
                **{name: values for name, values in arrays.items() if values is not None},
            )  # fmt: skip

    @classmethod
    def load(cls, path: Path | str) -> SampleCosts:
        """Inverse of `save`.

        Raises:
            ConfigError: the file cannot be read, or is not one that `save` wrote.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                values = {name: found[name] for name in found.files}
            return cls(**{**values, "fixed_s": float(values["fixed_s"]), "origin": str(values["origin"])})
        except ConfigError:
            raise
        except Exception as error:  # numpy lets through what zip, zlib and its own headers make of damaged bytes
            raise ConfigError(
                f"no sample costs: {error}", where=str(path), hint="`SampleCosts.save` writes them"
            ) from error


def sample_costs(
    lengths: Iterable[int],
    cost: Callable[[int], float] | Sequence[float] | None = None,
    *,
    supervised: Iterable[int] | None = None,
    fixed: float = 0.0,
) -> SampleCosts:
    """Costs of a dataset whose lengths are known.

    Args:
        lengths: Tokens of every sample, in the order of the dataset.
        cost: Of the sample at a position of the dataset, e.g. `lambda i: lengths[i] + lengths[i] ** 2 / 20_000`;
            or the costs themselves. Any unit. None: its tokens.
        supervised: Tokens that carry loss, of every sample.
        fixed: What a microbatch costs beside its samples, in the same unit.

    Raises:
        ConfigError: a number is negative, no number or not whole, more tokens carry loss than there are, or there are
            not as many as there are lengths.
    """
    tokens = whole_numbers("lengths", lengths, "sample_costs")
    if cost is None:
        seconds = tokens.astype(np.float64)
    else:
        given = map(cost, range(len(tokens))) if callable(cost) else cost
        seconds = finite_numbers("cost", given, "sample_costs")
    counts = None if supervised is None else whole_numbers("supervised", supervised, "sample_costs")
    return SampleCosts(seconds, tokens, counts, fixed_s=fixed, origin="lengths" if cost is None else "function")


def sample_costs_from_tables(
    tables: Path | str | Iterable[CostTable],
    shapes: Sequence[SampleShape],
    *,
    frozen: Collection[str] | None = None,
    recompute: bool = False,
    tp: int = 1,
) -> SampleCosts:
    """Costs by cost tables, of samples whose shapes are known.

    Args:
        tables: The `cost_tables.json` of a run directory, or tables.
        shapes: Every sample; `index` is their `sample_index`.
        frozen: Modules whose weights do not train.
        recompute: Whether layers run again in the backward pass.
        tp: Tensor-parallel ranks a replica consists of.

    Raises:
        ConfigError: the file is none of cost tables, or there are no shapes.
        CostError: no table for a module that samples need.
    """
    model = CostModel(read_tables(tables), frozen=frozen, extrapolate=True)
    loads = {}
    for module in [*sorted({item.module for s in shapes for item in s.items}), LLM]:
        rows = [[getattr(load, name) for name in _LOADS] for load in (s.load(module) for s in shapes)]
        loads[module] = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return _by_model(
        model, loads, loads[LLM][0], np.array([s.sample_index for s in shapes], dtype=np.int64),
        np.array([s.weight for s in shapes], dtype=np.float64), "tables " + ", ".join(t.table_id for t in model.tables),
        tp=tp, recompute=recompute,
    )  # fmt: skip


def sample_costs_from_store(
    store: Path | str,
    *,
    data_profile: str = "",
    model_profile: str = "",
    frozen: Collection[str] | None = None,
    recompute: bool = False,
    tp: int = 1,
    half_life_days: float = 14.0,
) -> SampleCosts:
    """Costs from the newest snapshot of a store: a data profile under the cost tables and corrections in force.

    Corrections by size count sample by sample; that some ranks are slow is not taken over, for who they are may change.

    The snapshot may change between two calls: make the costs once and let every rank `SampleCosts.load` the same file.

    Args:
        store: Folder of the store.
        data_profile: First digits of its key; empty: the newest.
        model_profile: First digits of the key of the profile the cost tables are of; empty: the newest.
        frozen: Modules whose weights do not train.
        recompute: Whether layers run again in the backward pass.
        tp: Tensor-parallel ranks a replica consists of.
        half_life_days: Age at which a correction counts half, as `correct.half_life_days` of a run.

    Raises:
        StoreError: there is no store, or it cannot be read.
        DataError: no such profile, or one without samples.
        CostError: no table for a module that samples need.
    """
    from dflop.learn.cost_inputs import factors_in_force
    from dflop.store.profile_frames import find_profile
    from dflop.store.reader import Reader

    data_key = str(find_profile(store, data_profile)["profile_key"])
    model_key = str(find_profile(store, model_profile, kind="model")["profile_key"])
    with Reader(store) as reader:
        where = {"profile_key": data_key}
        samples = reader.arrays("v_sample_shape", ("sample_index", "num_supervised_tokens", "weight"), where=where)
        rows = reader.arrays("v_sample_load", ("sample_index", "module", *_LOADS), where=where)
        tables = reader.latest_cost_tables(model_key)
        model = CostModel(tables, frozen=frozen, extrapolate=True)
        model = model.with_corrections(factors_in_force(reader, model, model_key, half_life_days))
        snapshot = reader.seq
    if not len(samples["sample_index"]):
        raise DataError(f"data profile {data_key} has no samples", where=str(store))
    order = np.argsort(samples["sample_index"])
    index = samples["sample_index"][order].astype(np.int64)
    loads = {module: np.zeros((3, len(index)), np.int64) for module in [*sorted(set(rows["module"]) - {LLM}), LLM]}
    for module, load in loads.items():  # samples without an item for a module have zeros
        mine = rows["module"] == module
        load[:, np.searchsorted(index, rows["sample_index"][mine])] = [rows[name][mine] for name in _LOADS]
    return _by_model(
        model, loads, samples["num_supervised_tokens"][order].astype(np.int64), index,
        samples["weight"][order].astype(np.float64),
        f"snapshot {snapshot}, data profile {data_key}, model profile {model_key}", tp=tp, recompute=recompute,
    )  # fmt: skip


def _by_model(
    model: CostModel, loads: Loads, supervised: Ints, index: Ints, weights: Floats, origin: str, *, tp: int,
    recompute: bool,
) -> SampleCosts:  # fmt: skip
    """What each sample adds, and a microbatch beside them: all modules on one device after the other.

    Media of a sample are corrected as items of their mean size.
    """
    num_samples, mode = len(index), RunMode(tp, recompute=recompute)
    seconds, fixed_s = np.zeros(num_samples), 0.0
    for module, load in loads.items():
        how: dict[str, Any] = {"num_layers": model.table(module, mode).num_layers, "edge": True, "mode": mode}
        typical = TYPICAL_SAMPLES * load.sum(axis=1) / num_samples
        size = load[1] if module == LLM else load[1] / np.maximum(load[0], 1)
        factor = np.append(model.item_factors(module, size), model.level(module))
        added_s = model.item_seconds(module, np.column_stack([load, typical]), factor=factor, **how)
        whole = model.module_seconds(module, typical, **how)
        seconds += added_s[:-1]
        fixed_s += max(0.0, float(whole[0]) + float(whole[1]) - float(added_s[-1]))
    return SampleCosts(
        seconds, loads[LLM][1], supervised, index, None if (weights == weights[:1]).all() else weights, fixed_s, origin
    )
