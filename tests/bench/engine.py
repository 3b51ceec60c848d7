"""The engine against plain Hugging Face: `python -m tests.bench.engine [--sizes TABLE] [--json FILE]`.

Two processes, a core each, gloo between them; a small Qwen2.5-Omni thinker trains global batches of real shapes.
Measured is the step time of Hugging Face alone in two data-parallel processes over that of the engine (inline dp2, and
vision | llm, in arrival order and scheduled); all take the same arrays, made beforehand, and a step each in turn.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from dflop.cost.model import CostModel, Floats
from dflop.models.build import IGNORE_LABEL
from dflop.records import LLM, Plan, SampleShape, StepPlan
from dflop.schedule.step_scheduler import schedule_step
from tests.bench import ranks
from tests.bench.command import become_a_job, in_ranks, options
from tests.bench.figures import conclude
from tests.bench.instances import small_batch
from tests.bench.markdown import percent, ratio, table
from tests.train.synthetic import hf_inputs, make_inline_plan, make_plan

MODEL = "omni"
NUM_RANKS, NUM_BATCHES, NUM_SAMPLES, NUM_MICROBATCHES, NUM_ROUNDS = 2, 5, 16, 8, 3
BUDGET_S, NUM_PROBED, MAX_SAMPLES, PROFILE_SEED = 20.0, 80, 6, 1 << 20
"""Of the probes that the scheduler's costs come from."""
MAX_LOSS_ERROR = 1e-4
NUM_SIDE_BY_SIDE = {"plain, 4 padded samples at a time": 4, "plain, one sample at a time": 1}
LAYOUTS = {"inline dp2": "inline, two replicas", "vision | llm": "vision and LLM on their own"}
ROWS = (
    ("plain, 4 padded samples at a time", "balanced", "plain data parallel, 4 padded samples at a time / dflop"),
    ("plain, one sample at a time", "balanced", "plain data parallel, one sample at a time / dflop"),
    ("plain, one sample at a time", "arrival", "plain, one at a time / the engine in arrival order"),
)


Batches = Sequence[Sequence[SampleShape]]
Plans = Mapping[str, tuple[Plan, tuple[StepPlan, ...]]]
"""Of the engine, by name."""


def padded(shapes: Sequence[SampleShape]) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of Hugging Face's own forward for samples side by side, padded to the longest, and labels."""
    source = ranks.MadeUpSource(MODEL, shapes)
    samples = [source.tokens(s.sample_index) for s in shapes]
    alone = [hf_inputs(source, shape, sample) for shape, sample in zip(shapes, samples, strict=True)]
    texts = ("input_ids", "attention_mask")
    inputs = {name: pad_sequence([of[name][0] for of in alone], batch_first=True) for name in texts}
    for name in {name for of in alone for name in of} - {*texts, "use_cache"}:
        inputs[name] = torch.cat([of[name] for of in alone if name in of])
    labels = [torch.from_numpy(sample.labels) for sample in samples]
    return inputs | {"use_cache": False}, pad_sequence(labels, batch_first=True, padding_value=IGNORE_LABEL)


class PlainReplica:
    """One data-parallel process with the whole model as Hugging Face has it, its own attention included.

    Samples are dealt out in turn, as a distributed sampler does, and trained a few at a time, padded to the longest.
    """

    def __init__(self, batches: Batches, num_side_by_side: int) -> None:
        ours, n = ranks.build(MODEL), num_side_by_side
        self._model = type(ours)._from_config(
            copy.deepcopy(ours.config), attn_implementation="sdpa", dtype=torch.float32
        )
        self._model.load_state_dict(ours.state_dict())
        self._model.train()
        own = [batch[dist.get_rank() :: NUM_RANKS] for batch in batches]
        self._inputs = [[padded(of[i : i + n]) for i in range(0, len(of), n)] for of in own]
        self._num_tokens = [sum(s.num_supervised_tokens for s in batch) for batch in batches]
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=ranks.LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )

    def train(self, index: int) -> float:
        loss = 0.0
        for inputs, labels in self._inputs[index]:
            logits = self._model(**inputs).logits
            share = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_LABEL, reduction="sum"
            )
            share = share / self._num_tokens[index]
            share.backward()
            loss += float(share.detach())
        # One flat sum: on a CPU that computes on all its cores there is nothing to hide buckets behind.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for p, part in zip(self._parameters, flat.split([g.numel() for g in gradients]), strict=True):
            p.grad = part.view_as(p)
        nn.utils.clip_grad_norm_(self._parameters, ranks.MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss


def make_plans(batches: Batches, cost: CostModel, num_microbatches: int) -> Plans:
    """Both layouts, each in arrival order and scheduled; a replica has half of the microbatches."""
    family = ranks.family_of(MODEL)
    depth = {s.module: s.num_layers for s in family.specs() if s.module in ("vision", LLM)}
    inline = make_inline_plan([depth], dp=NUM_RANKS, num_microbatches=num_microbatches // NUM_RANKS)
    split = make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=num_microbatches, of=family)
    found = {}
    for layout, plan in zip(LAYOUTS, (inline, split), strict=True):
        for policy in ("arrival", "balanced"):
            found[f"engine, {layout}, {policy}"] = (
                plan,
                tuple(
                    schedule_step(run_id="bench", step=n, plan=plan, batch=batch, cost=cost, policy=policy)
                    for n, batch in enumerate(batches)
                ),
            )
    return found


def race(
    rank: int, folder: Path, batches: Batches, plans: Plans, num_rounds: int
) -> list[list[dict[str, tuple[float, float]]]]:
    """`[round][batch]` wall seconds and loss of every contender; round 0 is an uncounted one."""
    ranks.take_core(rank)
    contenders: dict[str, Any] = {n: PlainReplica(batches, k) for n, k in NUM_SIDE_BY_SIDE.items()}
    contenders |= {name: ranks.EngineRank(rank, MODEL, plan, steps, batches) for name, (plan, steps) in plans.items()}
    names, rounds = list(contenders), []
    for round_number in range(num_rounds + 1):
        rounds.append([])
        for batch in range(len(batches)):
            first = (round_number + batch) % len(names)
            order = (*names[first:], *names[:first])
            rounds[-1].append({name: _step(contenders[name], batch) for name in order})
    return rounds


def _step(contender: Any, batch: int) -> tuple[float, float]:
    """Wall seconds until all processes are done, and this one's share of the loss."""
    dist.barrier()
    began_s = time.perf_counter()
    loss = contender.train(batch)
    dist.barrier()
    return time.perf_counter() - began_s, loss


def race_figures(by_rank: Sequence[Any], plans: Plans) -> tuple[dict[str, Any], list[tuple[str, bool]]]:
    """Step times and ratios from what `race` returned on every rank; bounds: all compute the same loss."""
    seen = {name: np.array([[[b[name] for b in r] for r in rank] for rank in by_rank]) for name in by_rank[0][0][0]}
    wall_s: dict[str, Floats] = {name: of[:, 1:, :, 0].max(axis=0) for name, of in seen.items()}  # [round, batch]
    losses = {name: float(of[:, 0, 0, 1].sum()) for name, of in seen.items()}
    expected = next(iter(losses.values()))
    bounds = [
        (f"{name}: loss {loss:.6f} of {expected:.6f}", abs(loss - expected) <= MAX_LOSS_ERROR * abs(expected))
        for name, loss in losses.items()
    ]
    ratios = []
    for name in plans:
        for plain in NUM_SIDE_BY_SIDE:
            of = wall_s[plain] / wall_s[name]
            of_batch = np.median(of, axis=0)
            wall = float(np.exp(np.log(of_batch).mean()))
            noise_frac = float(np.median(np.ptp(of, axis=0) / 2 / of_batch))
            ratios.append({"slower": plain, "faster": name, "wall": wall, "noise_frac": noise_frac})
            print(f"  {plain} / {name}: {wall:.3f}, noise {noise_frac:.0%}")
    return {"step_s": {n: np.median(s, axis=0).mean() for n, s in wall_s.items()}, "ratios": ratios}, bounds


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=Path, help="Parquet table of real sample sizes; generated rows without")
    args = parser.parse_args()
    become_a_job("tests.bench.engine", OMP_NUM_THREADS="1")
    family, size = ranks.family_of(MODEL), NUM_SAMPLES
    batches = [small_batch(family, size, n, args.sizes, first_index=n * size) for n in range(NUM_BATCHES)]
    # Two models, so that both cores are as busy as in training.
    shapes = {m: small_batch(ranks.family_of(m), NUM_PROBED, PROFILE_SEED, None) for m in (MODEL, "equal")}
    plans = make_plans(batches, ranks.costs_of(shapes, BUDGET_S, MAX_SAMPLES)[MODEL], NUM_MICROBATCHES)
    print("step time, plain Hugging Face / engine")
    found, bounds = race_figures(in_ranks(race, NUM_RANKS, batches, plans, NUM_ROUNDS), plans)
    rows = "drawn from a table of real sizes, media made up" if args.sizes else "generated, media made up"
    told = {"num_batches": NUM_BATCHES, "num_samples": NUM_SAMPLES, "num_rounds": NUM_ROUNDS}
    conclude({"samples": rows, "size": told, "race": found}, bounds, args.json, "torch", "transformers")


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`engine`: the race."""
    wall = {(r["slower"], r["faster"]): r["wall"] for r in content["race"]["ratios"]}
    rows = [
        (name, *(ratio(wall[plain, f"engine, {layout}, {policy}"]) for layout in LAYOUTS))
        for plain, policy, name in ROWS
    ]
    head = ("step time of plain Hugging Face / engine", *LAYOUTS.values())
    size = content["size"]
    noise = [r["noise_frac"] for r in content["race"]["ratios"]]
    told = (
        f"Samples: {content['samples']}; "
        f"{size['num_rounds']} rounds of {size['num_batches']} global batches of {size['num_samples']} samples in "
        f"turn; noise of a ratio is {percent(min(noise))} to {percent(max(noise))}."
    )
    return {"engine": f"{table(head, rows)}\n\n{told}"}


if __name__ == "__main__":
    main()
