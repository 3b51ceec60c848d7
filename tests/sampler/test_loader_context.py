"""Loaders and trainers that would lose, repeat or mix up samples are refused before the first batch."""

import dataclasses
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dflop.errors import ConfigError, TrainError
from dflop.sampler import BalancedBatchSampler, sample_costs
from tests.sampler.tiny import Bare, collate, costs_of, make_dataset, make_model

LENGTHS = list(range(2, 34))


def make(**given) -> BalancedBatchSampler:
    costs = given.pop("costs", LENGTHS)
    given = {"rank": 0, "num_replicas": 1, "num_microbatches": 2, **given}
    return BalancedBatchSampler(costs, 8, **given)


def loader_of(sampler: BalancedBatchSampler, dataset=LENGTHS) -> DataLoader:
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=list)


@pytest.mark.parametrize(
    "loader",
    [loader_of(make(seed=1)), loader_of(make()), DataLoader(LENGTHS, batch_size=4), DataLoader(LENGTHS, shuffle=True)],
    ids=["another seed", "equal", "batch size", "shuffle"],
)
def test_steps_of_a_loader_that_draws_from_something_else_are_refused(loader):
    with pytest.raises(ConfigError, match="not from this sampler"):
        make().steps(loader)


def test_a_source_that_ends_within_a_step_is_named():
    batches = [[1], [2], [3]]
    with pytest.raises(TrainError, match=r"ended within step 1: 1 of 2 microbatch\(es\) are missing"):
        list(make().steps(batches))


@pytest.mark.parametrize(
    ("dataset", "index", "words"),
    [
        (LENGTHS[:-1], None, "costs of 32 samples, and 31 samples in the loader's dataset"),
        ([*LENGTHS, 5], None, "costs of 32 samples, and 33 samples"),
        (LENGTHS, [*range(31), 32], "costs of sample 32, the loader's dataset has 32"),
    ],
)
def test_costs_of_another_dataset_are_refused(dataset, index, words):
    costs = sample_costs(LENGTHS)
    if index is not None:
        costs = dataclasses.replace(costs, index=np.array(index))
    sampler = make(costs=costs)
    for draw in (
        lambda: next(iter(loader_of(sampler, dataset))),
        lambda: list(sampler.steps(loader_of(sampler, dataset))),
    ):
        with pytest.raises(ConfigError, match=words):
            draw()


def test_a_part_of_a_dataset_needs_its_index_and_nothing_else():
    costs = dataclasses.replace(sample_costs(LENGTHS[:16]), index=np.arange(0, 32, 2))
    assert sorted(i for batch in loader_of(make(costs=costs), range(32)) for i in batch) == list(range(0, 32, 2))


class Endless(Dataset):
    def __getitem__(self, i: int) -> int:
        return i


def test_a_dataset_without_a_length_is_taken():
    assert len(next(iter(loader_of(make(), Endless())))) > 0


@pytest.mark.parametrize(
    ("model", "dataset", "given", "words"),
    [
        (Bare, None, {}, r"the forward of Bare takes no num_items_in_batch[\s\S]*give count="),
        (None, [{"text": "a"}] * 32, {}, r"no `length` and no `input_ids`[\s\S]*have text[\s\S]*media_costs"),
        (None, [torch.ones(3)] * 32, {}, "they are of type Tensor"),
        (None, Endless(), {}, "iterable|has no length"),
        (None, None, {"costs": [1.0, 2.0]}, "shape"),
        (None, None, {"lengths": "length"}, "lengths is `length`"),
        (None, None, {"own": {"max_tokens": 200}}, r"with max_tokens it varies[\s\S]*num_microbatches="),
    ],
)
def test_what_a_balanced_trainer_cannot_do_is_said_before_the_first_step(model, dataset, given, words, tmp_path):
    from transformers import TrainingArguments

    from dflop.sampler.hf import BalancedTrainer

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=1, disable_tqdm=True)
    data = make_dataset() if dataset is None else dataset

    def train(own=None, **given) -> None:
        trainer = BalancedTrainer((model or make_model)(), args, collate, train_dataset=data, **given)
        if own:
            sampler = make(costs=costs_of(data), num_microbatches=None, **own)
            trainer.get_train_dataloader = lambda: DataLoader(data, batch_sampler=sampler, collate_fn=collate)
        trainer.train()

    with pytest.raises(ConfigError, match=words):
        train(**given)


@pytest.mark.parametrize("skipped", [1, 4])
def test_accelerates_skipping_after_a_resume_is_noticed(skipped):
    from accelerate import skip_first_batches

    sampler = make()
    sampler.resume(1)
    with pytest.raises(
        ConfigError, match=rf"sampler was resumed 1 step[\s\S]*first {skipped} batch[\s\S]*ignore_data_skip"
    ):
        next(iter(skip_first_batches(loader_of(sampler), skipped)))
    assert len(list(skip_first_batches(loader_of(make()), skipped))) == 8 - skipped


def test_one_process_that_would_draw_for_all_is_refused():
    from accelerate import data_loader
    from accelerate.state import PartialState

    PartialState(cpu=True)
    loader = loader_of(make())
    for rank in range(2):  # by every rank: later only the first would draw, and the others would wait for it
        with pytest.raises(ConfigError, match="dispatch_batches deals the batches of one process out"):
            data_loader.prepare_data_loader(
                loader, num_processes=2, process_index=rank, put_on_device=True, dispatch_batches=True
            )
    alone = data_loader.DataLoaderDispatcher(LENGTHS, batch_sampler=make(), collate_fn=list)
    alone.state = SimpleNamespace(num_processes=2, process_index=0)
    with pytest.raises(ConfigError, match="dispatch_batches"):
        next(iter(alone))


def test_stages_of_llama_factory_make_balanced_trainers(monkeypatch):
    from transformers import Trainer

    from dflop.sampler.hf import BalancedTrainerMixin
    from dflop.sampler.plugins.llama_factory import TRAINERS, install

    for module, name in TRAINERS.items():  # as its modules of stages hold them
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{name: type(name, (Trainer,), {})}))
    install(costs="costs.npz")
    for module, name in TRAINERS.items():
        made = getattr(sys.modules[module], name)
        assert made.func.__mro__.index(BalancedTrainerMixin) < made.func.__mro__.index(Trainer)
        assert made.keywords == {"costs": "costs.npz"}
