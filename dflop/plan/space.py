"""What a plan is made for, and what it may choose from."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from dflop.cost.model import CostModel, Floats
from dflop.cost.terms import Term, cost_terms
from dflop.errors import InfeasiblePlanError
from dflop.plan.scenarios import ScenarioLoads, scenario_loads
from dflop.records import LLM, ClusterSpec, ModuleSpec, Plan, RunMode, SampleShape
from dflop.schedule.items import Ints, ModuleItems, levelled, module_items
from dflop.simulate.pieces import NUM_CHUNKS

T = TypeVar("T")

USABLE_MEMORY_FRAC = 0.9
"""Most of a device's memory: the rest is for workspaces, communication buffers and fragmentation."""
CUDA_RESERVED_BYTES, FRAGMENTED_FRAC = 2 << 30, 0.05
"""On a GPU both at least: half a GiB for CUDA's context, one for NCCL's buffers, half for libraries' workspaces, and
what torch's allocator cannot give out again. Rules of thumb, not measured here."""
EVERY_DP_UP_TO = 64
"""Processes of a cluster on which every data-parallel degree is tried."""
SMALL_COUNTS = (*range(1, 17), 18, 20, 22, 24, 28, 32, 36, 40, 48, 56)
"""Numbers of microbatches below 64."""


class PlanRules(Protocol):
    """What another trainer accepts of split plans, as constraints of the search; see `dflop/emit`."""

    def microbatches_ok(self, layouts: Mapping[str, Any], num_microbatches: int, global_batch_size: int) -> bool:
        """Whether a number of microbatches is possible at all; `layouts` may be empty."""

    def parts(self, columns: Any, num_samples: int) -> Iterator[Ints]:
        """Per part the columns, each of a single module, that go together in any combination."""

    def nearest_layers(self, layers_per_stage: tuple[int, ...]) -> tuple[int, ...]:
        """The nearest split of layers that is accepted."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What the planner may choose."""

    share_ranks: tuple[bool, ...] = (False, True)
    """Whether modules have ranks of their own, whether all share the same; with both, some may and others not."""
    cps: tuple[int, ...] | None = None
    """Context-parallel degrees of plans whose modules share ranks, others have none; None: powers of two on GPUs, and
    none on CPUs, where exchanges in every layer compete with computing for the cores."""
    whole_samples: str = ""
    """Why the engine shares no samples of this model over ranks, whatever `cps` has; empty: it does."""
    eps: tuple[int, ...] | None = None
    """Expert-parallel degrees of such plans; None: 1, 2, 4, 8 on GPUs, as far as they divide experts and nodes."""
    folds_experts: bool = False
    """Whether ep may be combined with tp (Megatron-LM's parallel folding); the engine refuses it."""
    recompute: tuple[bool, ...] = (False, True)
    shard_optimizer: bool = True
    """Whether data-parallel replicas may share out the optimizer's states (ZeRO-1)."""
    shard_parameters: tuple[bool, ...] = (False, True)
    """Whether they may share out parameters and gradients, too, over a node or all of them (FSDP2)."""
    host_bytes: float = 0.0
    """Host memory per process that activations may fill; 0: they stay on the device."""
    host_bytes_per_s: float = 0.0
    """Rate of copies between device and host, in each direction while the other one is busy, too."""
    dps: tuple[int, ...] = ()
    """Data-parallel degrees; empty: any."""
    microbatches: tuple[int, ...] = ()
    """Numbers of microbatches; empty: 1 to 16, then in ever larger steps up to the global batch size."""
    rules: PlanRules | None = None
    """Rules of another trainer the plan is for; then modules have ranks of their own, in arrival order."""

    def microbatch_choices(self, global_batch_size: int) -> tuple[int, ...]:
        """Numbers of microbatches to try, ascending.

        Raises:
            InfeasiblePlanError: none of those asked for is between 1 and the global batch size.
        """
        wanted = sorted(set(self.microbatches)) or [*SMALL_COUNTS, *_growing(64, global_batch_size)]
        kept = tuple(m for m in wanted if 1 <= m <= global_batch_size and self._allows(m, global_batch_size))
        if not kept:
            raise InfeasiblePlanError(
                f"no number of microbatches in {wanted} is between 1 and the global batch of {global_batch_size} "
                "samples",
                hint="raise the global batch size or allow fewer microbatches",
            )
        return kept

    def _allows(self, num_microbatches: int, global_batch_size: int) -> bool:
        return self.rules is None or self.rules.microbatches_ok({}, num_microbatches, global_batch_size)


@dataclass(frozen=True)
class Problem:
    """Everything a plan is made for."""

    run_id: str
    specs: tuple[ModuleSpec, ...]
    """Encoders first, `llm` last."""
    cluster: ClusterSpec
    cost: CostModel
    """Must extrapolate: the search looks at microbatches far larger than any probe."""
    batches: tuple[Sequence[SampleShape], ...]
    """Sampled global batches, at least one: the scenarios that step times are averaged over."""
    global_batch_size: int
    snapshot_seq: int
    space: SearchSpace = field(default_factory=SearchSpace)
    worst_samples: tuple[SampleShape, ...] = ()
    """The largest samples of the whole data profile: memory has to hold them, whether or not a batch has drawn them."""

    def __post_init__(self) -> None:
        assert self.specs[-1].module == LLM, f"the last of {[s.module for s in self.specs]} must be `{LLM}`"
        assert self.batches, "a plan needs at least one sampled batch"
        assert self.cost.extrapolate, "the cost model must extrapolate"

    def levelled(self) -> Self:
        """The same problem with corrections by size at the level of its batches, see `dflop/schedule/items.py`."""
        return replace(self, cost=levelled(self.cost, self.batches))

    @cached_property
    def loads(self) -> dict[str, ScenarioLoads]:
        """Per module; an encoder's items may go to any of its ranks (modules that share no ranks)."""
        return {s.module: scenario_loads(self.batches, s.module, worst=self.worst_batches) for s in self.specs}

    @cached_property
    def sample_loads(self) -> dict[str, ScenarioLoads]:
        """Per module; all items of a sample are in one place (encoders that share ranks with the LLM)."""
        return {
            s.module: scenario_loads(self.batches, s.module, whole_samples=True, worst=self.worst_batches)
            for s in self.specs
        }

    @cached_property
    def largest_tiles(self) -> dict[str, Floats]:
        """Per encoder `[3]`: the largest tile or frame of any item, each row on its own."""
        found = {spec.module: np.zeros(3) for spec in self.specs[:-1]}
        for batch in (*self.batches, self.worst_samples):
            for name in found:
                items = module_items(batch, name)
                of_tile = np.stack(items.loads) / np.maximum(items.num_parts, 1)
                found[name] = np.maximum(found[name], of_tile.max(axis=1, initial=0))
        return found

    def uneven(self, module: str, load: Floats, cp: int) -> Floats:
        """A group's load `[3, C]` such that a cp-th of it is what the rank with most of it may have.

        The LLM's tokens are cut evenly. Media are dealt out in chunks of whole tiles, the largest first, or of any size
        where frames are cut: no rank has more than an even part and, but for its own part of it, one chunk.
        """
        if cp == 1 or module == LLM:
            return load
        tile = 0.0 if self.spec(module).merge_tokens else self.largest_tiles[module][:, np.newaxis]
        chunk = load / (NUM_CHUNKS * cp) + tile
        found: Floats = np.minimum(load + (cp - 1) * chunk, cp * load)
        return found

    @cached_property
    def worst_batches(self) -> tuple[Sequence[SampleShape], ...]:
        """Per one of the largest samples a batch that has not drawn it, and that sample; none where all have."""
        found = []
        for i, sample in enumerate(self.worst_samples):
            others = [b for b in self.batches if all(s.sample_index != sample.sample_index for s in b)]
            if others:
                found.append((sample, *others[i % len(others)]))
        return tuple(found)

    def heaviest_units(self, specs: Sequence[ModuleSpec]) -> dict[str, Floats]:
        """Per module of those that share ranks `[3, S]` of what takes longest and cannot be divided.

        With the LLM it is a sample; without it of each module the largest of items, each row on its own.
        """
        if specs[-1].module != LLM:
            return {spec.module: self.loads[spec.module].longest for spec in specs}
        return self.once(("heaviest units", *(s.module for s in specs)), lambda: self._heaviest_samples(specs))

    def _heaviest_samples(self, specs: Sequence[ModuleSpec]) -> dict[str, Floats]:
        seconds: list[Floats] = [np.zeros(len(batch)) for batch in self.batches]
        for spec in specs:
            tp = self.tps(spec)[0]
            for total_s, load in zip(seconds, self.sample_loads[spec.module].units, strict=True):
                forward_s, backward_s = self.cost.module_seconds(
                    spec.module, load, RunMode(tp), num_layers=spec.num_layers, edge=True
                )
                total_s += forward_s + backward_s
        heaviest = [int(of.argmax()) for of in seconds]
        return {
            s.module: np.stack(
                [load[:, k] for load, k in zip(self.sample_loads[s.module].units, heaviest, strict=True)], axis=1
            ).astype(float)
            for s in specs
        }

    @cached_property
    def batch_items(self) -> tuple[dict[str, ModuleItems], ...]:
        """Per batch the items of every module: the same for all plans."""
        return tuple({s.module: module_items(batch, s.module) for s in self.specs} for batch in self.batches)

    @cached_property
    def _worked_out(self) -> dict[tuple[Hashable, ...], Any]:
        return {}

    def once(self, key: tuple[Hashable, ...], work: Callable[[], T]) -> T:
        """What `work` returns, which is done once per key: what a value is, and of what."""
        if key not in self._worked_out:
            self._worked_out[key] = work()
        found: T = self._worked_out[key]
        return found

    @property
    def usable_bytes(self) -> int:
        """Memory per process that a plan may fill."""
        num_bytes = self.cluster.memory_per_process_bytes
        usable = USABLE_MEMORY_FRAC * num_bytes
        if self.cluster.device == "cuda":
            usable = max(0.0, min(usable, (1 - FRAGMENTED_FRAC) * num_bytes - CUDA_RESERVED_BYTES))
        return int(usable)

    @property
    def microbatch_choices(self) -> tuple[int, ...]:
        return self.space.microbatch_choices(self.global_batch_size)

    def spec(self, module: str) -> ModuleSpec:
        return next(s for s in self.specs if s.module == module)

    def terms(self, plan: Plan) -> tuple[Term, ...]:
        """What a plan's modules and messages cost, term by term."""
        return cost_terms(self.cost, [(self.spec(m.module), m.parallel.mode) for m in plan.modules], self.cluster)

    def tps(self, spec: ModuleSpec) -> list[int]:
        """Tensor-parallel degrees of a module: it can be cut so, has costs, and the ranks fit evenly on a node.

        Raises:
            CostError: no cost table for the module at all.
            InfeasiblePlanError: none is left.
        """
        known, each = self.cost.tps(spec.module), self.cluster.num_processes_per_node
        found = sorted(set(spec.tp_choices) & set(known))
        fitting = [tp for tp in found if tp <= each and (self.cluster.num_nodes == 1 or each % tp == 0)]
        if not fitting:
            raise InfeasiblePlanError(
                f"module `{spec.module}` allows tp {list(spec.tp_choices)}, has cost tables for tp {list(known)} "
                f"and a node has {each} processes",
                hint="profile the module at a smaller tp",
            )
        return fitting

    def cps(self, tp: int) -> list[int]:
        """Context-parallel degrees beside a tp: 1, and those with which groups fill a node and never leave it."""
        each = self.cluster.num_processes_per_node
        powers = [1 << k for k in range(each.bit_length() if self.cluster.device == "cuda" else 1)]
        wanted = powers if self.space.cps is None else self.space.cps
        wanted = [1] if self.space.whole_samples else wanted
        return sorted(cp for cp in set(wanted) if cp == 1 or each % (cp * tp) == 0)

    def eps(self, tp: int, cp: int) -> list[int]:
        """Expert-parallel degrees beside a tp and a cp: groups do not leave a node, and the LLM trains."""
        each, llm, wanted = self.cluster.num_processes_per_node, self.spec(LLM), self.space.eps
        if wanted is None:
            wanted = llm.ep_choices if self.cluster.device == "cuda" else (1,)
        may_cut = tp == 1 or self.space.folds_experts
        shares = may_cut and self.space.rules is None and self.cost.table(LLM, RunMode(tp)).trains_layers
        group = tp * cp
        fitting = (
            ep
            for ep in llm.ep_choices
            if shares and each % ep == 0 and ep % tp == 0 and max(group, ep) % min(group, ep) == 0
        )
        return sorted({1, *fitting} & set(wanted))

    def dps(self, most: int) -> list[int]:
        """Data-parallel degrees up to `most`; beyond 16 on large clusters those that tile a cluster well."""
        num_processes = self.cluster.num_processes
        return [
            dp
            for dp in self.space.dps or range(1, most + 1)
            if dp <= most
            if num_processes <= EVERY_DP_UP_TO
            or dp <= 16
            or dp & (dp - 1) == 0
            or dp % 3 == 0
            or num_processes % dp == 0
        ]


def _growing(first: int, most: int) -> list[int]:
    """`first` and 1.25, 1.5, 2, 2.5, 3, 4, ... times it, until `most` is passed."""
    found, base = [], first
    while base <= most:
        found += [base, base * 5 // 4, base * 3 // 2]
        base *= 2
    return found
