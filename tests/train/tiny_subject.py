"""Tiny families as subjects of parity tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dflop.data.tokens import EncodedSample
from dflop.models.build import IGNORE_LABEL
from dflop.models.family import Family
from dflop.records import SampleShape
from tests.models.tiny_families import CASES, Case


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
