from __future__ import annotations

import socket

import torch
import torch.distributed as dist

from dflop.cost.link_costs import HOST_COPY, fit_link_costs
from dflop.models import offload
from dflop.profile import link_probe
from dflop.profile.link_probe import MAX_REPEATS, MIN_REPEATS, MIN_SIZES, profile_links
from tests.train.ranks import run_ranks

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22)


def measure(rank, folder, num_nodes, budget_s):
    """Rows of one rank, whose number says on which node it is."""
    ranks_per_node = dist.get_world_size() // num_nodes
    socket.gethostname = lambda: f"node{rank // ranks_per_node}"
    options = dict(profile_key="key", hardware="cpu: test", software="torch test", device=torch.device("cpu"))
    return list(profile_links(**options, budget_s=budget_s, sizes_bytes=SIZES))


def test_a_spent_budget_leaves_what_a_fit_needs_of_four_processes_on_two_nodes(tmp_path):
    rows, *others = run_ranks(measure, 4, tmp_path, 2, 0.0)
    assert others == [[], [], []]
    cases = {(r.op, r.num_ranks, r.num_nodes) for r in rows}
    assert cases == {
        ("p2p", 2, 1), ("p2p", 2, 2), ("all_reduce", 2, 1), ("all_reduce", 4, 2), ("all_gather", 2, 1),
        ("all_gather", 4, 2),
    }  # fmt: skip
    assert [r.num_bytes for r in rows] == list(SIZES[:MIN_SIZES]) * len(cases)
    assert {r.num_repeats for r in rows} == {MIN_REPEATS}


class Gpu:
    """Stands in for a GPU: what is made on it lies in host memory, and there is nothing to wait for."""

    type = "cuda"


def measure_copies(rank, folder, num_nodes):
    made = []

    def both_ways(num_bytes, device):
        made.append((num_bytes, device.type))
        return offload.both_ways(num_bytes, torch.device("cpu"))

    link_probe.both_ways, torch.cuda.synchronize = both_ways, lambda device: None
    ranks_per_node = dist.get_world_size() // num_nodes
    socket.gethostname = lambda: f"node{rank // ranks_per_node}"
    options = dict(profile_key="key", hardware="cuda: test", software="torch test", device=Gpu())
    return [r for r in profile_links(**options, budget_s=0.0, sizes_bytes=SIZES) if r.op == HOST_COPY], made


def test_devices_of_one_node_copy_to_the_host_at_once(tmp_path):
    (rows, made), *others = run_ranks(measure_copies, 4, tmp_path, 2)
    assert [(r.num_ranks, r.num_nodes, r.num_bytes) for r in rows] == [(2, 1, n) for n in SIZES[-MIN_SIZES:]]
    assert [found for found, _ in others] == [[], [], []]
    assert [of for _, of in others] == [made, [], []], "the second rank of that node takes part"
    assert made == [(n, "cuda") for n in SIZES[-MIN_SIZES:]]
    (link,) = fit_link_costs(rows)
    assert link.bytes_per_s > 0


def test_one_process_has_no_links(tmp_path):
    assert run_ranks(measure, 1, tmp_path, 1, 0.0) == [[]]


def watched(rank, folder):
    """(rows of one rank, bytes that reach it in each of its all-gathers)."""
    seen = []
    plain = dist.all_gather

    def watch(parts, part, **options):
        seen.append(sum(p.numel() for p in parts) - part.numel())
        return plain(parts, part, **options)

    dist.all_gather = watch
    rows = measure(rank, folder, 1, 0.2)
    dist.all_gather = plain
    return rows, set(seen)


def test_three_processes_on_one_node(tmp_path):
    (rows, seen), *others = run_ranks(watched, 3, tmp_path)
    assert [found for found, _ in others] == [[], []], "rank 0 has the rows"
    cases = {("p2p", 2), *((op, n) for op in ("all_reduce", "all_gather") for n in (2, 3))}
    assert {(r.op, r.num_ranks) for r in rows} == cases
    for r in rows:
        assert (r.profile_key, r.hardware, r.software, r.num_nodes) == ("key", "cpu: test", "torch test", 1)
        assert r.seconds > 0
        assert r.spread_s >= 0
        assert MIN_REPEATS <= r.num_repeats <= MAX_REPEATS
    for case in cases:
        sizes = [r.num_bytes for r in rows if (r.op, r.num_ranks) == case]
        assert sizes == list(SIZES)[: len(sizes)]
        assert len(sizes) >= MIN_SIZES
    assert len(fit_link_costs(rows)) == len(cases)
    assert seen == {r.num_bytes // (n - 1) * (n - 1) for n in (2, 3) for r in rows if r.op == "all_gather"}
