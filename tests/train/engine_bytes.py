"""Bytes that ranks of the engine hold, counted tensor by tensor, beside those the planner charges.

`python -m tests.train.engine_bytes` prints the table of `docs/appendix.md`, all columns.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from transformers.models.qwen3_5 import modeling_qwen3_5

from dflop.cost import curve
from dflop.cost.analytic import analytic_cost_tables
from dflop.cost.devices import H100
from dflop.cost.model import CostModel
from dflop.models import attention, float8, loss_size, offload
from dflop.models.adapter_specs import with_adapters
from dflop.models.family import Family
from dflop.models.generic.states import DELTA_RULE
from dflop.models.ways import Way
from dflop.models.weights import build_empty
from dflop.parallel import tokens
from dflop.parallel.topology import seats
from dflop.plan import memory
from dflop.plan.memory import StageBytes, stage_bytes
from dflop.profile.groups import make_group
from dflop.profile.probe import ModuleProbe, ProbeSettings
from dflop.records import CostTable, CostTerms
from dflop.simulate.order import in_flight, num_stages_after
from dflop.train.fsdp import sharded_modules
from tests.models.whole_model import build_model
from tests.profile.measuring import measure
from tests.train.bytes_families import token_ids
from tests.train.bytes_layouts import NUM_RANKS, Layout, adapted, batch_of, layouts, names
from tests.train.maskless import delta_rule, maskless
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import SyntheticSource, assign

PARTS = ("weights", "gradients", "optimizer", "kept", "peak")


def predicted(of: Layout) -> list[dict[str, float]]:
    """What the planner charges each rank with, by `PARTS`."""
    plan, used = of.plan, of.family
    model = build_empty(used, used.hf_config | token_ids(used), torch.bfloat16)
    specs = with_adapters(used.specs(), model, used, adapted(of, model))
    modules = [module for module, _ in of.lora]
    cost = CostModel(cost_tables(of), frozen=of.frozen, adapted=modules, specs=specs, extrapolate=True)
    found = []
    for seat in seats(plan):
        totals = []
        for num_samples in of.num_samples:
            held = [s for s in specs if seat.part(s.module)]
            parts = [_stage_bytes(cost, spec, seat.stage, of, num_samples) for spec in held]
            totals.append(sum(parts[1:], start=parts[0]))
        depth = int(in_flight(plan.num_microbatches, num_stages_after(plan, seat.module, seat.stage)))
        sizes = {name: float(getattr(totals[0], name)[0, 0]) for name in PARTS[:3]}
        together = [totals[k : k + depth] for k in range(len(totals) - depth + 1)]  # in flight
        kept = [sum(float(t.kept[0, 0]) for t in of) for of in together]
        once = [max(float(t.once[0, 0]) for t in of) for of in together]
        peak = float(totals[0].state[0, 0]) + max(map(sum, zip(kept, once, strict=True)))
        found.append({**sizes, "kept": max(kept), "peak": peak})
    return found


def cost_tables(of: Layout) -> list[CostTable]:
    """Of the data sheet, but with the activations that two shallow probes of each module keep, as in a profile."""
    used = of.family
    tables = analytic_cost_tables(used.specs(), H100, profile_key="", frozen=of.frozen, fp8=of.fp8)
    adapting = [spec for spec in used.specs() if spec.module in dict(of.lora)]
    tables += analytic_cost_tables(adapting, H100, profile_key="", frozen=list(dict(of.lora)))
    return [
        replace(table, activation_bytes=_kept(used, table.module, of, Way(table.is_frozen, table.recompute)))
        for table in tables
        if table.tp == 1 and table.module in names(of.plan)
    ]


def _kept(used: Family, module: str, of: Layout, way: Way) -> CostTerms:
    group = make_group("random", batch_of(of)[:2], module)
    ids = token_ids(used)
    settings, cpu = ProbeSettings("", "", "", "bfloat16", num_repeats=1, fp8=of.fp8), torch.device("cpu")
    few, more = used.probe_depths(module, (1, 2))
    one, two = (
        measure(ModuleProbe(used, ids, module, depth, settings, cpu, way=way), group, num_repeats=1).activation_bytes
        / group.load.num_tokens
        for depth in (few, more)
    )
    each = (two - one) / (more - few)
    return replace(curve.ZERO, layer_per_token=each, edge_per_token=one - few * each)


def _stage_bytes(cost: CostModel, spec: Any, stage: int, of: Layout, num_samples: int) -> StageBytes:
    """Of a microbatch of so many samples."""
    m, load = of.plan.module(spec.module), batch_of(of)[0].load(spec.module)
    each = np.array([[load.num_items], [load.num_tokens], [load.sum_sq_tokens]]) * num_samples / m.parallel.dp
    again = [m.num_rerun(stage, float(each[1, 0])) for stage in range(m.parallel.pp)]
    found = stage_bytes(
        spec, cost, np.array([m.layers_per_stage]), each, m.parallel.mode,
        dp=np.array([m.parallel.dp]), shard_optimizer=np.array([m.shard_optimizer]), shards=m.parameter_shards,
        recompute=np.array([again]), offloaded=np.array([m.offloaded or 0]),
    )  # fmt: skip
    return StageBytes(*(getattr(found, name)[:, stage : stage + 1] for name in StageBytes.__slots__))


def measured(rank: int, folder: Path, names: Sequence[str]) -> list[dict[str, float]]:
    """What a rank of each layout holds, by `PARTS`: a worker of `run_ranks`."""
    return [_in_chunks(lambda of: _measure(rank, of), layouts()[name]) for name in names]


def _in_chunks(find: Callable[[Layout], Any], of: Layout) -> Any:
    with (
        patch.object(loss_size, "CHUNK_TOKENS", of.chunk_tokens),
        patch.object(offload, "LEAST_BYTES", 1 << 10),
        patch.object(offload, "host_like", _host_like),
        patch.object(memory, "NUM_WAITING", 0),  # a CPU's copies are there at once
        patch.object(attention.F, "scaled_dot_product_attention", maskless),
        patch.object(float8, "_check_device", lambda *_: False),
        patch.object(torch, "_scaled_mm", _zeros),
        patch.object(modeling_qwen3_5, DELTA_RULE, delta_rule),
        patch.object(tokens, "_all_gather", _settled(tokens._all_gather)),
        patch.object(tokens, "_reduce_scatter", _settled(tokens._reduce_scatter)),
        patch.object(dist, "all_to_all_single", _settled(dist.all_to_all_single)),
    ):
        return find(of)


def _settled(exchange: Callable[..., Any]) -> Callable[..., None]:
    """The exchange, and a moment for gloo's threads to let go of its tensors."""

    def run(*given: Any, **options: Any) -> None:
        work = exchange(*given, **options, async_op=True)
        work.wait()
        time.sleep(0.001)
        del work

    return run


def _zeros(left: torch.Tensor, right: torch.Tensor, *, out_dtype: torch.dtype, **_: Any) -> torch.Tensor:
    """As many bytes as a product in 8 bit, for which a GPU makes no copies in float32 as a CPU does."""
    return left.new_zeros(len(left), right.shape[1], dtype=out_dtype)


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that is not the allocator's, and so not counted."""
    return torch.from_numpy(np.empty(tensor.nbytes, np.uint8)).view(tensor.dtype).view(tensor.shape)


def _measure(rank: int, of: Layout) -> dict[str, float]:
    used, plan = of.family, of.plan
    model = build_model(used, used.hf_config | token_ids(used), seed=0, dtype=torch.bfloat16)
    adapted(of, model)
    it = Rank(rank, plan, used, model, frozen=of.frozen, rate=1e-3, fp8=of.fp8)
    del model
    batch, turns = batch_of(of), itertools.count()
    slots = [k for k, num in enumerate(of.num_samples) for _ in range(num)]
    step_plan = assign(plan, batch, 0, slots=slots, replica=lambda dp: next(turns) % dp, shuffled=range)
    it.dtype = torch.float32  # so that the engine's own copies are counted
    microbatches = it.prepare(SyntheticSource(batch, used), step_plan).microbatches
    weights = _distinct([*it.names.values(), *(s for stage in it.stages for s in stage.shards.values())])
    watch = Watch(it, weights)

    def step() -> None:
        it.update(it.run(microbatches, batch), 1e-3, 1.0)

    # A float32 weight is its own master.
    states = [t for state in it.optimizer.state().values() for t in state.values()]
    optimizer_bytes = sum(_distinct(states).values()) - sum(
        _distinct([t for t in states if _key(t) in weights]).values()
    )
    num_steps = 8 if it.groups.shards else 1  # gloo lets go of what FSDP2 sends when it likes
    with torch.backends.mkldnn.flags(enabled=False):  # its convolutions take many times their tensors
        most_allocated = min(peak_of(lambda: watch.during(step)) for _ in range(num_steps))
    held = sum(weights.values())
    buffers = sum(_distinct(p.grad for p in it.names.values() if p.grad is not None).values())
    return {
        "weights": held + watch.gathered, "gradients": watch.gradients, "optimizer": optimizer_bytes,
        "kept": watch.kept, "peak": held + optimizer_bytes + buffers + most_allocated,
    }  # fmt: skip


class Watch:
    """Counts what an engine keeps, with gradients and gathered weights, whenever a backward pass begins."""

    def __init__(self, it: Rank, weights: dict[int, int]) -> None:
        self.kept = self.gradients = self.gathered = 0
        self._it, self._weights, self._saved = it, weights, dict[int, list[Any]]()

    def during(self, step: Callable[[], None]) -> None:
        engine = self._it.engine
        original = engine._backward

        def backward(*given: Any) -> None:
            self._look()
            original(*given)

        engine._backward = backward
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                step()
        finally:
            engine._backward = original

    def _pack(self, tensor: torch.Tensor) -> Any:
        is_weight = any(isinstance(t, torch.nn.Parameter) for t in (tensor, tensor._base))
        return tensor if is_weight or _key(tensor) in self._weights else _Held(tensor, self._saved)

    def _look(self) -> None:
        in_flight = self._it.engine._in_flight.values()
        leaves = [leaf for state in in_flight for _, leaf in state.leaves]
        outputs = [output.tensor for state in in_flight for output in state.outputs]
        saved = {key: storage.nbytes() for key, (storage, _) in self._saved.items()}
        units = (unit for stage in self._it.stages for unit in sharded_modules(stage))
        shared = [p for unit in units for p in unit._get_fsdp_state()._fsdp_param_group.fsdp_params]
        shards = [_local(p.grad) for stage in self._it.stages for p in stage.shards.values()]
        gradients = [*shards, *(p.grad for p in self._it.names.values())]
        gathered = [p._unsharded_param for p in shared if hasattr(p, "_unsharded_param")]
        self.kept = max(self.kept, sum((_distinct([*leaves, *outputs]) | saved).values()))
        self.gradients = max(self.gradients, sum(_distinct(g for g in gradients if g is not None).values()))
        self.gathered = max(self.gathered, sum(_distinct(gathered).values()))


def _local(gradient: Any) -> Any:
    return None if gradient is None else gradient.to_local()


def _unpack(held: Any) -> torch.Tensor:
    tensor: torch.Tensor = held.tensor if isinstance(held, _Held) else held
    return tensor


class _Held:
    """A saved tensor; its storage counts as kept until the last of them is gone."""

    def __init__(self, tensor: torch.Tensor, saved: dict[int, list[Any]]) -> None:
        self.tensor, self._saved, self._key = tensor, saved, _key(tensor)
        saved.setdefault(self._key, [tensor.untyped_storage(), 0])[1] += 1

    def __del__(self) -> None:
        self._saved[self._key][1] -= 1
        if not self._saved[self._key][1]:
            del self._saved[self._key]


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _distinct(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of storages by identity."""
    plain = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return {_key(t): t.untyped_storage().nbytes() for t in plain}


def peak_of(step: Callable[[], None]) -> int:
    """Most bytes that a step had of torch's allocator at once on top of those before it; without gloo's own copies."""
    gc.collect()  # what earlier layouts left would be let go of during the step
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
        time.sleep(0.1)  # gloo's threads let go of what they sent; meanwhile the profiler must not end: it crashes
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    ((own, _),) = Counter(e.start_thread_id() for e in events).most_common(1)
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.start_thread_id() == own]
    return int(np.cumsum(sizes).max(initial=0))


Row = tuple[str, str, dict[str, float], dict[str, float]]
"""Layout, stage, predicted and measured bytes by `PARTS`."""


def rows(names: Sequence[str] | None = None) -> Iterator[Row]:
    """Per stage what each of its ranks is charged with, and what the fullest of them holds."""
    chosen = list(layouts()) if names is None else list(names)
    with tempfile.TemporaryDirectory() as folder:
        of_rank = run_ranks(measured, NUM_RANKS, Path(folder), chosen)
    for n, name in enumerate(chosen):
        plan = layouts()[name].plan
        charged = _in_chunks(predicted, layouts()[name])
        for place, ranks in itertools.groupby(seats(plan), key=lambda seat: f"{seat.module} {seat.stage}"):
            numbers = [seat.rank for seat in ranks]
            fullest = {part: max(of_rank[rank][n][part] for rank in numbers) for part in PARTS}
            yield name, place, charged[numbers[0]], fullest


def table(found: Iterable[Row]) -> Iterator[str]:
    """Lines of Markdown: of each layout the fullest stage, charged / measured in MB."""
    yield f"| layout, 4 ranks | {' | '.join(PARTS)} |"
    yield "|---" * (1 + len(PARTS)) + "|"
    for name, stages in itertools.groupby(found, key=lambda row: row[0]):
        _, _, charged, held = max(stages, key=lambda row: row[3]["peak"])
        cells = (f"{charged[part] / 1e6:.2f} / {held[part] / 1e6:.2f}" for part in PARTS)
        yield f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table(rows(sys.argv[1:] or None))))
