"""The reference planner's search and acceptance rule, with its fault.

Source: DFLOP (SIGMOD'26) as released at commit 60e86d8, retold in our own words; what it believes about costs is in
`reference_costs.py`. It tries every split of all devices into encoder and LLM, and every tp, pp, dp on each side. The
number of microbatches is not searched: it is the smallest for which an average microbatch is no larger than the
largest single sample. With mean sizes alone a step takes

    (microbatches + stages of both modules - 1) * the slower module's stage on an average microbatch

and a layout is accepted when that is below 1.1 times the present one's *and* it has fewer microbatches. So the number
of microbatches only ever falls, the step may become a tenth longer with every acceptance, a much faster layout with as
many microbatches is passed over, and the outcome depends on the order of the search.

Layouts that nothing could run are left out, which the released code does not do: stages without layers, more replicas
than samples, tensor-parallel degrees without a cost table. So are pipelines deeper than our own planner tries: layers
hardly divide over them, which the formula does not see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dflop.cost.curve import Bools, Floats
from dflop.errors import InfeasiblePlanError
from dflop.plan.candidates import MAX_PP, recompute_ways
from dflop.plan.drafts import draft, fits
from dflop.plan.grid_choice import GridChoice
from dflop.plan.partition import even_layers
from dflop.plan.space import Problem
from dflop.records import ModuleSpec, ParallelSpec, Plan
from dflop.schedule.items import Ints
from tests.bench.reference_costs import ReferenceModule, encoder_module, llm_module

TOLERATED_RATIO = 1.1
"""How much longer than the present layout's a step may be for a layout to be accepted."""
ROUNDING = 1e-9
TPS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """What the reference would run."""

    plan: Plan
    """Its formula's seconds are the reference's own."""
    fits: bool
    """Whether our memory model thinks so, too; the reference's rule of memory is another."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """Everything the reference compares, in order of its search. Columns of `encoder` and `llm`: tp, pp, dp."""

    encoder: Ints
    """`[C, 3]`."""
    llm: Ints
    """`[C, 3]`."""
    num_microbatches: Ints
    """`[C]`."""
    step_s: Floats
    """`[C]` by the reference's formula."""


def accepted(step_s: Floats, num_microbatches: Ints) -> int:
    """Position of the layout that the released rule takes of `[C]` in order of the search."""
    picked, best_s, fewest = -1, float("inf"), float("inf")
    for i, (seconds, m) in enumerate(zip(step_s.tolist(), num_microbatches.tolist(), strict=True)):
        if m < fewest and seconds < TOLERATED_RATIO * best_s:
            picked, best_s, fewest = i, seconds, m
    return picked


def reference_plan(problem: Problem, *, limit_bytes: float | None = None) -> ReferencePlan:
    """The plan the reference would choose; as its released code it always recomputes, where costs know how to.

    Args:
        problem: One encoder and the LLM. Of its space the microbatches and ZeRO-1 are ignored.
        limit_bytes: What its memory rule is held against. None: what every plan here may use of a device.

    Raises:
        InfeasiblePlanError: not one encoder and an LLM, or the reference's memory rule lets nothing through.
    """
    recompute = _recomputes(problem)
    modules = reference_modules(problem, recompute=recompute)
    layouts = reference_layouts(
        *modules,
        num_devices=problem.cluster.num_processes,
        limit_bytes=problem.usable_bytes if limit_bytes is None else limit_bytes,
        global_batch_size=problem.global_batch_size,
    )
    if not len(layouts.step_s):
        raise InfeasiblePlanError(
            "the reference planner finds no layout: by its memory rule nothing fits",
            where=f"{problem.cluster.num_processes} processes",
        )
    best = accepted(layouts.step_s, layouts.num_microbatches)
    grids = [
        GridChoice.of(
            ParallelSpec(*(int(n) for n in degrees)),
            {module.spec.module: even_layers(module.spec.num_layers, int(degrees[1]))},
            recompute=recompute,
        )
        for module, degrees in zip(modules, (layouts.encoder[best], layouts.llm[best]), strict=True)
    ]
    plan = draft(problem, int(layouts.num_microbatches[best]), grids, float(layouts.step_s[best]))
    return ReferencePlan(plan, fits(problem, plan))


def reference_modules(problem: Problem, *, recompute: bool) -> tuple[ReferenceModule, ReferenceModule]:
    """(encoder, LLM) as the reference sees them on all sampled batches together.

    Raises:
        InfeasiblePlanError: not one encoder and an LLM.
    """
    if len(problem.specs) != 2:
        raise InfeasiblePlanError(
            f"the reference planner knows one encoder and one LLM; this model has {len(problem.specs) - 1} encoders",
            where=f"modules: {', '.join(spec.module for spec in problem.specs)}",
        )
    encoder, llm = problem.specs
    samples = [sample for batch in problem.batches for sample in batch]
    return (
        encoder_module(encoder, problem.cost, samples, _tps(problem, encoder), recompute=recompute),
        llm_module(llm, problem.cost, samples, _tps(problem, llm), recompute=recompute),
    )


def reference_layouts(
    encoder: ReferenceModule,
    llm: ReferenceModule,
    *,
    num_devices: int,
    limit_bytes: float,
    global_batch_size: int,
) -> Layouts:
    """Every layout on all devices that the memory rule lets through: the encoder's devices ascending, then degrees."""
    pairs = []
    for num_encoder in range(1, num_devices):
        ours = _degrees(encoder, num_encoder, global_batch_size)
        theirs = _degrees(llm, num_devices - num_encoder, global_batch_size)
        pairs.append(np.hstack([np.repeat(ours, len(theirs), axis=0), np.tile(theirs, (len(ours), 1))]))
    both = np.vstack(pairs) if pairs else np.empty((0, 6), dtype=np.int64)
    both = both[_memory_fits(encoder, llm, both[:, :3], both[:, 3:], limit_bytes)]
    e, t = both[:, :3], both[:, 3:]
    m = _num_microbatches(encoder, llm, e[:, 2], t[:, 2], global_batch_size)
    stage_s = np.maximum(_stage_seconds(encoder, e, m, global_batch_size), _stage_seconds(llm, t, m, global_batch_size))
    step_s: Floats = stage_s * (m + e[:, 1] + t[:, 1] - 1)
    return Layouts(e, t, m, step_s)


def _degrees(module: ReferenceModule, num_devices: int, max_dp: int) -> Ints:
    """`[K, 3]`: every (tp, pp, dp) on exactly `num_devices`, ascending."""
    spec = module.spec
    # The released code cuts encoders, too, which this engine does not.
    deepest = spec.max_pp if spec.vocab_size else spec.num_layers
    found = [
        (tp, pp, num_devices // (tp * pp))
        for tp in sorted(module.rates)
        for pp in range(1, min(deepest, num_devices // tp, MAX_PP) + 1)
        if num_devices % (tp * pp) == 0 and num_devices // (tp * pp) <= max_dp
    ]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def _memory_fits(encoder: ReferenceModule, llm: ReferenceModule, e: Ints, t: Ints, limit_bytes: float) -> Bools:
    """`[C]`: encoder microbatches serve every LLM replica and stay in flight through both pipelines."""
    encoder_tokens = encoder.max_size * encoder.tokens_per_size * t[:, 2] / e[:, 2]
    encoder_peak = _peak_bytes(encoder, e, e[:, 1] + t[:, 1], encoder_tokens)
    llm_peak = _peak_bytes(llm, t, t[:, 1], np.full(len(t), llm.max_size))
    return np.maximum(encoder_peak, llm_peak) <= limit_bytes


def _peak_bytes(module: ReferenceModule, degrees: Ints, in_flight: Ints, num_tokens: Floats) -> Floats:
    layers = -(-module.spec.num_layers // degrees[:, 1])
    peak = np.zeros(len(degrees))
    for tp, lines in module.memory.items():
        at = degrees[:, 0] == tp
        peak[at] = lines.peak_bytes(layers[at], in_flight[at], num_tokens[at])
    return peak


def _num_microbatches(
    encoder: ReferenceModule, llm: ReferenceModule, encoder_dp: Ints, llm_dp: Ints, global_batch_size: int
) -> Ints:
    """`[C]`: the smallest number that shrinks an average microbatch to the largest sample, in both modules.

    Where that leaves some replica less than one sample, the search has run out of numbers, and the last one it tried
    stays: one sample per microbatch and LLM replica.
    """
    least = np.ones(len(llm_dp))
    for module, dp in ((encoder, encoder_dp), (llm, llm_dp)):
        if module.max_size > 0:
            least = np.maximum(least, module.mean_size / module.max_size * global_batch_size / dp)
    smallest = np.ceil(least - ROUNDING).astype(np.int64)
    most = global_batch_size // np.maximum(encoder_dp, llm_dp)
    return np.where(smallest <= most, smallest, global_batch_size // llm_dp)


def _stage_seconds(module: ReferenceModule, degrees: Ints, num_microbatches: Ints, global_batch_size: int) -> Floats:
    """`[C]` seconds of a stage on an average microbatch; layers are taken to divide evenly."""
    samples = global_batch_size / (num_microbatches * degrees[:, 2])
    seconds = np.zeros(len(degrees))
    for tp in module.rates:
        at = degrees[:, 0] == tp
        seconds[at] = module.sample_seconds(tp, module.mean_size * samples[at]) * samples[at]
    return seconds / degrees[:, 1]


def _tps(problem: Problem, spec: ModuleSpec) -> list[int]:
    return [tp for tp in problem.tps(spec) if tp in TPS]


def _recomputes(problem: Problem) -> bool:
    """Whether the space allows recomputation and every module has costs for it."""
    return all(True in recompute_ways(problem, spec.module, tp) for spec in problem.specs for tp in _tps(problem, spec))
