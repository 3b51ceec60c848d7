import numpy as np
import pytest

from dflop.cost.link_costs import HOST_COPY, LinkModel, fit_link_costs
from dflop.errors import CostError
from dflop.records import LinkMeasurement
from tests.builders import make_link


def measured(op: str, num_ranks: int, num_nodes: int, num_bytes: int, seconds: float) -> LinkMeasurement:
    return LinkMeasurement("p", "gpu", "sw", op, num_ranks, num_nodes, num_bytes, seconds, 0.0, 10)


def sweep(op: str, num_ranks: int, latency_s: float, bytes_per_s: float, noise_frac: float) -> list[LinkMeasurement]:
    rng = np.random.default_rng(num_ranks)
    return [
        measured(op, num_ranks, 1, 2**k, (latency_s + 2**k / bytes_per_s) * rng.lognormal(0, noise_frac))
        for k in range(10, 30)
    ]


def test_latency_and_rate_come_back_per_group():
    p2p, reduce = sweep("p2p", 2, 2e-5, 2e10, 0.03), sweep("all_reduce", 8, 9e-5, 5e9, 0.03)
    reduce[5] = measured("all_reduce", 8, 1, reduce[5].num_bytes, 20 * reduce[5].seconds)
    found = {link.op: link for link in fit_link_costs([*reduce, *p2p])}
    assert (found["p2p"].latency_s, found["p2p"].bytes_per_s) == pytest.approx((2e-5, 2e10), rel=0.05)
    assert (found["all_reduce"].latency_s, found["all_reduce"].bytes_per_s) == pytest.approx((9e-5, 5e9), rel=0.05)
    assert (found["all_reduce"].num_ranks, found["all_reduce"].num_measurements) == (8, 20)
    assert 0 < found["p2p"].median_error_frac < 0.06


def test_messages_too_small_to_show_a_rate_get_a_finite_one():
    (link,) = fit_link_costs([measured("p2p", 2, 1, n, 1e-5) for n in (8, 64)])
    assert link.bytes_per_s == pytest.approx(64 / (0.01 * 1e-5))
    assert link.latency_s == pytest.approx(1e-5, rel=0.02)


def test_one_size_determines_nothing_and_two_costs_nothing_either():
    with pytest.raises(CostError, match=r"two link costs for p2p of 2 ranks on 1 node\(s\)"):
        LinkModel([make_link("p2p", 2, 1, 1e-6, 1e9), make_link("p2p", 2, 1, 2e-6, 1e9)])
    with pytest.raises(CostError, match=r"sizes \[8\]"):
        fit_link_costs([measured("p2p", 2, 1, 8, 1e-5)] * 3)
    with pytest.raises(CostError, match="shortest time 0"):
        fit_link_costs([measured("p2p", 2, 1, n, 0.0) for n in (8, 64)])


def test_other_group_sizes_scale_as_a_ring_and_a_tree():
    links = LinkModel([make_link("all_reduce", 4, 1, 1e-5, 1e10)])
    assert links.seconds("all_reduce", 1e6, 4, 1) == pytest.approx(1e-5 + 1e-4)
    assert links.seconds("all_reduce", 1e6, 16, 1) == pytest.approx(2e-5 + 1e-4 * (15 / 16) / (3 / 4))
    assert links.seconds("all_reduce", 1e6, 2, 1) == pytest.approx(0.5e-5 + 1e-4 * (1 / 2) / (3 / 4))


def test_copies_to_the_host_are_known_of_a_device_alone_and_do_not_scale():
    links = LinkModel([make_link(HOST_COPY, 8, 1, 1e-5, 2e10)])
    for num_ranks in (1, 8):
        assert links.seconds(HOST_COPY, 2e6, num_ranks, 1) == pytest.approx(1e-5 + 1e-4)
    assert links.seconds("p2p", 2e6, 2, 1) == 0.0


def test_the_class_of_links_comes_before_the_size_of_the_group():
    links = LinkModel([make_link("all_reduce", 4, 1, 1e-6, 1e11), make_link("all_reduce", 16, 2, 1e-4, 1e9)])
    assert links.seconds("all_reduce", 1e6, 4, 2) > 5e-4
    assert links.seconds("all_reduce", 1e6, 16, 1) < 1e-4
