"""An epoch that is left or resumed: what the loop has counts, however far a loader has drawn ahead."""

import copy
import itertools
import json
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from dflop.errors import ConfigError
from dflop.sampler import BalancedBatchSampler
from tests.forked import run_module

ROOT = Path(__file__).parents[2]

LENGTHS = [(7 * i) % 41 + 3 for i in range(36)]


def make(num_microbatches: int | None = 2, **given) -> BalancedBatchSampler:
    given = {"rank": 0, "num_replicas": 1, "ahead": 0, **given}
    return BalancedBatchSampler(LENGTHS, 8, num_microbatches=num_microbatches, **given)


class Prefetching:
    """Draws as a loader with workers does: so many batches first, then one for each that it hands out."""

    def __init__(self, sampler: BalancedBatchSampler, num_prefetched: int) -> None:
        self.draws = iter(sampler)
        self.draws._num_prefetched = num_prefetched
        self.waiting: list[tuple[list[int], dict]] = []
        for _ in range(num_prefetched):
            self.draw()

    def draw(self) -> None:
        if (batch := next(self.draws, None)) is not None:
            self.waiting.append((batch, copy.copy(self.draws.state_dict())))

    def __iter__(self):
        while True:
            self.draw()
            if not self.waiting:
                return
            yield self.waiting.pop(0)


@settings(max_examples=60, deadline=None)
@given(
    num_microbatches=st.sampled_from([None, 1, 2, 3]), num_prefetched=st.integers(0, 12), num_taken=st.integers(0, 20),
    first=st.integers(0, 7),
)  # fmt: skip
def test_what_the_loop_has_decides_where_it_goes_on(num_microbatches, num_prefetched, num_taken, first):
    cap = {"max_tokens": 60} if num_microbatches is None else {}
    sampler, again = make(num_microbatches, **cap), make(num_microbatches, **cap)
    sampler.resume(first)
    steps = [step.indices for step in again.steps(until=20)]
    rest = [m for step in steps[first : 5 * (first // 5 + 1)] for m in step]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflop.sampler.batch_sampler.check_loader", lambda *args, **given: None)
        taken = list(itertools.islice(Prefetching(sampler, num_prefetched), num_taken))
        assert [batch for batch, _ in taken] == rest[:num_taken]
        trained, left = first, [m for m, _ in taken]
        while left and left[: len(steps[trained])] == steps[trained]:
            left, trained = left[len(steps[trained]) :], trained + 1
        assert sampler.state_dict()["step"] == trained
        if taken:  # as torchdata's loader goes on: the sampler's state, then that of its iterator
            resumed = make(num_microbatches, **cap)
            resumed.load_state_dict(sampler.state_dict())
            if trained < 5 * (first // 5 + 1):
                draws = iter(resumed)
                draws.load_state_dict(taken[-1][1])
                assert list(draws) == rest[num_taken:]
        following = next(iter(sampler))
    assert following == (rest[0] if num_taken < len(rest) else steps[5 * (first // 5 + 1)][0])


@pytest.fixture(scope="module")
def by_workers() -> dict:
    """What loaders gave that have worker processes, in a process that holds nothing else."""
    done = run_module("tests.sampler.test_draws", cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_an_epoch_left_early_begins_anew_with_and_without_workers(num_workers, by_workers):
    found, again = by_workers["left early"][str(num_workers)], make()
    assert found["step"] == 4, "what workers have drawn is not trained"
    assert found["epochs"] == [list(again), list(again)]


def test_leaving_an_epoch_early_is_said(caplog):
    caplog.set_level("INFO", "dflop.sampler")
    sampler = make()
    list(itertools.islice(sampler, 8))
    next(iter(sampler))
    assert "epoch 0 was left after 4 of 5 steps and restarts" in caplog.text


def test_an_epoch_whose_end_nobody_asked_for_is_over_all_the_same():
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=make(), collate_fn=list)
    epochs = [[batch for _, batch in zip(range(len(loader)), loader, strict=False)] for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert all(sorted(i for batch in epoch for i in batch) == list(range(len(LENGTHS))) for epoch in epochs)


@pytest.mark.parametrize("case", ["0 4", "0 5", "2 5", "0 10", "2 10"])
def test_torchdatas_loader_resumes_the_sampler_too(case, by_workers):
    again = make()
    assert by_workers["resumed"][case] == [*again, *again], "workers and batches taken before the checkpoint"


def test_a_state_within_a_step_is_of_the_same_number_of_microbatches():
    draws, other = iter(make(2)), iter(make(3))
    next(draws)
    with pytest.raises(ConfigError, match="within a step of 2 microbatches per rank, which now has 3"):
        other.load_state_dict(draws.state_dict())
    with pytest.raises(ConfigError, match="state is of step 7, this iteration is of steps 0 to 4"):
        other.load_state_dict({"step": 7, "end": 10, "microbatch": 0, "num_microbatches": 0})


def left_early(num_workers: int) -> dict:
    """An epoch that is left two batches before its end, and the two after it."""
    sampler = make()
    loader = DataLoader(range(len(LENGTHS)), batch_sampler=sampler, num_workers=num_workers, collate_fn=list)
    for number, _ in enumerate(loader, start=1):
        if number == len(loader) - 2:
            break
    return {"step": sampler.state_dict()["step"], "epochs": [list(loader), list(loader)]}


def resumed(num_workers: int, num_taken: int) -> list[list[int]]:
    """Batches of two epochs, with a checkpoint after `num_taken` of the first."""

    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> StatefulDataLoader:
        given = {"num_workers": num_workers, "collate_fn": list}
        return StatefulDataLoader(range(len(LENGTHS)), batch_sampler=make(), **given)

    first, second = loader(), loader()
    begun = iter(first)
    taken = [next(begun) for _ in range(num_taken)]
    second.load_state_dict(first.state_dict())
    return [*taken, *second, *second]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({
        "left early": {n: left_early(n) for n in (0, 1, 2)},
        "resumed": {f"{n} {k}": resumed(n, k) for n, k in ((0, 4), (0, 5), (2, 5), (0, 10), (2, 10))},
    }))  # fmt: skip
