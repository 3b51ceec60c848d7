"""Samples packed into one microbatch do not see each other: logits of every family, in any order of packing."""

from __future__ import annotations

import pytest
import torch

from dflop.models.positions import MediaPosition
from tests.models.test_modules import each_family, encode, encoder_of, llm_of
from tests.models.tiny_families import Sample


def packed_logits(case, samples: list[Sample], encoder, llm) -> list[torch.Tensor]:
    """Logits of each sample; rope positions and media rows are those that the feed would make."""
    lengths = [len(s.input_ids) for s in samples]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    items, arrays = [i for s in samples for i in s.items], [a for s in samples for a in s.arrays]
    where = [start + p for start, s in zip(starts, samples, strict=False) for p in s.item_positions]
    media = [[MediaPosition(i.kind, i.grid, i.duration_s / max(i.grid[0], 1)) for i in s.items] for s in samples]
    rope = torch.cat([llm[-1].positions(s.input_ids, m) for s, m in zip(samples, media, strict=True)], dim=1)
    rows = ([encode(case, encoder, items, arrays)], [torch.cat(where)]) if items else ([], [])
    hidden = llm[0].embed(torch.cat([s.input_ids for s in samples]), *rows)
    for stage in llm:
        hidden = stage(hidden, rope, starts.int())
    return list(llm[-1].head(hidden).split(lengths))


@each_family
@pytest.mark.parametrize("seed", [0, 1])
def test_packed_samples_have_the_logits_that_each_has_alone(case, seed):
    numbers = torch.randperm(len(case.samples), generator=torch.Generator().manual_seed(seed)).tolist()
    samples = [case.sample(n) for n in numbers]
    plain, encoder, llm = case.plain(), encoder_of(case), llm_of(case)
    with torch.no_grad():
        packed = packed_logits(case, samples, encoder, llm)
        for sample, got in zip(samples, packed, strict=True):
            (alone,) = packed_logits(case, [sample], encoder, llm)
            torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-5)
            reference = plain(**case.hf_inputs(sample), use_cache=False).logits[0]
            torch.testing.assert_close(got, reference, atol=1e-5, rtol=1e-5)
