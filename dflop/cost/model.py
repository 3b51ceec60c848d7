"""Seconds and bytes of any module on any microbatch, from cost tables and link costs.

What a table means is in `curve.py`. Predictions are good to a few per cent inside the probed range; kernels that step
with shape are what `correct/` is for. Far outside the range the model refuses, unless it was told to extrapolate.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dflop.cost.curve import Floats, Load, evaluate, straightened
from dflop.cost.expert_parallel import exchange_seconds, slower_frac
from dflop.cost.identity import bytes_per_value
from dflop.cost.link_costs import ALL_REDUCE, P2P, LinkModel
from dflop.cost.tables import TableSet
from dflop.cost.tensor_parallel import all_reduces
from dflop.errors import CostError
from dflop.records import (
    LLM,
    ONE_RANK,
    CostTable,
    CostTerms,
    LinkCost,
    ModuleFactors,
    ModuleLoad,
    ModulePlan,
    ModuleSpec,
    RunMode,
)

__all__ = ["CostModel", "Floats", "has_edge"]

MAX_EXTRAPOLATION = 2.0
ROUNDING = 1.0 + 1e-12
"""A mean length is a quotient; the probe that set the limit must not lie beyond it."""
_NUM_STATE_MESSAGES = 4
"""A layer with a state sends tokens for its convolution, what enters the scan in two types and what leaves it."""


class CostModel:
    """Cost tables of one model on one kind of hardware, with the corrections learnt so far.

    Args:
        tables: At most one per (module, tp, recompute) once `frozen` has chosen.
        corrections: What multiplies a module's seconds, by size of item or for all sizes alike; 1.0 where absent.
            Bytes, messages and optimizer are never corrected.
        frozen: Modules whose weights do not train, or `<encoder>.tower` where the projector does; None: not known, see
            `TableSet`.
        adapted: Modules of which adapters train, see `TableSet`.
        specs: With the spec of a module, a tp without a table is derived from tp 1 (`tensor_parallel.py`).
        links: Message costs, at most one per (op, ranks, nodes).
        max_extrapolation: How many times the largest probed tokens and mean length may be asked for.
        extrapolate: Answer beyond that, too.

    Raises:
        CostError: two tables for one key, a correction of a module without a table, or not one factor per bucket.
    """

    def __init__(
        self,
        tables: Iterable[CostTable],
        corrections: Mapping[str, float | ModuleFactors] | None = None,
        *,
        frozen: Collection[str] | None = None,
        adapted: Collection[str] = (),
        specs: Iterable[ModuleSpec] = (),
        links: Iterable[LinkCost] = (),
        max_extrapolation: float = MAX_EXTRAPOLATION,
        extrapolate: bool = False,
    ) -> None:
        self._specs = {spec.module: spec for spec in specs}
        self._links = LinkModel(links)
        self._tables = TableSet(tables, frozen, self._specs, self._links, adapted)
        self.max_extrapolation = max_extrapolation
        self.extrapolate = extrapolate
        self.corrections = self._checked(corrections or {})

    @property
    def tables(self) -> tuple[CostTable, ...]:
        """Every table given and chosen, ordered by (module, tp, recompute); derived ones are not among them."""
        return self._tables.all

    @property
    def links(self) -> tuple[LinkCost, ...]:
        """Every link cost, ordered by (op, ranks, nodes)."""
        return self._links.links

    def with_corrections(self, corrections: Mapping[str, float | ModuleFactors]) -> CostModel:
        """The same model under other corrections (replacing, not multiplying, the present ones)."""
        other = copy.copy(self)
        other.corrections = self._checked(corrections)
        return other

    def uncorrected(self) -> CostModel:
        """The same model as its tables have it."""
        return self.with_corrections({})

    def extrapolating(self) -> CostModel:
        """The same model, which never refuses a load."""
        other = copy.copy(self)
        other.extrapolate = True
        return other

    def tps(self, module: str) -> tuple[int, ...]:
        """Tensor-parallel degrees `module` has a table for or one can be derived for, ascending.

        Raises:
            CostError: no table for `module`.
        """
        return self._tables.tps(module)

    def table(self, module: str, mode: RunMode = ONE_RANK) -> CostTable:
        """The table of `module` in a mode, measured, analytic or derived.

        Where a share of the layers recomputes, a layer of the table is what these layers are on average.

        Raises:
            CostError: there is none; the message lists what there is.
        """
        return self._tables.table(module, mode.tp, mode.recompute)

    def level(self, module: str) -> float:
        """What multiplies a module's seconds where its items are not known one by one."""
        found = self.corrections.get(module, 1.0)
        return found.level if isinstance(found, ModuleFactors) else found

    def is_by_size(self, module: str) -> bool:
        """Whether some sizes of items have another factor than the level."""
        found = self.corrections.get(module)
        return isinstance(found, ModuleFactors) and bool(found.edges) and set(found.factors) != {found.level}

    def item_factors(self, module: str, num_tokens: npt.ArrayLike) -> Floats:
        """What multiplies the seconds of items with so many tokens each."""
        found = self.corrections.get(module)
        if not isinstance(found, ModuleFactors) or not found.edges:
            return np.full(np.shape(num_tokens), self.level(module))
        return np.array(found.factors)[np.searchsorted(found.edges, num_tokens, side="right")]

    def module_seconds(
        self, module: str, load: Load, mode: RunMode = ONE_RANK, *, num_layers: int, edge: bool,
        factor: npt.ArrayLike | None = None,
    ) -> tuple[Floats, Floats]:  # fmt: skip
        """(forward_s, backward_s) of `num_layers` layers, plus the edge if `edge`, on each microbatch.

        Zero tokens cost nothing. A load does not tell which sizes it consists of: `factor`, of the load's shape, is the
        correction of its mix, None the module's level. Ranks that share samples or frames take a part each, and
        exchange keys and values; those that share experts exchange rows.

        Raises:
            CostError: no table, or a load too far beyond the probes.
        """
        share = _share(load, mode.cp)
        layers: list[tuple[Any, bool, float]] = [(num_layers, edge, mode.recompute)]
        if isinstance(mode.recompute, np.ndarray):
            again = num_layers * mode.recompute
            layers = [(num_layers - again, edge, False), *([(again, False, True)] if again.any() else [])]
        forward_s = backward_s = np.zeros(())
        for number, with_edge, recompute in layers:
            table = self.table(module, mode.recomputing(recompute))
            self._check_range(table, share)
            times = self.level(module) if factor is None else np.asarray(factor)
            forward_s = forward_s + times * evaluate(table.forward_s, share, number, with_edge)
            backward_s = backward_s + times * evaluate(table.backward_s, share, number, with_edge)
            if mode.ep > 1 and (spec := self._specs.get(module)):
                added_s = self._shared_experts_seconds(spec, share, mode.recomputing(recompute), number, times)
                forward_s, backward_s = forward_s + added_s[0], backward_s + added_s[1]
        spec = self._specs.get(module)
        if mode.cp == 1 or not (module == LLM or (spec and spec.merge_tokens)):
            return forward_s, backward_s
        # About a sample is received, of the length that a token's has on average, or what the other ranks have; of an
        # encoder's frames those that are too long for one rank.
        _, tokens, sum_sq = (np.asarray(part, dtype=np.float64) for part in load)
        length = np.divide(sum_sq, tokens, out=np.zeros_like(tokens), where=tokens > 0)
        received = np.minimum(length, tokens * (mode.cp - 1) / mode.cp) * (
            (module == LLM) | (length * mode.cp > tokens)
        )
        exchanges_s = self.exchange_seconds(module, received, share[1], mode, num_layers=num_layers)
        return forward_s + exchanges_s[0], backward_s + exchanges_s[1]

    def exchange_seconds(
        self, module: str, num_received: npt.ArrayLike, num_tokens: npt.ArrayLike, mode: RunMode, *, num_layers: int
    ) -> tuple[Floats, Floats]:
        """(forward_s, backward_s) in which ranks get the keys and values that their tokens attend to on others.

        Once per layer, gradients on the way back, and anew where a layer runs again. For layers with a state a rank
        sends what it has of shared samples: about as many tokens as it receives elsewhere, and its own at most.
        Nothing is sent for no token, and nothing back in a frozen encoder; 0 where spec or link are not known.

        Args:
            module: With attention over samples, or frames of media, that are cut.
            num_received: Tokens of the rank that receives most.
            num_tokens: Of a rank.
            mode: Its tensor-parallel ranks have a part of the heads each.
            num_layers: Of the stage.
        """
        spec, received = self._specs.get(module), np.asarray(num_received, dtype=np.float64)
        if spec is None:
            return np.zeros_like(received), np.zeros_like(received)
        latency_s, s_per_byte = self._links.line(P2P, 2, 1)
        table = self.table(module, RunMode(mode.tp))
        num_values = 2 * spec.key_width / mode.tp * received
        num_values += spec.state_width * (mode.cp - 1) / mode.cp * np.minimum(received, num_tokens)
        num_messages = spec.mean(lambda kind: _NUM_STATE_MESSAGES if kind.num_state_values else 1)
        once_s = num_messages * latency_s + s_per_byte * bytes_per_value(table.dtype) * num_values
        once_s = num_layers * np.where(received > 0, once_s, 0.0)
        comes_back = module == LLM or table.trains_layers or table.trains_adapters
        return once_s, comes_back * (1 + mode.recompute) * once_s

    def _shared_experts_seconds(
        self, spec: ModuleSpec, share: Load, mode: RunMode, num_layers: Any, times: Any
    ) -> tuple[Floats, Floats]:
        """(forward_s, backward_s) that `num_layers` layers take longer because `ep` ranks share their experts.

        Rows travel there and back, and all wait for the rank that gets most. Tensor-parallel ranks have a part of the
        tokens each, which is what they send: the messages around a layer's MLP fall away.
        """
        table, tp = self.table(spec.module, ONE_RANK.recomputing(mode.recompute)), mode.tp
        tokens, value_bytes = np.asarray(share[1], dtype=np.float64) / tp, bytes_per_value(table.dtype)
        once_s = num_layers * exchange_seconds(spec, mode.ep, tokens, self._links.line(P2P, 2, 1), value_bytes)
        products, slower = (np.asarray(share[0]) / tp, tokens, np.zeros_like(tokens)), slower_frac(spec) * times
        forward_s = once_s + slower * evaluate(table.forward_s, products, num_layers, False)
        backward_s = (1 + mode.recompute) * once_s + slower * evaluate(table.backward_s, products, num_layers, False)
        if tp > 1:
            messages = all_reduces(spec, tp, self._links, value_bytes, recompute=bool(mode.recompute))
            fewer = spec.mean(lambda kind: float(kind.num_experts > 0)) / 2
            of_mlps_s = (fewer * evaluate(terms, share, num_layers, False) for terms in messages)
            forward_s, backward_s = (s - less_s for s, less_s in zip((forward_s, backward_s), of_mlps_s, strict=True))
        return forward_s, backward_s

    def item_seconds(
        self, module: str, load: Load, mode: RunMode = ONE_RANK, *, num_layers: int, edge: bool,
        factor: npt.ArrayLike | None = None,
    ) -> Floats:  # fmt: skip
        """Forward + backward seconds an item adds to a microbatch that exists anyway.

        No fixed terms, and the mean slope over the probed range in place of the curve, so that loads add: packing
        needs that, and what it decides is judged with `module_seconds`. Each load is one item, corrected by its own
        size; of loads that are several items, `factor` is the correction. Messages between ranks are left out.
        """
        table, share = self.table(module, mode), _share(load, mode.cp)
        self._check_range(table, share)

        def added_s(terms: CostTerms) -> Floats:
            return evaluate(straightened(terms, table.min_tokens, table.max_tokens), share, num_layers, edge)

        times = self.item_factors(module, load[1]) if factor is None else np.asarray(factor)
        return times * (added_s(table.forward_s) + added_s(table.backward_s))

    def activation_bytes(
        self, module: str, load: Load, mode: RunMode = ONE_RANK, *, num_layers: int, edge: bool
    ) -> Floats:
        """Bytes one microbatch keeps alive between its forward and its backward, without keys and values received."""
        table, share = self.table(module, mode), _share(load, mode.cp)
        self._check_range(table, share)
        return evaluate(table.activation_bytes, share, num_layers, edge)

    def stage_seconds(self, module_plan: ModulePlan, stage: int, load: ModuleLoad) -> tuple[float, float]:
        """(forward_s, backward_s) of one pipeline stage of a planned module on one microbatch."""
        costs = stage_kind(module_plan, stage).costs(module_plan.num_rerun(stage, load.num_tokens))
        parts = load.num_items, load.num_tokens, load.sum_sq_tokens
        forward, backward = self.module_seconds(module_plan.module, parts, **costs)
        return float(forward), float(backward)

    def p2p_seconds(self, num_bytes: float, num_nodes: int = 1) -> float:
        """One message between two ranks, on one node or on two; 0.0 where no link is known."""
        return self._links.seconds(P2P, num_bytes, 2, num_nodes)

    def hidden_bytes(self, module: str, tp: int = 1) -> float:
        """Bytes of one token that a rank hands to the next stage of `module`; 0.0 where its spec is not known."""
        if module not in self._specs:
            return 0.0
        dtype = self.table(module, RunMode(self.tps(module)[0])).dtype
        return float(self._specs[module].hidden_size * bytes_per_value(dtype)) / (tp if module == LLM else 1)

    def sync_seconds(self, param_bytes: float, dp: int, num_nodes: int) -> float:
        """The all-reduce of one gradient of `param_bytes` over `dp` replicas; 0.0 where no link is known."""
        return self._links.seconds(ALL_REDUCE, param_bytes, dp, num_nodes)

    def _checked(self, corrections: Mapping[str, float | ModuleFactors]) -> dict[str, float | ModuleFactors]:
        for module, found in corrections.items():
            self._tables.tps(module)
            if isinstance(found, ModuleFactors) and len(found.factors) != len(found.edges) + 1:
                raise CostError(
                    f"{len(found.factors)} factors for {len(found.edges) + 1} buckets of sizes",
                    where=f"module `{module}`",
                )
        return dict(corrections)

    def _check_range(self, table: CostTable, load: Load) -> None:
        if not self.extrapolate:
            refuse_far(table, load, self.max_extrapolation)


class StageKind(NamedTuple):
    """What a stage of a module costs by: stages of one kind cost the same."""

    num_layers: int
    edge: bool
    mode: RunMode
    limits: tuple[int, ...] = ()
    """Limits as in `ModulePlan.recompute_tokens`."""

    def costs(self, num_rerun: Any = 0) -> dict[str, Any]:
        """What `CostModel` is asked with; under limits `num_rerun` layers run again, or an array of so many."""
        mode = self.mode.recomputing(num_rerun / self.num_layers) if self.limits else self.mode
        return {"num_layers": self.num_layers, "edge": self.edge, "mode": mode}

    def of_one_rank(self) -> StageKind:
        """The same where loads are those of one context-parallel rank."""
        return self._replace(mode=dataclasses.replace(self.mode, cp=1))


def stage_kind(part: ModulePlan, stage: int) -> StageKind:
    """The kind of a stage of a planned module."""
    layers, p = part.layers_per_stage, part.parallel
    limits = part.recompute_tokens[stage] if part.recompute_tokens else ()
    frac = 0.0 if limits else part.recomputed_frac(stage)
    return StageKind(layers[stage], has_edge(layers, stage), p.mode.recomputing(frac), limits)


def _share(load: Load, cp: int) -> Load:
    """What a rank has of a load that so many share evenly."""
    if cp == 1:
        return load
    items, tokens, sum_sq = (np.asarray(part, dtype=np.float64) / cp for part in load)
    return items, tokens, sum_sq


def has_edge(layers_per_stage: tuple[int, ...], stage: int) -> bool:
    """Whether a stage pays the edge time: the last one with layers does (head and loss dwarf the embedding lookup)."""
    return layers_per_stage[stage] > 0 and not any(layers_per_stage[stage + 1 :])


def refuse_far(table: CostTable, load: Load, max_extrapolation: float) -> None:
    """Nothing, unless a load lies beyond `max_extrapolation` times the largest probe, where the table knows that.

    Raises:
        CostError: what was asked, what was probed, and what to do.
    """
    tokens, sum_sq = (np.asarray(part, dtype=np.float64) for part in load[1:])
    max_length = max_extrapolation * table.max_mean_length * ROUNDING
    if table.max_tokens and np.any(tokens > max_extrapolation * table.max_tokens):
        asked, probed = f"{int(tokens.max())} tokens", f"{table.min_tokens} to {table.max_tokens} tokens"
    elif max_length and np.any(sum_sq > max_length * tokens):
        length = float(np.max(np.where(tokens > 0, sum_sq, 0.0) / np.maximum(tokens, 1.0)))
        asked, probed = f"a mean length of {length:.0f} tokens", f"mean lengths up to {table.max_mean_length:.0f}"
    else:
        return
    raise CostError(
        f"cost of module `{table.module}` asked for {asked}; probed: {probed}, and at most {max_extrapolation:g} "
        "times that is predicted",
        where=f"cost table {table.table_id} at tp {table.tp} on {table.hardware}",
        hint="profile the module on larger groups of samples, or use CostModel(..., extrapolate=True)",
    )
