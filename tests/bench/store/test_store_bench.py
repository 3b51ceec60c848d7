from __future__ import annotations

from dflop.store import console
from tests.bench.store.cases import named_queries, store_of_observations


def test_every_named_query_is_timed(tmp_path):
    store_of_observations(tmp_path, 10_000)
    timed = dict(named_queries(tmp_path))
    assert set(timed) == {query.name for query in console.list_queries()}
    assert min(timed.values()) > 0
