"""A small model whole on a GPU: a step packed and padded, the microbatches of eight ranks: parts of `evidence`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dflop.cost.fit import fit_cost_tables
from dflop.cost.flops import FlopCounter, peak_flops_per_s
from dflop.cost.model import CostModel
from dflop.models import attention, load_family
from dflop.models.build import EncoderStage, cut_stages
from dflop.models.generic.llm_stage import LlmStage
from dflop.profile.hardware import hardware_name
from dflop.profile.timing import no_garbage_collection, time_phases
from dflop.records import LLM, SampleShape
from dflop.schedule.policies import Effort, StepJob
from tests.gpu.drawn import make_shapes, token_config
from tests.gpu.layers import probed
from tests.gpu.subject import Subject
from tests.models.whole_model import build_model
from tests.train.synthetic import make_inline_plan

NUM_RANKS, NUM_MICROBATCHES, NUM_SAMPLES = 8, 4, 64
POLICIES = ("arrival", "length_grouped", "token_lpt", "balanced")
FIRST_TEXT_ID = 100
"""Smaller ids are special tokens."""


@dataclass(frozen=True)
class Inputs:
    """Of a packed microbatch; sizes and boundaries lie on the host."""

    pixels: torch.Tensor | None
    sizes: torch.Tensor
    ids: torch.Tensor
    media: torch.Tensor
    """Positions of the rows of media."""
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    where: torch.Tensor
    """Positions that predict a target."""
    targets: torch.Tensor


class Whole:
    """InternVL with all of its layers, as stages of the engine and as Hugging Face runs it, with the same weights."""

    def __init__(self, subject: Subject, *, plain: bool) -> None:
        model = subject.whole
        self.subject, self.dtype = subject, getattr(torch, model["dtype"])
        self.family = load_family(model["family"], model["hf_config"], model["media"])
        ids = token_config(self.family)
        self.image_id, self.vocab_size = ids["image_token_id"], int(self.family.configs[LLM]["vocab_size"])
        with subject.device:  # a CPU takes minutes to draw the weights
            built: Any = build_model(self.family, {**model["hf_config"], **ids}, seed=0, dtype=self.dtype)
        if plain:
            self.plain: Any = copy.deepcopy(built).to(subject.device)
            self.plain.set_attn_implementation("sdpa")
        depths = {spec.module: spec.num_layers for spec in self.family.specs()}
        vision, llm = cut_stages(built, self.family, [(m, (0, depths[m])) for m in ("vision", LLM)])
        assert isinstance(vision, EncoderStage)
        assert isinstance(llm, LlmStage)
        self.vision, self.llm = vision.to(subject.device), llm.to(subject.device)
        for stage in (self.vision, self.llm):
            attention.use(stage, attention.resolve(attention.AUTO, subject.device.type, self.dtype))

    @cached_property
    def flops(self) -> FlopCounter:
        return FlopCounter(self.family.specs())

    def ids(self, shape: SampleShape) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, labels) of a sample: media first, loss on the last of the text."""
        rng = np.random.default_rng(shape.sample_index)
        num_rows = sum(i.num_rows for i in shape.items)
        text = rng.integers(FIRST_TEXT_ID, self.vocab_size, shape.num_text_tokens)
        ids = np.concatenate([text[:4], np.full(num_rows, self.image_id), text[4:]])
        labels = np.full(len(ids), -100)
        labels[len(ids) - shape.num_supervised_tokens :] = ids[len(ids) - shape.num_supervised_tokens :]
        return ids, labels

    def pixels(self, shapes: Sequence[SampleShape]) -> torch.Tensor | None:
        """Noise of the shape of all media; None where there are none."""
        shape_of = self.family.array_shape
        num_tiles = sum(shape_of("vision", i.grid)[0] for s in shapes for i in s.items)
        if not num_tiles:
            return None
        width = next(shape_of("vision", i.grid) for s in shapes for i in s.items)[1:]
        torch.manual_seed(0)
        return torch.randn(num_tiles, *width, device=self.subject.device, dtype=self.dtype)

    def inputs(self, shapes: Sequence[SampleShape]) -> Inputs:
        """A packed microbatch."""
        device, texts = self.subject.device, [self.ids(s) for s in shapes]
        ids = torch.from_numpy(np.concatenate([t for t, _ in texts])).to(device)
        labels = np.concatenate([np.append(label[1:], -100) for _, label in texts])
        lengths = [len(t) for t, _ in texts]
        return Inputs(
            pixels=self.pixels(shapes),
            sizes=torch.tensor([self.family.item_size(i) for s in shapes for i in s.items]),
            ids=ids,
            media=torch.nonzero(ids == self.image_id).flatten(),
            positions=torch.cat([torch.arange(n) for n in lengths])[None].to(device),
            cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
            where=torch.from_numpy(np.flatnonzero(labels >= 0)).to(device),
            targets=torch.from_numpy(labels[labels >= 0]).to(device),
        )

    def packed(self, shapes: Sequence[SampleShape]) -> Callable[[], torch.Tensor]:
        """Forward of a packed microbatch, to the sum of its losses."""
        given = self.inputs(shapes)

        def forward() -> torch.Tensor:
            rows = [] if given.pixels is None else [self.vision(given.pixels, given.sizes)]
            hidden = self.llm.embed(given.ids, rows, [given.media][: len(rows)])
            return self.llm.loss(self.llm(hidden, given.positions, given.cu_seqlens), given.where, given.targets)

        return forward

    def padded(self, shapes: Sequence[SampleShape]) -> Callable[[], torch.Tensor]:
        """Forward of a padded microbatch by Hugging Face, to the sum of its losses."""
        device, pixels = self.subject.device, self.pixels(shapes)
        texts = [self.ids(s) for s in shapes]
        longest = max(len(t) for t, _ in texts)
        ids, labels, mask = (np.full((len(texts), longest), fill) for fill in (FIRST_TEXT_ID, -100, 0))
        for row, (text, label) in enumerate(texts):
            ids[row, : len(text)], labels[row, : len(text)], mask[row, : len(text)] = text, label, 1
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        tensors = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
        if pixels is not None:
            tensors["pixel_values"] = pixels
        num_targets = int((labels[:, 1:] >= 0).sum())
        return lambda: self.plain(**tensors).loss * num_targets


def backward(loss: torch.Tensor) -> None:
    loss.backward()


def run(whole: Whole, forwards: Sequence[Callable[[], torch.Tensor]]) -> tuple[float, float]:
    """(seconds, loss) of microbatches one after the other; gradients add up, as in a step."""
    took_s, loss = 0.0, 0.0
    with no_garbage_collection():
        for forward in forwards:
            kept: list[torch.Tensor] = []

            def tracked(forward: Callable[[], torch.Tensor] = forward, kept: list[torch.Tensor] = kept) -> torch.Tensor:
                kept.append(forward())
                return kept[-1]

            took_s += sum(time_phases(tracked, backward, whole.subject.device))
            loss += float(kept[-1].detach())
    return took_s, loss


def step(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """One global batch on one device: forward and backward, without the optimizer, which all ways share."""
    whole = Whole(subject, plain=True)
    batch = make_shapes(whole.family, subject.size(32, 4), seed=3)
    by_length = sorted(batch, key=lambda s: -s.num_llm_tokens)
    num_tokens, flops = sum(s.num_llm_tokens for s in batch), whole.flops.count(batch)
    num_targets = sum(s.num_supervised_tokens for s in batch)
    peak = peak_flops_per_s(hardware_name(subject.device.type), "bfloat16")
    ways: dict[str, tuple[Callable[[Sequence[SampleShape]], Callable[[], torch.Tensor]], list[list[SampleShape]]]] = {
        "packed, up to 8192 tokens": (whole.packed, filled(by_length, 8192)),
        "padded, one by one": (whole.padded, [[s] for s in batch]),
        "padded, 2 in order of arrival": (whole.padded, [batch[i : i + 2] for i in range(0, len(batch), 2)]),
        "padded, 2 of like length": (whole.padded, [by_length[i : i + 2] for i in range(0, len(batch), 2)]),
        "padded, 4 of like length": (whole.padded, [by_length[i : i + 4] for i in range(0, len(batch), 4)]),
        "packed, one by one": (whole.packed, [[s] for s in batch]),
    }
    for name, (make, microbatches) in ways.items():
        row: dict[str, Any] = {"way": name, "microbatches": len(microbatches), "llm_tokens": num_tokens}
        try:
            forwards = [make(m) for m in microbatches]
            run(whole, forwards)
            if subject.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            took_s, loss = run(whole, forwards)
        except torch.OutOfMemoryError:
            yield {**row, "status": "oom"}
            torch.cuda.empty_cache()
            continue
        is_cuda = subject.device.type == "cuda"
        yield {
            **row, "status": "ok", "seconds": took_s, "tokens_per_s": num_tokens / took_s, "mfu": flops / took_s / peak,
            "loss_per_token": loss / num_targets, "peak_bytes": torch.cuda.max_memory_allocated() if is_cuda else 0,
        }  # fmt: skip
        for stage in (whole.vision, whole.llm, whole.plain):
            stage.zero_grad()
        if time.monotonic() > deadline_s:
            return


def filled(samples: Sequence[SampleShape], max_tokens: int) -> list[list[SampleShape]]:
    """Microbatches of up to so many tokens: each sample goes where it fits first."""
    found: list[list[SampleShape]] = []
    for sample in samples:
        for m in found:
            if sum(s.num_llm_tokens for s in m) + sample.num_llm_tokens <= max_tokens:
                m.append(sample)
                break
        else:
            found.append([sample])
    return found


def orders(subject: Subject, deadline_s: float) -> Iterator[Mapping[str, Any]]:
    """Microbatches of a global batch as four policies give them to ranks: predicted and measured seconds of each."""
    whole = Whole(subject, plain=False)
    family = whole.family
    batch = make_shapes(family, subject.size(NUM_SAMPLES, 10), seed=4)
    cost = measured_cost(subject, max(1.0, 0.25 * (deadline_s - time.monotonic())))
    depths = {spec.module: spec.num_layers for spec in family.specs()}
    plan = make_inline_plan([{"vision": depths["vision"], LLM: depths[LLM]}], dp=NUM_RANKS,
                            num_microbatches=NUM_MICROBATCHES)  # fmt: skip
    job = StepJob(plan, batch, cost)
    for policy in POLICIES:
        owners = job.assign(policy, Effort()).owners(plan, job.items)[LLM]
        rows = []
        for rank in range(NUM_RANKS):
            for slot in range(NUM_MICROBATCHES):
                shapes = [batch[i] for i in owners[slot][rank]]
                if not shapes:
                    continue
                forward = whole.packed(shapes)
                run(whole, [forward])
                rows.append((rank, predicted(cost, depths, shapes), run(whole, [forward])[0]))
                if time.monotonic() > deadline_s:
                    yield {"policy": policy, "cut_off_after": len(rows)}
                    return
        told, took = (np.bincount([r for r, *_ in rows], [row[i] for row in rows], NUM_RANKS) for i in (1, 2))
        yield {
            "policy": policy, "step_s": float(took.max()), "mean_rank_s": float(took.mean()),
            "predicted_step_s": float(told.max()), "microbatches": [{"rank": r, "predicted_s": p, "seconds": s}
                                                                    for r, p, s in rows],
        }  # fmt: skip


def predicted(cost: CostModel, depths: Mapping[str, int], shapes: Sequence[SampleShape]) -> float:
    """Seconds of a microbatch on one rank that holds the whole model."""
    total = 0.0
    for module, num_layers in depths.items():
        loads = [s.load(module) for s in shapes]
        load = [sum(getattr(x, name) for x in loads) for name in ("num_items", "num_tokens", "sum_sq_tokens")]
        total += sum(float(x) for x in cost.module_seconds(module, load, num_layers=num_layers, edge=True))
    return total


def measured_cost(subject: Subject, budget_s: float) -> CostModel:
    """Cost model from probes of one and two layers on this device."""
    rows = [probed(subject, "whole", subject.whole, module, budget_s / 2)[1] for module in ("vision", LLM)]
    specs = load_family(subject.whole["family"], subject.whole["hf_config"], subject.whole["media"]).specs()
    return CostModel(fit_cost_tables([*rows[0], *rows[1]], specs), extrapolate=True)
