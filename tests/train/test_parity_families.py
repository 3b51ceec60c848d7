"""Every way of calling a tower, in every kind of pipeline: gradients equal a plain Hugging Face run.

`test_parity.py` does this for Qwen2.5-Omni over many layouts and steps; here a few layouts tell whether what travels
between the ranks (sizes of items, wide rows with deep features, plain positions, hidden states of a cut tower) is right
for the other families.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import pytest
import torch

from dflop.data.tokens import EncodedSample
from dflop.models.build import IGNORE_LABEL
from dflop.models.family import Family
from dflop.records import LLM, Plan, SampleShape
from tests.models.tiny_families import CASES, Case
from tests.train.parity import Trial, assert_equal_steps, reference, run_trial
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan

LAYOUTS = (
    "encoder dp2 + llm pp2", "encoder + llm dp2", "encoder + llm dp2, recomputed", "inline pp2", "inline cp3",
)  # fmt: skip


@dataclass(frozen=True)
class Tiny:
    """A tiny family with its few samples, twice: the second step has other microbatches, and other weights."""

    name: str

    @property
    def case(self) -> Case:
        return CASES[self.name]

    @property
    def family(self) -> Family:
        return self.case.family

    @cached_property
    def batches(self) -> list[list[SampleShape]]:
        source = CaseSource(self.case)
        return [[source.shape(n) for n in range(len(self.case.samples))]] * 2

    def build(self) -> torch.nn.Module:
        return self.case.build()

    def plain(self) -> torch.nn.Module:
        return self.case.plain()

    def source(self, batch: Sequence[SampleShape]) -> CaseSource:
        return CaseSource(self.case)

    def loss_sum(self, plain: torch.nn.Module, batch: Sequence[SampleShape], position: int) -> torch.Tensor:
        sample = self.case.sample(position)
        logits = plain(**self.case.hf_inputs(sample), use_cache=False).logits[0]
        return torch.nn.functional.cross_entropy(logits[:-1], sample.labels[1:], reduction="sum")


class CaseSource:
    """Samples of a tiny family; `healthy` data only."""

    def __init__(self, case: Case) -> None:
        self._samples = [case.sample(n) for n in range(len(case.samples))]

    def shape(self, sample_index: int) -> SampleShape:
        sample = self._samples[sample_index]
        num_rows = sum(i.num_rows for i in sample.items)
        return SampleShape(
            profile_key="tiny", sample_index=sample_index, sample_id=f"s{sample_index}",
            num_text_tokens=len(sample.input_ids) - num_rows, num_llm_tokens=len(sample.input_ids),
            num_supervised_tokens=int((sample.labels[1:] != IGNORE_LABEL).sum()), items=tuple(sample.items),
        )  # fmt: skip

    def tokens(self, sample_index: int) -> EncodedSample:
        sample = self._samples[sample_index]
        positions = tuple(p.numpy() for p in sample.item_positions)
        return EncodedSample(sample.input_ids.numpy(), sample.labels.numpy(), positions)

    def array(self, sample_index: int, item: int):
        return self._samples[sample_index].arrays[item].numpy()


def plan_of(family: Family, layout: str) -> Plan:
    (encoder,) = family.towers
    if layout.startswith("encoder dp2"):
        return make_plan({encoder: (1, 2), LLM: (2, 1)}, num_microbatches=2, of=family)
    if layout.startswith("encoder + llm dp2"):
        plan = make_plan({encoder: (1, 1), LLM: (1, 2)}, num_microbatches=2, of=family)
        modules = tuple(replace(m, recompute=layout.endswith("recomputed")) for m in plan.modules)
        return replace(plan, modules=modules)
    depth = {s.module: s.num_layers for s in family.specs()}
    entry = family.specs()[-1].num_entry_layers
    if layout == "inline cp3":
        return make_inline_plan([depth], dp=1, cp=3, num_microbatches=2)
    stages = [{encoder: depth[encoder], LLM: entry}, {LLM: depth[LLM] - entry}]
    return make_inline_plan(stages, dp=1, num_microbatches=2)


cached_reference = cache(reference)
QUICK = {
    ("Qwen3-VL", "encoder dp2 + llm pp2"), ("LLaVA-OneVision with Llama", "encoder + llm dp2, recomputed"),
    ("InternVL", "inline pp2"), ("Qwen2.5-VL", "inline pp2"), ("Qwen3-VL", "inline cp3"), ("InternVL", "inline cp3"),
    ("Qwen2-VL", "encoder + llm dp2"),
    ("Qwen2-Audio", "encoder + llm dp2"),
}  # fmt: skip
"""Not in a lane: every family, and every layout, at least once."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.lane("layouts"))
        for pair in itertools.product(CASES, LAYOUTS)
    ],
)
def test_gradients_equal_hugging_face(name, layout, tmp_path):
    subject = Tiny(name)
    plan = plan_of(subject.family, layout)
    plans = tuple(make_step_plan(plan, b, step, text_only_slot=False) for step, b in enumerate(subject.batches))
    assert_equal_steps(run_trial(Trial(subject, plan, plans), tmp_path), cached_reference(subject))
