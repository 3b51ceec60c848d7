import dataclasses
import math

import pytest

from dflop.cost.flops import FlopCounter
from dflop.cost.throughput import Workload
from tests.builders import make_plan, make_sample, make_specs

SPECS = make_specs()
BATCHES = [[make_sample(i, 100 * (i + 1)) for i in range(4)], [make_sample(9, 500)] * 4]
WORKLOAD = Workload(SPECS, (), BATCHES, num_gpus=8, peak_flops_per_s=1e9, num_samples=1000)


def found(step_s: float = 2.0, *, recomputes: bool = False, **changed):
    plan = make_plan({"llm": 1})
    modules = tuple(dataclasses.replace(m, recompute=recomputes) for m in plan.modules)
    return dataclasses.replace(WORKLOAD, **changed).throughput(step_s, dataclasses.replace(plan, modules=modules))


def test_every_gpu_that_is_paid_for_counts():
    tokens = sum(shape.num_llm_tokens for batch in BATCHES for shape in batch)
    one = found()
    assert one.tokens_per_s_per_gpu == pytest.approx(tokens / 2 / 2.0 / 8)
    assert one.samples_per_s == pytest.approx(4 / 2.0)
    assert one.epoch_gpu_hours == pytest.approx(1000 / 2 * 8 / 3600)
    assert found(num_gpus=16).mfu_frac == pytest.approx(one.mfu_frac / 2)
    assert found(4.0).tokens_per_s_per_gpu == pytest.approx(one.tokens_per_s_per_gpu / 2)


def test_recomputation_is_work_of_the_hardware_alone():
    plain, again = found(), found(recomputes=True)
    assert plain.mfu_frac == plain.hfu_frac == again.mfu_frac
    counter = FlopCounter(SPECS)
    forward = sum(counter.count_again(batch, ["llm"]) for batch in BATCHES)
    assert again.hfu_frac - again.mfu_frac == pytest.approx(forward / 4.0 / 8e9)
    head = sum(6 * SPECS[-1].vocab_size * SPECS[-1].hidden_size * s.num_supervised_tokens for b in BATCHES for s in b)
    text_only = sum(counter.count(batch) for batch in BATCHES)
    assert 3 * forward + head <= text_only * (1 + 1e-9)


def test_layers_that_run_again_in_large_microbatches_are_those_of_the_mean_one():
    plan = make_plan({"llm": 2}, llm_pp=2, num_microbatches=1)
    (llm,) = plan.modules
    # The batches have 1,000 and 2,000 tokens, half of them on each rank.
    limited = dataclasses.replace(llm, recompute=True, recompute_tokens=((400, 500), (600, 2000)))
    seen = WORKLOAD.throughput(2.0, dataclasses.replace(plan, modules=(limited,)))
    again = [FlopCounter(SPECS).count_again(batch, ["llm"]) for batch in BATCHES]
    assert (seen.hfu_frac - seen.mfu_frac) * 4.0 * 8e9 == pytest.approx(again[0] / 4 + again[1] * 3 / 4)


def test_without_a_known_peak_utilisation_is_not_known():
    assert math.isnan(found(peak_flops_per_s=math.nan).mfu_frac)


def test_layers_without_a_backward_pass_run_nothing_again():
    """A frozen LLM behind nothing that trains; one behind an encoder that does has a backward pass and recomputes."""
    frozen = found(recomputes=True, frozen=("llm",))
    assert frozen.hfu_frac == frozen.mfu_frac
    behind = found(recomputes=True, frozen=("llm",), specs=make_specs("vision"))
    assert behind.hfu_frac > behind.mfu_frac
