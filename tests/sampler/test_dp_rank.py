"""Which rank a sampler deals to is looked up when an iteration begins, and compared with what is given."""

import contextlib

import pytest
import torch.distributed as dist

from dflop.errors import ConfigError
from dflop.sampler import BalancedBatchSampler

LENGTHS = list(range(2, 66))
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.fixture
def alone(monkeypatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def initialise(monkeypatch, rank: int, world_size: int) -> None:
    """As `init_process_group` leaves things; all ranks have the same costs."""

    def gather(every: list, mine: object) -> None:
        every[:] = [mine] * world_size

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
    monkeypatch.setattr(dist, "all_gather_object", gather)


@pytest.mark.parametrize(
    "found_in",
    [{}, {"RANK": "0", "WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, {"SLURM_STEP_NUM_TASKS": "2"}],
)
def test_a_sampler_made_before_the_process_group_deals_to_its_ranks(alone, monkeypatch, found_in):
    for name, value in found_in.items():
        monkeypatch.setenv(name, value)
    samplers = [BalancedBatchSampler(LENGTHS, 16, num_microbatches=2) for _ in range(2)]
    drawn = []
    for rank, sampler in enumerate(samplers):
        initialise(monkeypatch, rank, 2)
        drawn += [i for batch in sampler for i in batch]
        assert (sampler.rank, sampler.num_replicas) == (rank, 2)
    assert sorted(drawn) == list(range(len(LENGTHS)))


def test_a_sampler_that_was_looked_at_alone_deals_to_a_world_that_comes_later(alone, monkeypatch):
    sampler = BalancedBatchSampler(LENGTHS, 16)
    assert len(sampler.planned(0).rank(0)[0]) == 16
    initialise(monkeypatch, 3, 4)
    assert (sampler.step(0).number, len(sampler.step(0).indices), sampler.num_replicas) == (0, 1, 4)
    initialise(monkeypatch, 0, 64)
    with pytest.raises(ConfigError, match=r"16 sample\(s\) for 64 rank\(s\)"):
        next(iter(sampler))


@pytest.mark.parametrize(
    "found",
    [
        {"WORLD_SIZE": "4"}, {"LOCAL_RANK": "1"}, {"RANK": "1"}, {"SLURM_STEP_NUM_TASKS": "8"},
        {"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "3"},
    ],
)  # fmt: skip
def test_several_processes_of_which_this_might_be_any_are_refused_at_the_first_draw(alone, monkeypatch, found):
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    sampler = BalancedBatchSampler(LENGTHS, 16)
    for draw in (lambda: next(iter(sampler)), lambda: next(sampler.steps()), lambda: sampler.step(0)):
        with pytest.raises(ConfigError, match=r"torch\.distributed is not initialised"):
            draw()
    given = BalancedBatchSampler(LENGTHS, 16, rank=0, num_replicas=4)
    assert len(next(iter(given))) < 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": 0, "num_replicas": 1}, None),  # one replica of two tensor-parallel ranks
        ({"rank": 0, "num_replicas": 3}, r"deals to 3 rank\(s\), torch.distributed has 2"),
        ({"rank": 0, "num_replicas": 4}, r"deals to 4 rank\(s\), torch.distributed has 2"),
        ({"rank": 0, "num_replicas": 2}, "is of rank 0, this process is rank 1 of 2"),
        ({"num_replicas": 1}, "without rank="),
        ({"rank": 1, "num_replicas": 2}, None),
    ],
)
def test_what_is_given_is_compared_with_the_process_group(monkeypatch, given, words):
    sampler = BalancedBatchSampler(LENGTHS, 16, **given)
    initialise(monkeypatch, 1, 2)
    with contextlib.nullcontext() if words is None else pytest.raises(ConfigError, match=words):
        next(iter(sampler))
