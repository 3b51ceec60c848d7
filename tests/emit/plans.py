"""Random plans of both layouts, for the tests of the emitters."""

import dataclasses
import math

from hypothesis import strategies as st

from dflop.records import LLM, ClusterSpec, ModulePlan, ParallelSpec, Plan
from tests.builders import make_inline_plan, make_plan

CLUSTER = ClusterSpec("test", "slurm", 2, 8, 2**36, "cuda", 64)


def module(name: str, tp: int, pp: int, dp: int, first_rank: int = 0, **fields) -> ModulePlan:
    """Two layers a stage unless `layers_per_stage` says otherwise."""
    fields = {"layers_per_stage": (2,) * pp, "stage_memory_bytes": tuple(range(1, pp + 1))} | fields
    return ModulePlan(name, ParallelSpec(tp, pp, dp), first_rank, **fields)


def split(*modules: ModulePlan, num_microbatches: int = 2, global_batch_size: int = 16) -> Plan:
    """The modules as they are, on ranks one behind the other."""
    first_rank, placed = 0, []
    for m in modules:
        placed.append(dataclasses.replace(m, first_rank=first_rank))
        first_rank += m.parallel.num_processes
    plan = make_plan({LLM: 1}, num_microbatches=num_microbatches, global_batch_size=global_batch_size)
    return dataclasses.replace(plan, modules=tuple(placed), predicted_step_s=0.25, baseline_step_s=0.5)


@st.composite
def split_plans(draw, degrees=(1, 2, 3, 4, 6, 8)) -> Plan:
    """Valid for this project's engine; most of them break some rule of another."""
    degree = st.sampled_from(degrees)
    modules = []
    for name in (*draw(st.sampled_from([("vision",), ("vision", "audio"), ("audio",), ("radar", "vision")])), LLM):
        pp = draw(st.integers(1, 4))
        layers = tuple(draw(st.lists(st.integers(1, 4), min_size=pp, max_size=pp)))
        how = {"recompute": draw(st.booleans()), "shard_optimizer": draw(st.booleans())}
        how["max_tokens"] = draw(st.sampled_from([0, 4096]))
        modules.append(module(name, draw(degree), pp, draw(degree), layers_per_stage=layers, **how))
    num_microbatches, size = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([16, 24, 48, 96]))
    return split(*modules, num_microbatches=num_microbatches, global_batch_size=size)


@st.composite
def inline_plans(draw) -> Plan:
    names = draw(st.sampled_from([("vision", LLM), ("vision", "audio", LLM)]))
    plan = make_inline_plan(
        draw(st.integers(1, 3)), pp=draw(st.integers(1, 4)), tp=draw(st.integers(1, 2)), modules=names
    )
    return dataclasses.replace(plan, uniform_step_s=math.nan)


@st.composite
def mimo_like_plans(draw) -> Plan:
    """Split plans of which about half obey the rules of MIMO: powers of two, deviating stages at the ends only."""
    degree, recompute = st.sampled_from((1, 1, 2, 2, 4, 3)), draw(st.booleans())
    modules = [
        module(name, draw(degree), 1, draw(degree), recompute=recompute, shard_optimizer=draw(st.booleans()))
        for name in draw(st.sampled_from([("vision",), ("vision", "audio"), ("radar",)]))
    ]
    pp, each = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    layers = (draw(st.integers(1, 4)), *[each] * (pp - 2), draw(st.integers(1, 4)))[:pp]
    flag = recompute if draw(st.integers(0, 4)) else not recompute
    llm = module(LLM, draw(degree), pp, draw(degree), layers_per_stage=layers, recompute=flag)
    return split(*modules, llm, num_microbatches=draw(st.sampled_from([1, 2, 4])), global_batch_size=48)
