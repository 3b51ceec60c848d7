"""Layouts in which the bytes that ranks hold are measured, and what they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from dflop.models import loss_size
from dflop.models.family import Family
from dflop.models.lora import Adapters, add_adapters
from dflop.models.media import MediaHeader
from dflop.records import FP8_OFF, LLM, Plan, SampleShape
from tests.train.bytes_families import CUTS_FRAMES, OMNI, family
from tests.train.synthetic import halves, make_inline_plan, make_plan, on_host, sharing

NUM_RANKS, NUM_MICROBATCHES = 4, 6
PICTURE, SOUND = MediaHeader("image", 140, 84, 1, 0.0), MediaHeader("audio", 140, 84, 1, 1.0)
LARGE_PICTURE, CLIP = MediaHeader("image", 448, 448, 1, 0.0), MediaHeader("video", 112, 56, 8, 4.0)
CHAIN = [{"vision": 4}, {"audio": 2, LLM: 4}]


@dataclass(frozen=True)
class Layout:
    """One of the layouts that the engine is measured in."""

    plan: Plan
    model: str = OMNI
    """Of `bytes_families`."""
    is_tied: bool = False
    frozen: tuple[str, ...] = ()
    lora: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Targets of adapters by module."""
    fp8: str = FP8_OFF
    chunk_tokens: int = loss_size.CHUNK_TOKENS
    media: tuple[MediaHeader, ...] = (PICTURE, SOUND)
    """Of a sample, those that the plan has encoders for."""
    num_text_tokens: int = 90
    sizes: tuple[int, ...] = (2,) * NUM_MICROBATCHES
    """Samples per microbatch of a replica; context-parallel ranks cut one."""

    @property
    def family(self) -> Family:
        return family(self.model, is_tied=self.is_tied)

    @property
    def num_samples(self) -> list[int]:
        """Per microbatch, of all replicas."""
        llm = self.plan.module(LLM).parallel
        return [(1 if llm.cp > 1 else n) * max(m.parallel.dp for m in self.plan.modules) for n in self.sizes]


def layout(
    plan: Plan, *, recompute: bool = False, shard_optimizer: bool = False, shards: int = 0, **how: Any
) -> Layout:
    modules = (replace(m, recompute=recompute, shard_optimizer=shard_optimizer) for m in sharing(plan, shards).modules)
    return Layout(replace(plan, modules=tuple(modules)), **how)


def cutting(plan: Plan, **how: Any) -> Layout:
    """Context-parallel ranks have a part each of a picture, and of text."""
    modules = tuple(m if m.module == LLM else replace(m, merge_tokens=4) for m in plan.modules)
    plan = replace(plan, modules=modules)
    return layout(plan, model=CUTS_FRAMES, media=(LARGE_PICTURE,), num_text_tokens=256, **how)


def without_family(model: str, plan: Plan, **how: Any) -> Layout:
    """Text in layers that carry a state, or have experts."""
    return layout(plan, model=model, num_text_tokens=384, **how)


def half_recomputed(plan: Plan) -> Layout:
    modules = (replace(m, recompute=True, recomputed=halves(m)) for m in plan.modules)
    return Layout(replace(plan, modules=tuple(modules)))


def half_on_host(plan: Plan) -> Layout:
    modules = (m if m.module != LLM or m.recomputed else replace(m, offloaded=halves(m)) for m in plan.modules)
    return Layout(replace(plan, modules=tuple(on_host(m) if m.recomputed else m for m in modules)))


def limited(plan: Plan) -> Layout:
    """Of microbatches of one, two and three samples per replica none, half and all of the LLM's layers run again."""
    of, llm = Layout(plan, sizes=(1, 3, 2, 2, 3, 1)), plan.module(LLM)
    tokens = of.num_samples[0] * batch_of(of)[0].num_llm_tokens // llm.parallel.dp
    limits = tuple(tuple(tokens * (1 + (2 * layer >= n)) for layer in range(n)) for n in llm.layers_per_stage)
    llm = replace(llm, recompute=True, recompute_tokens=limits)
    return replace(of, plan=replace(plan, modules=(*plan.encoders, llm)))


def eight_bit(plan: Plan, *, recompute: bool = False) -> Layout:
    """Microbatches so large, and a loss in chunks so small, that casts are most of what a layer at work takes."""
    return layout(plan, recompute=recompute, fp8="tensorwise", chunk_tokens=8, sizes=(6,) * NUM_MICROBATCHES)


def split(layers: dict[str, tuple[int, ...]]) -> Plan:
    return make_plan(layers, num_microbatches=NUM_MICROBATCHES, of=family())


def inline(stages: Sequence[dict[str, int]], *, dp: int, tp: int = 1, cp: int = 1, ep: int = 1) -> Plan:
    return make_inline_plan(stages, dp=dp, tp=tp, cp=cp, ep=ep, num_microbatches=NUM_MICROBATCHES)


def layouts() -> dict[str, Layout]:
    """Layouts of `NUM_RANKS` ranks by name."""
    both, three = {"vision": 4, LLM: 4}, {"vision": 4, "audio": 2, LLM: 4}
    cut = [{"vision": 4}, {LLM: 1}, {LLM: 2}, {LLM: 1}]
    return {
        "inline dp 4": layout(inline([both], dp=4)),
        "inline dp 4, ZeRO-1": layout(inline([both], dp=4), shard_optimizer=True),
        "inline dp 4, FSDP2": layout(inline([both], dp=4), shards=4),
        "inline dp 4, FSDP2 in twos": layout(inline([both], dp=4), shards=2),
        "inline tp 2 dp 2, FSDP2": layout(inline([both], dp=2, tp=2), shards=2),
        "split dp 2 and dp 2, FSDP2": layout(split({"vision": (1, 2), LLM: (1, 2)}), shards=2, recompute=True),
        "inline tp 2 dp 2, tied": layout(inline([both], dp=2, tp=2), is_tied=True),
        "inline pp 4": layout(inline(cut, dp=1)),
        "inline pp 2 dp 2, three modules, ZeRO-1": layout(inline(CHAIN, dp=2), shard_optimizer=True),
        "split dp 2 and pp 2, recomputed": layout(split({"vision": (1, 2), LLM: (2, 1)}), recompute=True),
        "inline dp 4, frozen tower, three modules": layout(inline([three], dp=4), frozen=("vision.tower",)),
        "split dp 2 and pp 2": layout(split({"vision": (1, 2), LLM: (2, 1)})),
        "split tp 2 and tp 2": layout(split({"vision": (1, 1, 2), LLM: (1, 1, 2)})),
        "split dp 2 and pp 2, frozen encoder": layout(split({"vision": (1, 2), LLM: (2, 1)}), frozen=("vision",)),
        "split dp 2 and dp 2, frozen LLM": layout(split({"vision": (1, 2), LLM: (1, 2)}), frozen=(LLM,)),
        "split three modules, pp 2, tied": layout(
            split({"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}), is_tied=True
        ),
        "inline pp 4, half recomputed": half_recomputed(inline(cut, dp=1)),
        "inline dp 4, FSDP2, half recomputed": half_recomputed(sharing(inline([both], dp=4), 4)),
        "inline dp 4, FSDP2, limited": limited(sharing(inline([both], dp=4), 4)),
        "inline pp 4, limited": limited(inline(cut, dp=1)),
        "inline pp 4, half on the host": half_on_host(inline(cut, dp=1)),
        "inline dp 4, half recomputed, half on the host": half_on_host(half_recomputed(inline([both], dp=4)).plan),
        "split pp 4, tied, recomputed": layout(split({LLM: (4, 1)}), is_tied=True, recompute=True),
        "text cp 2 dp 2": layout(inline([{LLM: 4}], dp=2, cp=2)),
        "text cp 4, FSDP2, recomputed": layout(inline([{LLM: 4}], dp=1, cp=4), shards=4, recompute=True),
        "text pp 2 cp 2, half recomputed": half_recomputed(inline([{LLM: 2}, {LLM: 2}], dp=1, cp=2)),
        "clips cp 2 dp 2": layout(inline([both], dp=2, cp=2), media=(CLIP,), num_text_tokens=320),
        "pictures cp 4": cutting(inline([both], dp=1, cp=4)),
        "pictures cp 4, recomputed": cutting(inline([both], dp=1, cp=4), recompute=True),
        "pictures tp 2 cp 2": cutting(inline([both], dp=1, tp=2, cp=2)),
        "pictures pp 2 cp 2": cutting(inline([{"vision": 4, LLM: 2}, {LLM: 2}], dp=1, cp=2)),
        "pictures cp 2 dp 2, FSDP2": cutting(inline([both], dp=2, cp=2), shards=4),
        "states cp 2 dp 2": without_family("qwen3_5", inline([{LLM: 4}], dp=2, cp=2)),
        "states pp 2 cp 2, recomputed": without_family(
            "qwen3_5", inline([{LLM: 2}, {LLM: 2}], dp=1, cp=2), recompute=True
        ),
        "convolutions cp 4": without_family("lfm2_vl", inline([{LLM: 4}], dp=1, cp=4)),
        "experts ep 2 dp 4, ZeRO-1": without_family(
            "qwen3_vl_moe", inline([{LLM: 4}], dp=4, ep=2), shard_optimizer=True
        ),
        "inline dp 4, ZeRO-1, adapters": layout(
            inline([both], dp=4), shard_optimizer=True, frozen=("vision",), lora=((LLM, ("q_proj", "v_proj")),)
        ),
        "inline tp 2 dp 2, adapters of every Linear": layout(
            inline([both], dp=2, tp=2), lora=((LLM, ("all-linear",)), ("vision", ("all-linear",)))
        ),
        "split dp 2 and pp 2, adapters, recomputed": layout(
            split({"vision": (1, 2), LLM: (2, 1)}), recompute=True, frozen=("vision",), lora=((LLM, ("*_proj",)),)
        ),
        "inline dp 4, FSDP2, adapters of every Linear": layout(
            inline([both], dp=4), shards=4, lora=((LLM, ("all-linear",)), ("vision", ("all-linear",)))
        ),
        "inline dp 4, FSDP2 in twos, adapters, frozen tower": layout(
            inline([both], dp=4), shards=2, frozen=("vision.tower",), lora=((LLM, ("q_proj", "v_proj")),)
        ),
        "split pp 4, FP8": eight_bit(split({LLM: (4, 1)})),
        "split pp 4, FP8, recomputed": eight_bit(split({LLM: (4, 1)}), recompute=True),
        "inline tp 2 dp 2, FP8": eight_bit(inline([{"vision": 4, LLM: 4}], dp=2, tp=2)),
        "split dp 2 and dp 2, FSDP2, frozen LLM": layout(
            split({"vision": (1, 2), LLM: (1, 2)}), shards=2, frozen=(LLM,)
        ),
        "split pp 4, ten chunks of loss tokens": layout(split({LLM: (4, 1)}), chunk_tokens=8),
    }


def batch_of(of: Layout) -> list[SampleShape]:
    """Equal samples; replicas of the LLM have as many in each microbatch."""
    taken = [header for header in of.media if ("audio" if header.kind == "audio" else "vision") in names(of.plan)]
    items = [header.item("", of.family.place(header)) for header in taken]
    sample = SampleShape(
        profile_key="", sample_index=0, sample_id="", num_text_tokens=of.num_text_tokens, num_supervised_tokens=40,
        items=tuple(items), num_llm_tokens=of.num_text_tokens + sum(i.num_rows for i in items),
    )  # fmt: skip
    return [replace(sample, sample_index=index) for index in range(sum(of.num_samples))]


def adapted(of: Layout, model: Any) -> Adapters:
    """Add the adapters of a layout to a model."""
    lora: Any = SimpleNamespace(targets=dict(of.lora), rank=8, scale=2.0, dropout=0.0) if of.lora else None
    return add_adapters(model, of.family, lora)


def names(plan: Plan) -> list[str]:
    return [m.module for m in plan.modules]
