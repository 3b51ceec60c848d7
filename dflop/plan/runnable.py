"""Whether the training engine can run a plan: it may have been written by hand, or be of a model that has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflop.errors import ConfigError
from dflop.records import LLM, ModulePlan, ModuleSpec, Plan


def can_cut(spec: ModuleSpec, layers_per_stage: Sequence[int]) -> bool:
    """Whether a module can be cut so; stages without layers of it do not count."""
    held = [n for n in layers_per_stage if n]
    return len(held) <= spec.max_pp and (len(held) == 1 or held[0] >= spec.num_entry_layers)


def check_plan(plan: Plan, specs: Sequence[ModuleSpec]) -> None:
    """Refuse a plan that cannot be trained, with everything that is wrong with it.

    Args:
        plan: What is to run.
        specs: Of the model's modules; encoders that the data brings no work to may be missing from the plan.

    Raises:
        ConfigError: the plan and the model do not go together.
    """
    found = list(_problems(plan, {spec.module: spec for spec in specs}))
    if found:
        raise ConfigError("; ".join(found), where=f"plan {plan.plan_id}", hint="plan again, or correct plan.json")


def _problems(plan: Plan, specs: dict[str, ModuleSpec]) -> Iterator[str]:
    names = [m.module for m in plan.modules]
    if names[-1:] != [LLM] or len(set(names)) < len(names):
        yield f"modules are {', '.join(names) or 'none'}: each must occur once, and `{LLM}` is the last"
        return
    for m in plan.modules:
        if m.module not in specs:
            yield f"the model has no module `{m.module}`"
        else:
            yield from _module_problems(m, specs[m.module])
    yield from _grid_problems(plan)


def _module_problems(m: ModulePlan, spec: ModuleSpec) -> Iterator[str]:
    layers, tp = m.layers_per_stage, m.parallel.tp
    if tp not in spec.tp_choices:
        yield f"`{m.module}` cannot be split over {tp} tensor-parallel ranks, only over {list(spec.tp_choices)}"
    if len(layers) != m.parallel.pp or sum(layers) != spec.num_layers or min(layers, default=0) < 0:
        yield f"`{m.module}` has {spec.num_layers} layers for {m.parallel.pp} stages, the plan says {list(layers)}"
    elif not can_cut(spec, layers):
        together = f", the first with {spec.num_entry_layers} layers" if spec.num_entry_layers > 1 else ""
        limit = "must stay on one stage" if spec.max_pp == 1 else f"can be cut into {spec.max_pp} stages at most"
        yield f"`{m.module}` {limit}{together}; the plan has {list(layers)}"
    yield from _expert_problems(m, spec)
    yield from _limit_problems(m)


def _expert_problems(m: ModulePlan, spec: ModuleSpec) -> Iterator[str]:
    """What is wrong with how replicas share experts; encoders on the LLM's ranks have none, and its degree."""
    p, shards = m.parallel, m.parameter_shards
    if p.ep == 1 or m.module != LLM:
        return
    if p.ep not in spec.ep_choices:
        yield f"`{m.module}` cannot share its experts over ep {p.ep} ranks, only over {list(spec.ep_choices)}"
    if p.tp > 1 or p.num_replicas % p.ep or (shards > 1 and shards % p.ep):
        among = f" and the {shards} that share out parameters (FSDP2)" if shards > 1 else ""
        yield f"ep {p.ep} of `{m.module}` needs tp 1, and must divide its {p.num_replicas} replicas{among}"


def _limit_problems(m: ModulePlan) -> Iterator[str]:
    """What is wrong with the layers that large microbatches run again."""
    sent = m.offloaded or (0,) * len(m.layers_per_stage)
    room = [n - on_host for n, on_host in zip(m.layers_per_stage, sent, strict=False)]
    if m.recompute_tokens and (m.module != LLM or m.recomputed or not m.recompute):
        yield f"`{m.module}` has `recompute_tokens`, which `{LLM}` alone may have, with `recompute` and no `recomputed`"
    elif m.recompute_tokens and (
        len(m.recompute_tokens) != len(room)
        or any(
            len(of) > n or [*of] != sorted(of) or min(of, default=0) < 0
            for of, n in zip(m.recompute_tokens, room, strict=True)
        )
    ):
        yield f"`recompute_tokens` must ascend, for at most {room} layers of the stages; they are {m.recompute_tokens}"


def _grid_problems(plan: Plan) -> Iterator[str]:
    for *encoders, last in plan.grids:
        if any(m.parallel != last.parallel for m in encoders):
            names = ", ".join(f"`{m.module}`" for m in (*encoders, last))
            yield f"{names} share ranks from rank {last.first_rank} on, and differ in their degrees"
            return
        if encoders and last.module != LLM:
            yield f"`{encoders[0].module}` and `{last.module}` share ranks without `{LLM}`"
    for module in plan.apart:
        cp = (module.parallel.cp, plan.module(LLM).parallel.cp)
        if max(cp) > 1:
            yield f"`{module.module}` has dedicated ranks, so neither it nor `{LLM}` can be context parallel: cp {cp}"
    ranks = [pipe.first_rank + rank for pipe in plan.pipes for rank in range(pipe.parallel.num_processes)]
    if sorted(ranks) != list(range(len(ranks))):
        yield "ranks of the modules overlap or leave one rank unused"
    for grid in plan.grids:
        yield from _stage_problems(grid, has_others=len(plan.grids) > 1)


def _stage_problems(grid: Sequence[ModulePlan], *, has_others: bool) -> Iterator[str]:
    held = {m.module: [stage for stage, n in enumerate(m.layers_per_stage) if n] for m in grid}
    *encoders, last = grid
    begins = min(held[last.module], default=0)
    for encoder in encoders:
        if max(held[encoder.module], default=0) > begins:
            yield f"`{encoder.module}` ends on a stage after the one where `{last.module}` begins"
    if begins and encoders and has_others:
        yield f"`{last.module}` begins on stage {begins}, but rows of other ranks go to the first stage"
    if set().union(*held.values()) != set(range(last.parallel.pp)):
        yield f"a stage of `{last.module}` holds no layer"
