"""The reference planner: its rule, its formula, what it believes about costs, and the plans that come of it."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from dflop.errors import InfeasiblePlanError
from dflop.plan.partition import even_layers
from dflop.records import LLM, LayerKind, ModuleSpec
from tests.bench.reference import accepted, reference_layouts, reference_plan
from tests.bench.reference_costs import (
    MemoryLines,
    RateCurve,
    ReferenceModule,
    encoder_flops,
    encoder_module,
    llm_flops,
)
from tests.builders import make_cost, make_sample, make_specs
from tests.plan.problems import baseline_problem, tiles_the_cluster

NO_MEMORY = MemoryLines(0.0, 0.0, 0.0, 0.0)
CONSTANT = RateCurve(np.array([1.0, 2.0]), np.array([1.0, 1.0]))


# The reference's rule


def test_the_rule_lets_microbatches_only_fall_and_steps_creep_up():
    steps = [(10.0, 8), (10.9, 6), (11.9, 4), (5.0, 4), (13.0, 2)]
    # 10.9 < 11 and 11.9 < 11.99 are accepted with ever fewer microbatches; 5.0 has as many and is passed over; 13.0
    # has fewer and is 1.09 times what is held by then.
    step_s, num_microbatches = map(np.array, zip(*steps, strict=True))
    assert [accepted(step_s[:n], num_microbatches[:n]) for n in range(1, 6)] == [0, 1, 2, 2, 4]


# The reference's formula, by hand


def modules(**llm_changes):
    vision, llm = make_specs("vision", num_layers=2, max_pp=2)
    vision = dataclasses.replace(vision, max_pp=2)
    encoder = ReferenceModule(vision, 2.0, 4.0, 10.0, 2.0, {1: CONSTANT}, {1: NO_MEMORY})
    language = ReferenceModule(llm, 3.0, 4.0, 1.0, 4.0, {1: CONSTANT}, {1: NO_MEMORY})
    return encoder, dataclasses.replace(language, **llm_changes)


def layouts(encoder, llm, **limits):
    return reference_layouts(encoder, llm, **{"num_devices": 3, "limit_bytes": 1e9, "global_batch_size": 8} | limits)


def degrees(found):
    return [(*e, *t) for e, t in zip(found.encoder.tolist(), found.llm.tolist(), strict=True)]


def test_layouts_microbatches_and_seconds_on_three_devices():
    found = layouts(*modules())
    assert found.encoder.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 2], [1, 2, 1]]
    assert found.llm.tolist() == [[1, 1, 2], [1, 2, 1], [1, 1, 1], [1, 1, 1]]
    # Average over largest: encoder 1/2, LLM 3/4 of 8 samples per replica. The third layout wants 6, but then an
    # encoder replica would get 8 / 12 samples, so the last number tried, 8, stays.
    assert found.num_microbatches.tolist() == [4, 6, 8, 6]
    # (m + stages - 1) * slower stage: 5 * max(2 * 2, 1 * 4), 8 * max(8/3, 8/3), 9 * max(1, 4), 8 * max(4/3, 16/3).
    assert found.step_s.tolist() == pytest.approx([20.0, 8 * 8 / 3, 36.0, 8 * 16 / 3])


def test_rates_are_taken_at_the_average_microbatch():
    rising = RateCurve(np.array([1.0, 2.0, 4.0]), np.array([1.0, 2.0, 3.0]))
    found = layouts(*modules(rates={1: rising}), num_devices=2)
    # One layout, m 6: 8/6 samples of 3 tokens, so the rate at 4 tokens.
    assert found.num_microbatches.tolist() == [6]
    assert found.step_s.tolist() == pytest.approx([7 * max(8 / 6 * 2, 8 / 6 * 4 / 3)])


def test_memory_rule_charges_the_encoder_for_every_replica_it_serves_and_both_pipelines():
    encoder, llm = modules()
    encoder = dataclasses.replace(encoder, memory={1: MemoryLines(3.0, 5.0, 0.0, 1.0)})
    # 1.25 * (3 + 5 layers + in flight * layers * 4 tiles of 10 tokens * llm_dp / encoder_dp)
    peaks = [1.25 * (13 + 2 * 2 * 80), 1.25 * (13 + 3 * 2 * 40), 1.25 * (13 + 2 * 2 * 20), 1.25 * (8 + 3 * 1 * 40)]
    for limit in (*peaks, min(peaks) - 1e-6):
        expected = [peak <= limit for peak in peaks]
        found = layouts(encoder, llm, limit_bytes=limit + 1e-9)
        assert degrees(found) == list(itertools.compress(degrees(layouts(*modules())), expected))


# What the reference believes about costs


def test_flops_as_published_with_the_miscounted_keys():
    depth, h, heads, kv_heads, width, vocab, s = 28, 3584, 28, 4, 18944, 152064, 2048
    layer = 2 * h * h + 2 * h * h * kv_heads // heads + 3 * h * width
    spec = ModuleSpec(
        LLM,
        ((LayerKind("attention", layer, heads, kv_heads, h // heads, width, 8 * h), depth),),
        h,
        2 * h * vocab,
        depth,
        (1,),
        vocab_size=vocab,
    )
    miscounted = heads / kv_heads
    whole = (
        6 * depth * s * h * h * (2 + 2 * miscounted / heads + s / h) + 18 * depth * s * h * width + 6 * s * h * vocab
    )
    linear, attention = llm_flops(spec, s)
    assert linear + attention == pytest.approx(4 / 3 * whole)
    assert attention == pytest.approx(8 * depth * s * s * h)


def test_flops_of_tiles_as_published():
    depth, h, width, patches, patch = 27, 1152, 4304, 729, 14
    spec = ModuleSpec(
        "vision",
        ((LayerKind("attention", 4 * h * h + 2 * h * width, 16, 16, h // 16, width, 4 * h), depth),),
        h,
        3 * patch**2 * h,
        depth,
        (1,),
    )
    layers = 3 * (8 * h * h * patches + 4 * patches**2 * h) + 12 * patches * h * width
    embedding = 18 * h * patches * patch**2
    assert encoder_flops(spec, 5, patches) == pytest.approx(4 / 3 * 5 * (depth * layers + embedding))


def tiles(*counts, tile=100):
    return [make_sample(i, 50, [("vision", tile)] * count) for i, count in enumerate(counts)]


def test_encoder_seconds_are_those_of_the_cost_model_at_the_probes():
    spec, _ = make_specs("vision")
    cost = make_cost("vision").extrapolating()
    module = encoder_module(spec, cost, tiles(1, 2, 6), [1], recompute=False)
    assert (module.mean_size, module.max_size, module.tokens_per_size) == (3.0, 6.0, 100.0)
    for size in (1, 8, 64):
        expected = sum(cost.module_seconds("vision", (size, 100 * size, 100**2 * size), num_layers=4, edge=True))
        assert module.sample_seconds(1, size) * size / 3 == pytest.approx(float(expected))


# Its plans


def test_reference_plan_takes_every_device_and_cuts_layers_evenly():
    problem = baseline_problem()
    found = reference_plan(problem)
    assert found == reference_plan(baseline_problem())
    assert found.fits
    assert tiles_the_cluster(problem, found.plan)
    for m in found.plan.modules:
        assert m.layers_per_stage == even_layers(4, m.parallel.pp)
        assert (m.recompute, m.shard_optimizer) == (True, False)


def test_reference_plan_that_our_memory_model_refuses_is_told():
    tight = baseline_problem(memory_bytes=60 * 2**20)
    with pytest.raises(InfeasiblePlanError, match="by its memory rule nothing fits"):
        reference_plan(tight)
    found = reference_plan(tight, limit_bytes=float("inf"))
    assert not found.fits
    assert max(max(m.stage_memory_bytes) for m in found.plan.modules) > tight.usable_bytes


def test_reference_knows_one_encoder():
    with pytest.raises(InfeasiblePlanError, match="one encoder and one LLM; this model has 2 encoders"):
        reference_plan(baseline_problem("vision", "audio"))
