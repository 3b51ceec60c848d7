"""Is the verdict of `dflop sampler estimate` right? Of four kinds of data, beside real steps under each order.

Two processes over gloo train real tiny models on global batches that every order deals out as it was simulated, one
gradient sum a step. Counted is processor time, the least of all rounds of every rank's every step, so that other work
on the machine does not matter: a step takes what its slower rank takes. A verdict is right where no order is faster
than the one that it names by more than 3 %.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dflop.sampler.costs_of_samples import SampleCosts, sample_costs
from dflop.sampler.estimate import GROUPED, OURS, WINDOW, Dealt, Setting, deals_of, verdict, waiting_of
from tests.bench.command import become_a_job, in_ranks, keep_to, options
from tests.bench.figures import conclude
from tests.bench.markdown import ratio, table
from tests.models.tiny_families import CASES, FIRST_TEXT_ID, Case
from tests.sampler.tiny import collate

NUM_RANKS, SLOTS, BATCH, NUM_SAMPLES = 2, 2, 16, 64
FASTER_FRAC = 0.03
"""That an order may be faster by than the one that a verdict names: less is no reason to change a trainer."""
VOCAB = 512
Media = tuple[str, int, int, int, float]


@dataclass(frozen=True)
class Kind:
    """Samples, a model, and what a microbatch of them costs it."""

    make: Callable[[], tuple[torch.nn.Module, Sequence[Any], Sequence[int]]]
    """(model, samples, their tokens)."""
    loss: Callable[[torch.nn.Module, Sequence[Any]], torch.Tensor]
    padded: bool


def texts() -> tuple[torch.nn.Module, Sequence[Any], Sequence[int]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4.2, 0.9, NUM_SAMPLES), 8, 512).astype(int).tolist()
    ids = [torch.tensor(rng.integers(1, VOCAB, n)) for n in lengths]
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=128, intermediate_size=768, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096)  # fmt: skip
    return LlamaForCausalLM(config), [{"input_ids": i, "labels": i} for i in ids], lengths


def padded_loss(model: torch.nn.Module, rows: Sequence[Any]) -> torch.Tensor:
    return model(**collate(list(rows))).loss


def flattened_loss(model: torch.nn.Module, rows: Sequence[Any]) -> torch.Tensor:
    """As `DataCollatorWithFlattening` puts texts one after the other."""
    ids = torch.cat([row["input_ids"] for row in rows])[None]
    positions = torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None]
    return model(input_ids=ids, labels=ids, position_ids=positions).loss


def media(samples: Sequence[Sequence[Media]]) -> tuple[torch.nn.Module, Sequence[Any], Sequence[int]]:
    """A tiny Qwen2.5-VL at native resolution."""
    tiny = CASES["Qwen2.5-VL"]
    vision = {**tiny.hf_config["vision_config"], "hidden_size": 96, "intermediate_size": 192}
    limits = {name: 28 * 28 * 256 for name in ("max_pixels", "video_max_pixels")}
    case: Case = replace(
        tiny, hf_config={**tiny.hf_config, "vision_config": vision},
        media={**tiny.media, **limits, "video_max_frames": 16}, samples=samples,
    )  # fmt: skip
    rows = [case.sample(k) for k in range(len(samples))]
    assert all(int(row.input_ids.max()) >= FIRST_TEXT_ID for row in rows)
    inputs = [{**case.hf_inputs(row), "labels": row.labels[None]} for row in rows]
    return case.plain(), inputs, [len(row.input_ids) for row in rows]


def images() -> tuple[torch.nn.Module, Sequence[Any], Sequence[int]]:
    sides = np.clip(np.random.default_rng(0).lognormal(5.0, 0.6, (NUM_SAMPLES, 2)), 28, 560).astype(int).tolist()
    return media([[("image", width, height, 1, 0.0)] for width, height in sides])


def mixed_video() -> tuple[torch.nn.Module, Sequence[Any], Sequence[int]]:
    """One in four a video, one in four a text alone."""
    rng = np.random.default_rng(0)
    samples: list[list[Media]] = []
    for number in range(NUM_SAMPLES):
        width, height = (int(x) for x in rng.integers(56, 280, 2))
        frames = int(rng.integers(4, 16))
        of_kind = ([], [("image", width, height, 1, 0.0)], [("image", height, width, 1, 0.0)])
        samples.append(list(of_kind[number % 4]) if number % 4 < 3 else [("video", width, height, frames, frames / 2)])
    return media(samples)


def one_by_one(model: torch.nn.Module, rows: Sequence[Any]) -> torch.Tensor:
    """Costs what a collator does that does not pad."""
    total = torch.zeros(())
    for row in rows:
        total = total + model(**row).loss
    return total


KINDS = {
    "texts with a tail, padded": Kind(texts, padded_loss, True),
    "texts with a tail, padding-free": Kind(texts, flattened_loss, False),
    "images": Kind(images, one_by_one, False),
    "texts, images and videos": Kind(mixed_video, one_by_one, False),
}


def costs_by_trial(model: torch.nn.Module, kind: Kind, rows: Sequence[Any], tokens: Sequence[int]) -> SampleCosts:
    """Least processor time of two trials of every sample alone; the least of all samples is a microbatch's own."""
    found = np.array([min(_took(model, kind, [row]) for _ in range(2)) for row in rows])
    lowest = float(found.min())
    return sample_costs(
        tokens, np.maximum(found - lowest, 0.02 * lowest).tolist(), fixed=0.0 if kind.padded else lowest
    )


def _took(model: torch.nn.Module, kind: Kind, rows: Sequence[Any]) -> float:
    begun = time.thread_time()
    kind.loss(model, rows).backward()
    return time.thread_time() - begun


def worker(rank: int, _folder: Path, num_rounds: int) -> dict[str, Any]:
    """By kind of data: what was estimated, and by order this rank's seconds of each step, the least of all rounds."""
    torch.set_num_threads(1)
    setting, found = Setting(NUM_RANKS, BATCH, SLOTS), {}
    for name, kind in KINDS.items():
        torch.manual_seed(0)
        model, rows, tokens = kind.make()
        _took(model, kind, rows[:2])  # first uses are slower
        shared: list[Any] = [costs_by_trial(model, kind, rows, tokens) if rank == 0 else None]
        dist.broadcast_object_list(shared)
        costs, of_kind = shared[0], replace(setting, padded=kind.padded)
        deals = deals_of(costs, of_kind, max_steps=NUM_SAMPLES)
        estimated = [waiting_of(order, steps, costs, of_kind) for order, steps in deals.items()]
        taken_s = {order: [float("inf")] * len(steps) for order, steps in deals.items()}
        for number in range(num_rounds):  # none of them always first
            names = list(deals)
            turn = number % len(names)
            for order in names[turn:] + names[:turn]:
                of_round = steps_s(model, kind, rows, deals[order], rank)
                taken_s[order] = [min(pair) for pair in zip(taken_s[order], of_round, strict=True)]
        costs_of = {of.order: of.step_cost for of in estimated}
        found[name] = {"verdict": verdict(estimated), "estimated": costs_of, "steps_s": taken_s}
    return found


def steps_s(model: torch.nn.Module, kind: Kind, rows: Sequence[Any], steps: Sequence[Dealt], rank: int) -> list[float]:
    """Processor time of a rank in each step of an epoch."""
    found = []
    for samples, slot, of_rank, num_slots in steps:
        mine = 0.0
        for k in range(num_slots):
            batch = [rows[i] for i in samples[(slot == k) & (of_rank == rank)]]
            mine += _took(model, kind, batch) if batch else 0.0
        sums = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(sums[: 2**16])
        model.zero_grad()
        found.append(mine)
    return found


def merged(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ranks found, with the seconds of an epoch of every order, each step as long as its slower rank's."""
    found = {}
    for name, of_kind in of_ranks[0].items():
        steps = {
            order: zip(*(of[name]["steps_s"][order] for of in of_ranks), strict=True) for order in of_kind["steps_s"]
        }
        epoch_s = {order: sum(map(max, of)) for order, of in steps.items()}
        found[name] = {"verdict": of_kind["verdict"], "estimated": of_kind["estimated"], "epoch_s": epoch_s}
    return found


def judged(of_kind: Mapping[str, Any]) -> tuple[str, dict[str, float], bool]:
    """(order that the verdict names, time of each over that one's, whether none is much faster)."""
    least, said = of_kind["epoch_s"], of_kind["verdict"]
    window = next(order for order in least if order.startswith(WINDOW))
    named = GROUPED if said.startswith("Keep group_by_length") else OURS
    others = [order for order in least if order != window]
    over = {order: least[order] / least[named] for order in least}
    is_right = min(over[order] for order in others) >= 1 / (1 + FASTER_FRAC)
    if window in said:  # named as faster still
        is_right &= over[window] <= 1 + FASTER_FRAC
    return named, over, is_right


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`verdicts`: what was said, and what was measured."""
    rows = []
    for name, of_kind in content["kinds"].items():
        named, over, is_right = judged(of_kind)
        measured = ", ".join(f"{order} {ratio(value)}" for order, value in over.items() if order != named)
        rows.append((name, of_kind["verdict"], measured, "yes" if is_right else "no"))
    head = ("data", "verdict", "measured: time over that of the order it names", "right")
    return {"verdicts": table(head, rows)}


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    become_a_job("tests.bench.verdicts", OMP_NUM_THREADS="1")
    keep_to(2)
    found = {"kinds": merged(in_ranks(worker, NUM_RANKS, given.rounds))}
    print(tables(found)["verdicts"])
    bounds = [(name, judged(of)[-1]) for name, of in found["kinds"].items()]
    conclude(found, bounds, given.json, "transformers", "torch")
