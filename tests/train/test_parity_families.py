"""Every way of calling a tower, through feed, engine and reduction: gradients equal a plain Hugging Face run.

`test_parity.py` does this for Qwen2.5-Omni over layouts and steps; here one uneven step tells whether what travels
between the ranks (sizes of items, wide rows with deep features, plain positions) is right for the other families.
"""

from __future__ import annotations

import pytest
import torch

from dflop.models.build import IGNORE_LABEL
from dflop.parallel.topology import make_groups, seat_of
from dflop.records import LLM, SampleShape
from dflop.train.engine import Engine
from dflop.train.feed import Feed, TokenizedSample
from dflop.train.reduce import GradientReducer
from dflop.train.stages import llm_stage_of, make_stages
from tests.models.tiny_families import CASES, HIDDEN, Case
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_plan, make_step_plan

NAMES = ("LLaVA-OneVision", "InternVL", "Qwen2.5-VL", "Qwen3-VL", "Qwen2-Audio")


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

    def tokens(self, sample_index: int) -> TokenizedSample:
        sample = self._samples[sample_index]
        positions = tuple(p.numpy() for p in sample.item_positions)
        return TokenizedSample(sample.input_ids.numpy(), sample.labels.numpy(), positions)

    def array(self, sample_index: int, item: int):
        return self._samples[sample_index].arrays[item].numpy()


def worker(rank, folder, name, layout):
    case = CASES[name]
    source, plan = CaseSource(case), make_plan(layout, num_microbatches=2, of=case.family)
    seat = seat_of(plan, rank)
    groups = make_groups(plan, rank, timeout_s=60)
    stages, _ = make_stages(case.build(), case.family, seat, groups.tensor)
    width = HIDDEN * (1 + case.family.decoder.num_deep_features)
    engine = Engine(plan, seat, stages, groups, torch.device("cpu"), hidden_size=HIDDEN, row_width=width)
    reducer = GradientReducer(plan, seat, stages, groups)
    batch = [source.shape(n) for n in range(len(case.samples))]
    feed = Feed(source, case.family, plan, seat, llm_stage_of(stages))
    prepared = feed.prepare(make_step_plan(plan, batch, 0, text_only_slot=False))
    healthy = torch.ones(len(batch), dtype=torch.bool)
    tokens = sum(s.num_supervised_tokens for s in batch)
    trace = engine.run(prepared.microbatches, healthy=healthy, num_loss_tokens=tokens)
    reducer.reduce()
    norm, loss = reducer.norm_and_loss(trace.loss)
    return loss, norm, {n: p.grad for stage in stages for n, p in stage.names.items()}


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_hugging_face(name, tmp_path):
    case = CASES[name]
    plain, losses, num_tokens = case.plain(), [], 0
    for number in range(len(case.samples)):
        sample = case.sample(number)
        num_tokens += int((sample.labels[1:] != IGNORE_LABEL).sum())
        logits = plain(**case.hf_inputs(sample), use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], sample.labels[1:], reduction="sum"))
    loss = sum(losses) / num_tokens
    loss.backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    norm = float(torch.stack([g.norm() for g in expected.values()]).norm())
    (encoder,) = case.family.towers
    ranks = run_ranks(worker, 4, tmp_path, name, {encoder: (1, 2), LLM: (2, 1)})
    covered = set()
    for got_loss, got_norm, gradients in ranks:
        assert got_loss == pytest.approx(float(loss.detach()), rel=1e-5)
        assert got_norm == pytest.approx(norm, rel=1e-4)
        covered |= set(gradients)
        for parameter, got in gradients.items():
            want = expected.get(parameter, torch.zeros_like(got))
            # Without rope, attention does not depend on a key's bias: all of its gradient is rounding.
            least = 1e-7 if parameter.endswith("k_proj.bias") else 0.0
            assert float((got - want).abs().max()) <= max(1e-4 * float(want.abs().max()), least), parameter
    assert set(expected) <= covered
