"""Seconds of messages between processes: fits of `latency + bytes / rate`, and which fit answers a question.

Links are measured for a few sizes of group; a question about another size is answered from the nearest one in the same
class (on one node, or over several), scaled as a ring moves data: every rank sends `2 (n - 1) / n` of its buffer in an
all-reduce and `(n - 1) / n` in an all-gather, and latency grows with the logarithm of the ranks, as a tree's does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from dflop.cost.regression import relative_errors, robust_nnls
from dflop.errors import CostError
from dflop.records import LinkCost, LinkMeasurement

P2P, ALL_REDUCE, ALL_GATHER = "p2p", "all_reduce", "all_gather"
HOST_COPY = "host_copy"
"""All devices of a node copy so many bytes to the host and as many back, at once."""
MIN_SHARE_OF_RATE = 0.01
"""A fit whose rate came out infinite is told from the latency no better than this at its largest message."""


def fit_link_costs(measurements: Sequence[LinkMeasurement]) -> list[LinkCost]:
    """One cost per (profile, hardware, software, op, ranks, nodes), by non-negative least squares on relative errors.

    Raises:
        CostError: a group measured at fewer than two sizes, or a time that is not positive.
    """
    ordered = sorted(measurements, key=lambda m: (_identity(m), m.num_bytes, m.seconds))
    return [_fit(list(group)) for _, group in itertools.groupby(ordered, key=_identity)]


def _identity(m: LinkMeasurement) -> tuple[str, str, str, str, int, int]:
    return (m.profile_key, m.hardware, m.software, m.op, m.num_ranks, m.num_nodes)


def _fit(probes: list[LinkMeasurement]) -> LinkCost:
    first = probes[0]
    seconds = np.array([p.seconds for p in probes])
    sizes = sorted({p.num_bytes for p in probes})
    if len(sizes) < 2 or seconds.min() <= 0:
        raise CostError(
            f"link measurements do not determine a cost: sizes {sizes}, shortest time {seconds.min()} s",
            where=f"{first.op} of {first.num_ranks} ranks on {first.num_nodes} node(s), {first.hardware}",
            hint="measure messages of two sizes or more",
        )
    features = np.array([(1.0, p.num_bytes) for p in probes])
    latency_s, s_per_byte = robust_nnls(features, seconds)
    s_per_byte = max(s_per_byte, MIN_SHARE_OF_RATE * float(seconds.min()) / sizes[-1])
    errors = relative_errors(features @ np.array([latency_s, s_per_byte]), seconds)
    return LinkCost(
        profile_key=first.profile_key,
        hardware=first.hardware,
        software=first.software,
        op=first.op,
        num_ranks=first.num_ranks,
        num_nodes=first.num_nodes,
        latency_s=float(latency_s),
        bytes_per_s=1.0 / s_per_byte,
        source="measured",
        num_measurements=len(probes),
        median_error_frac=float(np.median(errors)),
    )


class LinkModel:
    """Seconds of any message, from the links that are known.

    Args:
        links: At most one per (op, ranks, nodes).

    Raises:
        CostError: two links for the same operation and group.
    """

    def __init__(self, links: Iterable[LinkCost] = ()) -> None:
        self._links: dict[tuple[str, int, int], LinkCost] = {}
        for link in links:
            if self._links.setdefault((link.op, link.num_ranks, link.num_nodes), link) is not link:
                raise CostError(
                    f"two link costs for {link.op} of {link.num_ranks} ranks on {link.num_nodes} node(s)",
                    hint="select the links of one profile and one type of hardware",
                )

    @property
    def links(self) -> tuple[LinkCost, ...]:
        """Every link, ordered by (op, ranks, nodes)."""
        return tuple(self._links[key] for key in sorted(self._links))

    def seconds(self, op: str, num_bytes: float, num_ranks: int, num_nodes: int) -> float:
        """Seconds of one `op` on a buffer of `num_bytes` per rank.

        0.0 for a single rank, which only copies to the host, for no bytes, and where no link of that operation is
        known: what was not measured is left out of a prediction, not guessed. Where only the other class of links (one
        node, several nodes) is known, that one answers.
        """
        known = [link for link in self._links.values() if link.op == op]
        if (num_ranks < 2 and op != HOST_COPY) or num_bytes <= 0 or not known:
            return 0.0
        nearest = min(
            known,
            key=lambda link: (
                (link.num_nodes > 1) != (num_nodes > 1),
                abs(math.log(link.num_ranks / num_ranks)),
                abs(link.num_nodes - num_nodes),
                link.num_ranks,
            ),
        )
        latency_s = nearest.latency_s
        if op != HOST_COPY:
            latency_s *= math.log2(num_ranks) / math.log2(max(nearest.num_ranks, 2))
        moved = moved_frac(op, num_ranks) / moved_frac(op, max(nearest.num_ranks, 2))
        return latency_s + moved * num_bytes / nearest.bytes_per_s

    def line(self, op: str, num_ranks: int, num_nodes: int) -> tuple[float, float]:
        """(latency_s, seconds that a byte adds) of an operation; zeros as for `seconds`."""
        latency_s = self.seconds(op, 1e-9, num_ranks, num_nodes)
        return latency_s, (self.seconds(op, 1e9, num_ranks, num_nodes) - latency_s) / 1e9


def moved_frac(op: str, num_ranks: int) -> float:
    """Part of its buffer that every rank of a ring sends."""
    if op in (P2P, HOST_COPY):
        return 1.0
    return (2.0 if op == ALL_REDUCE else 1.0) * (num_ranks - 1) / num_ranks
