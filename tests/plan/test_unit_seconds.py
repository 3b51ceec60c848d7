"""Seconds of samples that ranks share, as formulas have them."""

from dataclasses import replace

import numpy as np
import pytest

from dflop.plan.unit_seconds import together_s
from dflop.records import LLM, RunMode
from tests.builders import make_sample
from tests.plan.problems import make_problem


def step_s(num_tiles: int, cp: int) -> float:
    """Of one sample with one item of 8,000 tokens, in so many tiles, which is the only microbatch of one group."""
    sample = make_sample(0, 400, [("vision", 8_000)])
    (item,) = sample.items
    item = replace(item, grid=(num_tiles, 1, 8_000 // num_tiles), sum_sq_tokens=8_000**2 // num_tiles)
    problem = make_problem("vision", batches=[(replace(sample, items=(item,)),)])
    none = np.zeros(1)
    return float(together_s(problem, problem.specs, RunMode(1, cp), 1, 1, none, none, 0.0)[0])


def passes_s(module: str, load: tuple[float, float, float]) -> float:
    cost = make_problem("vision").cost
    return sum(float(s) for s in cost.module_seconds(module, load, num_layers=4, edge=True))


@pytest.mark.parametrize(("num_tiles", "of_item"), [(1, 1), (2, 2), (4, 4), (8, 4)])
def test_ranks_that_share_a_sample_wait_for_its_largest_tile(num_tiles, of_item):
    sample = make_sample(0, 400, [("vision", 8_000)])
    load = sample.load(LLM)
    of_llm_s = passes_s(LLM, (load.num_items / 4, load.num_tokens / 4, load.sum_sq_tokens / 4))
    of_tile_s = passes_s("vision", (1 / of_item, 8_000 / of_item, 8_000**2 / num_tiles / of_item))
    assert step_s(num_tiles, 4) == pytest.approx(of_llm_s + of_tile_s)
