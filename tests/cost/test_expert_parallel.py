import numpy as np
import pytest

from dflop.cost.expert_parallel import IMBALANCE
from dflop.cost.model import CostModel
from dflop.records import LLM, RunMode
from tests.builders import make_link, make_specs, make_table, with_layers

EXPERTS = {"num_active_params": 600_000, "num_experts": 4, "num_active_experts": 2, "num_expert_params": 800_000}
LINKS = (make_link("p2p", 2, 1, 1e-5, 1e9),)
LAYERS = {"num_layers": 3, "edge": True}


def seconds(mode, *, links=LINKS, tokens=4000.0, **experts):
    spec = with_layers(make_specs()[0], **experts)
    tables = [make_table(LLM), make_table(LLM, recompute=True)]
    cost = CostModel(tables, specs=[spec], links=links, extrapolate=True)
    return np.array(cost.module_seconds(LLM, (80, tokens, tokens * 600), mode, **LAYERS))


def test_rows_travel_and_all_wait_for_the_rank_with_most():
    """Of four ranks each sends three quarters of two rows per token, of 64 numbers of 4 bytes, there and back."""
    once_s = 3e-5 + 2 * IMBALANCE * 3 / 4 * 2 * 4000 * 64 * 4 / 1e9
    # A token passes through 400,000 of 600,000 parameters in experts; attention over pairs is no product of theirs.
    slower_s = (IMBALANCE - 1) * 2 / 3 * (1e-3 + 4000 * 1e-5)
    more_s = seconds(RunMode(ep=4), **EXPERTS) - seconds(RunMode(), **EXPERTS)
    assert more_s == pytest.approx([3 * (once_s + slower_s), 3 * (once_s + 2 * slower_s)])
    again_s = seconds(RunMode(ep=4, recompute=True), **EXPERTS) - seconds(RunMode(recompute=True), **EXPERTS)
    assert again_s[1] - more_s[1] == pytest.approx(3 * once_s)
    without_s = seconds(RunMode(ep=4), links=(), **EXPERTS) - seconds(RunMode(), links=(), **EXPERTS)
    assert without_s == pytest.approx([3 * slower_s, 6 * slower_s])


def test_tensor_parallel_ranks_send_their_own_tokens_and_none_of_the_messages_around_an_mlp():
    links = (*LINKS, make_link("all_reduce", 2, 1, 1e-4, 1e8))
    half = seconds(RunMode(ep=4), links=LINKS, tokens=2000.0, **EXPERTS) - seconds(RunMode(), tokens=2000.0, **EXPERTS)
    found = seconds(RunMode(2, ep=4), links=links, **EXPERTS) - seconds(RunMode(2), links=links, **EXPERTS)
    # Two all-reduces of a layer forward and three backward, of 64 numbers of 4 bytes per token; half of them.
    message_s = 3 * (1e-4 + 4000 * 64 * 4 / 1e8)
    assert found == pytest.approx(half - [message_s, 1.5 * message_s])


def test_nothing_is_added_without_tokens_or_experts():
    assert seconds(RunMode(ep=4)).tolist() == seconds(RunMode()).tolist()
    assert not seconds(RunMode(ep=4), tokens=0.0, **EXPERTS).any()
