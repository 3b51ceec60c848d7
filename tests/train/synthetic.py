"""A tiny Omni model, synthetic samples for it, and hand-made plans: everything a parity test needs but no media."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np
import torch

from dflop.data.tokens import EncodedSample
from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.hf_inputs import hf_inputs as model_inputs
from dflop.models.media import MediaHeader
from dflop.records import LLM, MediaItem, ModulePlan, ModuleWork, ParallelSpec, Plan, SampleShape, StepPlan
from tests.models.whole_model import build_model

TOKEN_IDS = {
    "<|IMAGE|>": 1, "<|VIDEO|>": 2, "<|AUDIO|>": 3, "<|vision_bos|>": 4, "<|audio_bos|>": 5, "<|audio_eos|>": 6,
    "<|vision_eos|>": 7,
}  # fmt: skip
PLACEHOLDERS = {"image": (4, 1, 7), "video": (4, 2, 7), "audio": (5, 3, 6)}
VOCAB_SIZE, HIDDEN_SIZE = 128, 48
HF_CONFIG = {
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "window_size": 112,
        "fullatt_block_indexes": [1], "out_hidden_size": HIDDEN_SIZE,
    },
    "audio_config": {
        "encoder_layers": 2, "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "num_mel_bins": 128,
        "n_window": 20, "output_dim": HIDDEN_SIZE,
    },
    "text_config": {
        "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN_SIZE, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
    },
}  # fmt: skip


@cache
def family(kv_heads: int = 1) -> Family:
    media = {
        "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16,
        "video_min_pixels": 28 * 28, "video_max_pixels": 28 * 28 * 6, "video_max_frames": 8,
    }  # fmt: skip
    config = copy.deepcopy(HF_CONFIG)
    config["text_config"]["num_key_value_heads"] = kv_heads
    return load_family("qwen2_5_omni_thinker", config, media)


def hf_config(*, tied: bool = False, kv_heads: int = 1) -> dict[str, object]:
    config = copy.deepcopy(HF_CONFIG) | family().token_ids(TOKEN_IDS)
    config["tie_word_embeddings"] = tied
    config["text_config"] |= {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    return config


def tiny_model(*, tied: bool = False, kv_heads: int = 1) -> torch.nn.Module:
    return build_model(family(kv_heads), hf_config(tied=tied, kv_heads=kv_heads), seed=0, dtype=torch.float32)


def plain_model(*, tied: bool = False, kv_heads: int = 1) -> torch.nn.Module:
    """The same weights with Hugging Face's own attention: the reference of every parity test."""
    model = tiny_model(tied=tied, kv_heads=kv_heads)
    plain = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="sdpa", dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    return plain


def make_shapes(
    num_samples: int, seed: int, *, kinds: Sequence[str] = ("image", "video", "audio")
) -> list[SampleShape]:
    rng = np.random.default_rng(seed)
    shapes = []
    for index in range(num_samples):
        num_items = 0 if index % 5 == 4 else int(rng.choice([0, 1, 1, 2]))
        items = [_make_item(str(rng.choice(kinds)), rng) for _ in range(num_items)]
        num_text = int(rng.integers(6, 60)) + 2 * len(items)
        shapes.append(
            SampleShape(
                profile_key="synthetic",
                sample_index=index,
                sample_id=f"s{index}",
                num_text_tokens=num_text,
                num_supervised_tokens=max(1, num_text // 3),
                items=tuple(items),
                num_llm_tokens=num_text + sum(i.num_rows for i in items),
            )
        )
    return shapes


def _make_item(kind: str, rng: np.random.Generator) -> MediaItem:
    width, height = (int(x) for x in rng.integers(30, 200, 2))
    num_frames = {"image": 1, "video": int(rng.integers(2, 60)), "audio": 0}[kind]
    duration_s = {"image": 0.0, "video": num_frames / 10, "audio": float(rng.uniform(0.2, 2.0))}[kind]
    header = MediaHeader(kind, width, height, num_frames, duration_s)
    return header.item(f"{kind}.bin", family().place(header))


class SyntheticSource:
    """Tokens and encoder inputs that are a pure function of (sample, item)."""

    def __init__(self, shapes: Sequence[SampleShape], of: Family | None = None) -> None:
        self._shapes, self._family = {s.sample_index: s for s in shapes}, of or family()

    def shape(self, sample_index: int) -> SampleShape:
        return self._shapes[sample_index]

    def tokens(self, sample_index: int) -> EncodedSample:
        shape, rng = self._shapes[sample_index], np.random.default_rng(sample_index)
        text = rng.integers(10, VOCAB_SIZE, shape.num_text_tokens - 2 * len(shape.items)).tolist()
        ids, positions = text[:3], []
        for item in shape.items:
            begin, pad, end = PLACEHOLDERS[item.kind]
            positions.append(len(ids) + 1 + np.arange(item.num_rows))
            ids += [begin, *[pad] * item.num_rows, end]
        ids += text[3:]
        labels = np.full(len(ids), -100)
        labels[-shape.num_supervised_tokens :] = ids[-shape.num_supervised_tokens :]
        return EncodedSample(np.asarray(ids), labels, tuple(positions))

    def array(self, sample_index: int, item: int) -> np.ndarray:
        media = self._shapes[sample_index].items[item]
        rng = np.random.default_rng([sample_index, item])
        return rng.standard_normal(self._family.array_shape(media.module, media.grid), dtype=np.float32)


def hf_inputs(source: SyntheticSource, shape: SampleShape, sample: EncodedSample) -> dict[str, object]:
    """Arguments of Hugging Face's own forward for one sample."""
    arrays = [torch.from_numpy(source.array(shape.sample_index, n)) for n in range(len(shape.items))]
    positions = [torch.from_numpy(where) for where in sample.media_positions]
    ids = torch.from_numpy(sample.input_ids)
    return {**model_inputs(family(), ids, shape.items, arrays, positions), "use_cache": False}


def loss_sum(plain: torch.nn.Module, source: SyntheticSource, shape: SampleShape) -> torch.Tensor:
    """Summed loss of one sample by Hugging Face's own forward, where the model lies and in its type."""
    sample, weight = source.tokens(shape.sample_index), next(plain.parameters())
    inputs = {
        name: given.to(weight.device, weight.dtype if given.is_floating_point() else None)
        if isinstance(given, torch.Tensor)
        else given
        for name, given in hf_inputs(source, shape, sample).items()
    }
    logits, labels = plain(**inputs).logits[0], torch.from_numpy(sample.labels[1:]).to(weight.device)
    return torch.nn.functional.cross_entropy(logits[:-1].float(), labels, ignore_index=-100, reduction="sum")


def make_plan(layout: dict[str, tuple[int, ...]], *, num_microbatches: int, of: Family | None = None) -> Plan:
    """Split plan of `{module: (pp, dp)}` or `(pp, dp, tp)`, in rank order, layers split as evenly as they go."""
    depth = {s.module: s.num_layers for s in (of or family()).specs()}
    modules, first_rank = [], 0
    for name, (pp, dp, *tps) in layout.items():
        tp = tps[0] if tps else 1
        split = tuple(depth[name] // pp + (s < depth[name] % pp) for s in range(pp))
        modules.append(ModulePlan(name, ParallelSpec(tp, pp, dp), first_rank, split, (0,) * pp))
        first_rank += pp * dp * tp
    return _plan(modules, num_microbatches)


def make_inline_plan(
    stages: Sequence[dict[str, int]], *, dp: int, num_microbatches: int, tp: int = 1,
    apart: Mapping[str, tuple[int, ...]] = MappingProxyType({}), cp: int = 1, ep: int = 1,
) -> Plan:  # fmt: skip
    """Inline plan: per stage, the layers of each module on it; encoders `apart` have ranks behind it."""
    names = list(dict.fromkeys(name for stage in stages for name in stage))
    grid = ParallelSpec(tp, len(stages), dp, cp, ep)
    modules = [
        ModulePlan(name, grid, 0, tuple(stage.get(name, 0) for stage in stages), (0,) * len(stages))
        for name in sorted(names, key=lambda name: name == LLM)
    ]
    behind = make_plan(dict(apart), num_microbatches=num_microbatches).modules if apart else ()
    others = [replace(m, first_rank=m.first_rank + grid.num_processes) for m in behind]
    return _plan([*others, *modules], num_microbatches)


ALL = 10**6
"""Replicas: all that a module has."""


def sharing(plan: Plan, num_replicas: int) -> Plan:
    """A plan of which groups of so many replicas share out parameters, or fewer where a module has fewer; 0: none."""
    modules = (replace(m, parameter_shards=max(1, min(num_replicas, m.parallel.num_replicas))) for m in plan.modules)
    return replace(plan, modules=tuple(modules))


def sharing_optimizer(plan: Plan, *modules: str) -> Plan:
    """A plan whose replicas of these modules share out the optimizer, and no others."""
    found = (replace(m, shard_optimizer=m.module in modules) for m in plan.modules)
    return replace(plan, modules=tuple(found))


def halves(module: ModulePlan) -> tuple[int, ...]:
    """Of each stage, half of its layers, rounded up."""
    return tuple(-(-n // 2) for n in module.layers_per_stage)


def limited(module: ModulePlan) -> ModulePlan:
    """With layers of the LLM that run again in large microbatches, the more the larger; others on later stages."""
    if module.module != LLM:
        return module
    layers = enumerate(module.layers_per_stage)
    limits = tuple(tuple(40 + 30 * stage + 25 * layer for layer in range(n)) for stage, n in layers)
    return replace(module, recompute=True, recompute_tokens=limits)


def on_host(module: ModulePlan) -> ModulePlan:
    """With what the layers save that do not run again on the host, if it is the LLM."""
    if module.module != LLM:
        return module
    kept = zip(module.layers_per_stage, module.num_recomputed, strict=True)
    return replace(module, offloaded=tuple(n - again for n, again in kept))


def _plan(modules: Sequence[ModulePlan], num_microbatches: int) -> Plan:
    return Plan(
        plan_id="test", run_id="test", candidate_rank=0, modules=tuple(modules),
        num_microbatches=num_microbatches, global_batch_size=0, formula_step_s=0.0, predicted_step_s=0.0,
        baseline_step_s=0.0, sync_s=0.0, uniform_step_s=0.0, table_ids=(), snapshot_seq=0, reason="",
    )  # fmt: skip


def make_step_plan(
    plan: Plan, batch: Sequence[SampleShape], step: int, *, text_only_slot: bool = True, idle: bool = False
) -> StepPlan:
    """Random, deliberately uneven ownership; slot 0 gets only samples without media when there are any.

    Args:
        plan: The layout.
        batch: The global batch.
        step: Number of the step, and the seed.
        text_only_slot: Whether samples without media share slot 0 with nobody.
        idle: Whether in odd steps one microbatch has no sample at all and one replica of every module nothing to do.
    """
    rng, last = np.random.default_rng([7, step]), plan.num_microbatches - 1
    is_idle = idle and step % 2 == 1
    slots = rng.integers(0, plan.num_microbatches, len(batch))
    if text_only_slot:
        slots = np.where([not s.items for s in batch], 0, np.where(slots == 0, last, slots))
    if is_idle:
        slots = np.where(slots == last, last - 1, slots)

    def replica(dp: int) -> int:
        chosen = int(rng.integers(dp))
        return 0 if is_idle and chosen == dp - 1 else chosen

    return assign(plan, batch, step, slots=slots.tolist(), replica=replica, shuffled=rng.permutation)


def assign(
    plan: Plan,
    batch: Sequence[SampleShape],
    step: int,
    *,
    slots: Sequence[int],
    replica: Callable[[int], int],
    shuffled: Callable[[int], Iterable[int]],
) -> StepPlan:
    """A step whose samples are in the given microbatches.

    Args:
        plan: The layout.
        batch: The global batch.
        step: Number of the step.
        slots: Microbatch of every sample.
        replica: A number below its argument; asked for the owner of every item.
        shuffled: Numbers below its argument in some order; asked for the order in which items are packed.
    """
    order, works, home = [m.module for m in plan.modules], [], {}
    for module in sorted(plan.modules, key=lambda m: m.module != LLM):
        dp = module.parallel.dp
        if module.module == LLM:
            items = [(p, 0, s.num_llm_tokens) for p, s in enumerate(batch)]
        else:
            items = [
                (p, i, m.num_rows)
                for p, s in enumerate(batch)
                for i, m in enumerate(s.items)
                if m.module == module.module
            ]
        owner = [[[] for _ in range(dp)] for _ in range(plan.num_microbatches)]
        for item in shuffled(len(items)):
            sample, rank = items[item][0], replica(dp)
            if module.module == LLM or plan.follows_samples(module.module):
                rank = home.setdefault(sample, rank)
            owner[slots[sample]][rank].append(int(item))
        works.append(
            ModuleWork(
                module.module,
                tuple(i[0] for i in items),
                tuple(i[1] for i in items),
                tuple(i[2] for i in items),
                tuple(tuple(tuple(o) for o in slot) for slot in owner),
            )
        )
    return StepPlan(
        run_id="test", step=step, policy="random", sample_index=tuple(s.sample_index for s in batch),
        num_microbatches=plan.num_microbatches, work=tuple(sorted(works, key=lambda w: order.index(w.module))),
        num_supervised_tokens=sum(s.num_supervised_tokens for s in batch), predicted_step_s=0.0, arrival_step_s=0.0,
    )  # fmt: skip
