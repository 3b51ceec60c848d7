"""Layouts in which the bytes that ranks hold are measured, and what they train."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from dflop.models import load_family, loss_size
from dflop.models.family import Family
from dflop.models.lora import Adapters, add_adapters
from dflop.models.media import MediaHeader
from dflop.records import FP8_OFF, LLM, MediaItem, Plan, SampleShape
from tests.train import synthetic
from tests.train.synthetic import halves, make_inline_plan, make_plan, on_host, sharing

NUM_RANKS, NUM_MICROBATCHES = 4, 6
WIDTH, ENCODER_WIDTH = 128, 96
CHAIN = [{"vision": 4}, {"audio": 2, LLM: 4}]


@dataclass(frozen=True)
class Layout:
    """One of the layouts that the engine is measured in."""

    plan: Plan
    is_tied: bool = False
    frozen: tuple[str, ...] = ()
    lora: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Targets of adapters by module."""
    fp8: str = FP8_OFF
    chunk_tokens: int = loss_size.CHUNK_TOKENS
    sizes: tuple[int, ...] = (2,) * NUM_MICROBATCHES
    """Samples per microbatch of a replica; context-parallel ranks cut one."""

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


def inline(stages: Sequence[dict[str, int]], *, dp: int, tp: int = 1, cp: int = 1) -> Plan:
    return make_inline_plan(stages, dp=dp, tp=tp, cp=cp, num_microbatches=NUM_MICROBATCHES)


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


def family(*, is_tied: bool = False) -> Family:
    """The tiny Omni, wide enough for matrices to weigh more than norms."""
    config = copy.deepcopy(synthetic.HF_CONFIG) | {"tie_word_embeddings": is_tied}
    config["vision_config"] |= {
        "depth": 4, "hidden_size": ENCODER_WIDTH, "intermediate_size": 2 * ENCODER_WIDTH, "out_hidden_size": WIDTH,
        "num_heads": 6, "fullatt_block_indexes": [0, 1, 2, 3],
    }  # fmt: skip
    config["audio_config"] |= {"d_model": ENCODER_WIDTH, "encoder_ffn_dim": 4 * ENCODER_WIDTH, "output_dim": WIDTH}
    config["audio_config"]["encoder_attention_heads"] = 6
    config["text_config"] |= {
        "vocab_size": 1024, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_attention_heads": 4,
        "num_key_value_heads": 2, "tie_word_embeddings": is_tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    }  # fmt: skip
    return load_family("qwen2_5_omni_thinker", config, synthetic.family().media)


def batch_of(of: Layout) -> list[SampleShape]:
    """Equal samples; replicas of the LLM have as many in each microbatch."""
    plan = of.plan
    kinds = (("image", "vision"), ("audio", "audio"))
    items = tuple(_item(kind) for kind, module in kinds if module in names(plan))
    sample = SampleShape(
        profile_key="", sample_index=0, sample_id="", num_text_tokens=90, num_supervised_tokens=40, items=items,
        num_llm_tokens=90 + sum(i.num_rows for i in items),
    )  # fmt: skip
    return [replace(sample, sample_index=index) for index in range(sum(of.num_samples))]


def adapted(of: Layout, model: Any) -> Adapters:
    """Add the adapters of a layout to a model."""
    lora: Any = SimpleNamespace(targets=dict(of.lora), rank=8, scale=2.0, dropout=0.0) if of.lora else None
    return add_adapters(model, family(is_tied=of.is_tied), lora)


def names(plan: Plan) -> list[str]:
    return [m.module for m in plan.modules]


def _item(kind: str) -> MediaItem:
    header = MediaHeader(kind, 140, 84, 1, 1.0 if kind == "audio" else 0.0)
    return header.item("", synthetic.family().place(header))
