from __future__ import annotations

from collections import Counter

import pytest

from dflop.train import watchdog
from dflop.train.liveness import Activities, Sign
from dflop.train.watchdog import Watch


class CountingStore:
    """A store that counts what is asked of it: a round trip each."""

    def __init__(self, store):
        self._store, self.calls = store, Counter()

    def __getattr__(self, name):
        self.calls[name] += 1
        return getattr(self._store, name)


def make_watch(store, rank, num_ranks):
    labels = [f"rank {r}" for r in range(num_ranks)]
    return Watch(store, rank, labels, Activities(), stall_s=60)


def test_a_heartbeat_says_that_a_peer_was_lost(store):
    """That is what makes rank 0 look closer: seconds of silence are enough then."""
    for rank, was_lost in ((0, False), (1, True)):
        activities = Activities()
        if was_lost:
            activities.note(RuntimeError("Broken pipe"))
        watch = Watch(store, rank, ["rank 0", "rank 1"], activities, stall_s=60)
        watch.start()
        store.wait([f"alive/{rank}"])
        watch.close()
        assert Sign.decode(store.get(f"alive/{rank}")).was_hung_up_on == was_lost


@pytest.mark.parametrize("was_lost", [False, True])
def test_a_sign_survives_the_wire(was_lost):
    activities = Activities()
    activities.main.step = 3
    activities.main.works("media x.jpg")
    sign = Sign(activities.main.spell(), activities.feed.spell(), was_lost)
    assert Sign.decode(sign.encode()) == sign


@pytest.mark.parametrize("num_ranks", [3, 40])
def test_rank_0_reads_all_signs_in_one_round_trip_and_unchanged_ones_not_at_all(store, monkeypatch, num_ranks):
    """Its watch runs in the interpreter that launches kernels."""
    counting, decoded, decode = CountingStore(store), [], Sign.decode
    monkeypatch.setattr(watchdog, "open_store", lambda *_, **__: counting)
    monkeypatch.setattr(Sign, "decode", lambda text: decoded.append(text) or decode(text))
    watch = make_watch(store, 0, num_ranks)
    for heard in (num_ranks - 1, num_ranks):  # the last rank still loads the model at first
        for rank in range(heard):
            activities = Activities()
            activities.main.works("forward")
            store.set(f"alive/{rank}", Sign(activities.main.spell(), activities.feed.spell()).encode())
        decoded.clear()
        assert watch._judged() == ""
        assert len(decoded) == heard
    counting.calls.clear()
    decoded.clear()
    assert watch._judged() == ""
    assert (counting.calls, decoded) == ({"multi_get": 1}, [])
