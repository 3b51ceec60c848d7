"""Under Hugging Face's Trainer: its own orders are followed as global batches or refused, epochs are whole, packs cost
what their texts do, and what balancing saves is said."""

import json
import logging
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dflop.balance.samples import ATTENTION_TOKENS
from dflop.errors import ConfigError
from dflop.sampler import sample_costs
from dflop.sampler.followed import FollowedOrder, order_of
from dflop.sampler.lengths import costs_of_dataset
from dflop.sampler.rank_plans import Cut
from tests.sampler.tiny import Bare, collate, make_dataset, make_model, num_supervised

NUM_SAMPLES = 37
DATASET = [{**row, "number": i} for i, row in enumerate(make_dataset(NUM_SAMPLES))]
COSTS = sample_costs([len(row["input_ids"]) for row in DATASET])


def train(folder: Path, resume: Path | None = None, sampler=None, model=None, count=None, **given: Any) -> Any:
    """A trainer that remembers in `steps` which samples carried loss, step by step, in `drawn` all that were drawn."""
    from transformers import TrainingArguments

    from dflop.sampler.hf import BalancedTrainer

    steps: list[list[int]] = []
    drawn: list[int] = []

    def numbered(rows):
        drawn.extend(row["number"] for row in rows)
        return {**collate(rows), "number": torch.tensor([row["number"] for row in rows])}

    class Kept(BalancedTrainer):
        def training_step(self, model, inputs, *args, **kwargs):
            while len(steps) <= self.state.global_step:
                steps.append([])
            numbers, labels = inputs.pop("number"), inputs["labels"]
            steps[self.state.global_step] += numbers[(labels[:, 1:] != -100).any(dim=1)].tolist()
            return super().training_step(model, inputs, *args, **kwargs)

        def _get_train_sampler(self, *args):
            return super()._get_train_sampler(*args) if sampler is None else sampler

    args = TrainingArguments(**{
        "output_dir": str(folder), "use_cpu": True, "num_train_epochs": 1, "gradient_accumulation_steps": 2,
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "data_seed": 0,
        "per_device_train_batch_size": 4, "remove_unused_columns": False, **given,
    })  # fmt: skip
    trainer = Kept((model or make_model)(), args, numbered, train_dataset=DATASET, count=count)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    trainer.steps, trainer.drawn = steps, drawn
    return trainer


def chunks(order: list[int], size: int = 8) -> list[list[int]]:
    return [sorted(order[k : k + size]) for k in range(0, len(order), size)]


class Curriculum(Sampler):
    """Short samples first, another order of them in every epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self):
        order = sorted(
            range(NUM_SAMPLES), key=lambda i: (len(DATASET[i]["input_ids"]) // 10, i * (3 + self.epoch) % 41)
        )
        return iter(order)


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS = {
    "sequential": lambda: SequentialSampler(DATASET),
    "curriculum": Curriculum,
    "of a generator": lambda: RandomSampler(DATASET, generator=seeded()),
    "with replacement": lambda: WeightedRandomSampler([1.0 + i for i in range(NUM_SAMPLES)], 24, generator=seeded()),
    "a subset": lambda: SubsetRandomSampler(range(5, 30), generator=seeded()),
    "one rank's of one": lambda: DistributedSampler(DATASET, num_replicas=1, rank=0, seed=3),
    "a list": lambda: list(range(NUM_SAMPLES))[::-1],
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_trainers_own_order_is_followed_as_global_batches(name, tmp_path):
    found, expected = train(tmp_path, sampler=SAMPLERS[name](), num_train_epochs=2), []
    for epoch in range(2):
        sampler = SAMPLERS[name]()
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if getattr(sampler, "generator", None) is not None:
            sampler.generator.manual_seed(7 + epoch)
        expected += chunks(list(sampler))
    assert [sorted(step) for step in found.steps] == expected


@pytest.mark.parametrize("strategy", ["sequential", "group_by_length", "random", "batch_rebalance"])
def test_strategies_of_the_arguments_too(strategy, tmp_path):
    first, again = (train(tmp_path, train_sampling_strategy=strategy).steps for _ in range(2))
    assert first == again, "whatever random numbers are drawn in between"
    assert sorted(i for step in first for i in step) == list(range(NUM_SAMPLES))
    if strategy == "sequential":
        assert [sorted(step) for step in first] == chunks(list(range(NUM_SAMPLES)))


def test_length_grouped_batches_stay_grouped(tmp_path):
    def spread(strategy: str) -> float:
        steps = train(tmp_path, train_sampling_strategy=strategy, per_device_train_batch_size=1).steps
        return float(np.mean([np.ptp([len(DATASET[i]["input_ids"]) for i in step]) for step in steps]))

    assert spread("group_by_length") < 0.6 * spread("random")


def test_drawing_leaves_the_trainings_random_numbers_alone():
    torch.manual_seed(5)
    order = FollowedOrder(RandomSampler(DATASET), COSTS, seed=0)
    assert order.epoch(1, Cut(8)).tolist() != order.epoch(0, Cut(8)).tolist() == order.epoch(0, Cut(8)).tolist()
    found = torch.rand(1)
    torch.manual_seed(5)
    assert found == torch.rand(1)


class Packing(BatchSampler):
    """Batches of several samples in each place, as axolotl's multipack makes them."""

    def __iter__(self):
        yield [[0, 1], [2]]
        yield [[3], [4, 5]]

    def __len__(self) -> int:
        return 2


class Uneven(Packing):
    def __iter__(self):
        yield from ([0, 1, 2], [3], [4, 5])

    def __len__(self) -> int:
        return 3


def loader(**given: Any) -> Any:
    return DataLoader(DATASET, collate_fn=list, **given)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: loader(batch_sampler=Packing(range(6), 4, False)), "Packing packs several samples into one"),
        (lambda: loader(batch_sampler=Uneven(range(6), 4, False)), "Uneven makes batches of 1 to 3 samples, not of 4"),
        (lambda: loader(batch_size=16), "own loader has batches of 16, per_device_train_batch_size is 4"),
        (lambda: loader(batch_size=4, sampler=DistributedSampler(DATASET, 2, 0)), "draws for one rank"),
        (lambda: SimpleNamespace(batch_sampler=SimpleNamespace(shuffle=True, group_by_length=True)), "for one rank"),
        (lambda: SimpleNamespace(batch_sampler=SimpleNamespace(mini_repeat_count=8)), "groups must stay together"),
    ],
)
def test_what_cannot_be_dealt_out_anew_is_refused_in_a_sentence(make, words):
    with pytest.raises(ConfigError, match=words):
        FollowedOrder(order_of(make(), 4), COSTS, 0, 4)


def test_an_order_that_changes_its_length_or_goes_beyond_the_dataset_is_refused():
    class Growing(Curriculum):
        def __len__(self) -> int:
            return 10 + self.epoch

    order = FollowedOrder(Growing(), COSTS, 0)
    with pytest.raises(ConfigError, match="Growing draws 11 samples in epoch 1, and 10 in epoch 0"):
        order.epoch(1, Cut(8))
    with pytest.raises(ConfigError, match="draws sample 37, of 37 samples"):
        FollowedOrder([3, 37], COSTS, 0)


def test_ms_swifts_loader_is_read_without_its_ranks():
    own = SimpleNamespace(batch_size=4, shuffle=False)
    found = order_of(SimpleNamespace(batch_sampler=own, dataset=DATASET), 4)
    assert list(found) == list(range(NUM_SAMPLES))
    own.shuffle = True
    assert order_of(SimpleNamespace(batch_sampler=own, dataset=DATASET), 4) is None


@pytest.mark.parametrize(
    ("size", "slots", "drops"), [(4, 1, False), (1, 4, False), (3, 4, False), (4, 9, False), (2, 6, True)]
)
@pytest.mark.parametrize("counts", [False, True])
def test_the_rest_of_an_epoch_is_trained_unless_it_is_dropped(size, slots, drops, counts, tmp_path):
    given = {"model": Bare, "count": num_supervised} if counts else {}
    found = train(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=slots,
                  dataloader_drop_last=drops, **given)  # fmt: skip
    num = NUM_SAMPLES - NUM_SAMPLES % (size * slots) if drops else NUM_SAMPLES
    assert len(found.drawn) == len(set(found.drawn)) == num
    assert found.state.global_step == -(-num // (size * slots))


@pytest.mark.parametrize(
    ("before", "after", "step"), [((2, 2), (4, 2), 3), ((4, 2), (1, 2), 4), ((4, 1), (3, 3), 13), ((4, 2), (5, 1), 5)]
)
@pytest.mark.parametrize("ignores", [False, True])
def test_a_resume_with_another_global_batch_size_trains_every_sample_once_per_epoch(
    before, after, step, ignores, tmp_path
):
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    given = {"num_train_epochs": 2, "ignore_data_skip": ignores}
    first = train(
        tmp_path, save_strategy="steps", save_steps=step, max_steps=step, **dict(zip(names, before, strict=True))
    )
    saved = tmp_path / f"checkpoint-{step}"
    state = json.loads((saved / "trainer_state.json").read_text())["stateful_callbacks"]["BalancedOrder"]
    assert state["attributes"]["saved"]["step"] == step
    second = train(tmp_path / "again", resume=saved, **given, **dict(zip(names, after, strict=True)))
    trained = [i for of in (first, second) for step in of.steps for i in step]
    assert Counter(Counter(trained).values()) == {2: NUM_SAMPLES}
    assert second.state.global_step == len(second.steps)
    assert set(trained[:NUM_SAMPLES]) == set(range(NUM_SAMPLES)), "epoch by epoch"


def test_a_checkpoint_of_a_plain_trainer_is_resumed_with_a_warning(tmp_path, caplog):
    train(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["stateful_callbacks"]["BalancedOrder"]
    file.write_text(json.dumps(state))
    assert train(tmp_path / "again", resume=tmp_path / "checkpoint-2").state.global_step == 5
    assert "the checkpoint was made without dflop" in caplog.text


def test_what_balancing_should_save_does_and_saved_is_said(tmp_path, caplog):
    found = train(tmp_path, logging_strategy="steps", logging_steps=2)
    caplog.set_level(logging.WARNING)
    assert "balancing 8 samples a step over 1 rank(s) x 2 microbatch(es), random order: expected waiting" in caplog.text
    assert "balanced 5 steps: waiting 0.0 % -> 0.0 %, padding" in caplog.text
    logs = [entry for entry in found.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for name in ("dflop/waiting_frac", "dflop/padding_frac", "dflop/estimated_speedup"):
        assert all(name in entry for entry in logs)
    assert all(entry["dflop/estimated_speedup"] > 1 for entry in logs)


def test_a_loader_that_takes_our_place_is_named(tmp_path, caplog):
    from transformers import TrainingArguments

    from dflop.sampler.hf import BalancedTrainer

    class Own(BalancedTrainer):
        def get_train_dataloader(self):
            return DataLoader(DATASET, batch_size=4, collate_fn=collate)

    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True)
    Own(make_model(), args, collate, train_dataset=DATASET).train()
    assert "batches are not balanced: get_train_dataloader is overridden" in caplog.text


@pytest.mark.parametrize("owner", ["trainer", "arguments", "collator", "template", "nobody"])
def test_padding_free_is_read_from_whoever_says_so(owner):
    from dflop.sampler.hf import BalancedTrainer

    trainer = object.__new__(BalancedTrainer)
    says, says_not = SimpleNamespace(padding_free=True), SimpleNamespace(padding_free=False)
    trainer.args, trainer.data_collator = says_not, says_not
    for name, attribute in (("arguments", "args"), ("collator", "data_collator"), ("template", "template")):
        if owner == name:
            setattr(trainer, attribute, says)
    trainer.padding_free = owner == "trainer"  # TRL sets it where packing flattens, whatever the argument says
    assert trainer._pads() == (owner == "nobody")


def test_a_pack_costs_what_its_texts_do():
    packs = [[60, 4], [16, 16, 16, 16], [64]]
    dataset = [{"input_ids": [1] * sum(pack), "seq_lengths": pack} for pack in packs]
    found = costs_of_dataset(dataset)
    assert found.tokens.tolist() == [64, 64, 64]
    squares = [sum(n * n for n in pack) for pack in packs]
    assert found.seconds.tolist() == pytest.approx([64 + square / ATTENTION_TOKENS for square in squares])
    plain = costs_of_dataset([{"input_ids": row["input_ids"]} for row in dataset])
    assert len(set(plain.seconds.tolist())) == 1
