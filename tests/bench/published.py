"""Published trainings of language models against data sheets: `python -m tests.bench.published [TABLE ...]`.

The seconds of a token are linear in what is fitted: matmuls and attention of each class of devices, moved bytes of
eager and of compiled programs, and the gathers and scatters of sharded weights. The rest is as the planner has it:
cross entropy, optimizer, and messages of tensor parallelism, exposed in full at the rate of collectives. A pipeline
runs one forward, one backward; its last stage has the head. Rows may have a vision tower, adapters, experts, and ranks
that share sequences or experts, priced as plans are; none of the tables' has, for none was published. Printed are
predicted and measured tokens/s/GPU, how far they are apart by kind of run and by laboratory, by a fit that saw none of
the laboratory's runs, too, and as choices between layouts.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from dflop.cost.analytic import LINK_FRAC, OPTIMIZER_FRAC
from dflop.cost.curve import Floats
from dflop.cost.devices import A100, H100, Device
from dflop.cost.expert_parallel import exchange_seconds, slower_frac
from dflop.cost.float8 import RECIPES, Passes, float8_seconds
from dflop.cost.link_costs import ALL_GATHER, ALL_REDUCE, moved_frac
from dflop.cost.roofline import BYTES_PER_VALUE, COMPILED, EAGER, LOGIT_BYTES, layer_work
from dflop.records import FP8_OFF, ModuleSpec
from dflop.report.rows import print_rows
from dflop.simulate.step import EXPOSED_FRAC
from tests.bench.published_checks import check_lines
from tests.bench.published_runs import (
    EXCHANGES,
    LATER,
    OPTIMIZER_BYTES,
    RECOMPUTED,
    SHARDED,
    SHARED_OPTIMIZER,
    TABLE,
    PublicRun,
    read_runs,
)

SCATTER_BYTES = 4
"""Per parameter: gradients are summed in float32."""
FLASH_1_FRACS = {A100: 0.317, H100: 0.184}
"""Of the peak, in attention of 2023, by the device whose fractions a class has."""
NOISE_FRAC, PRIOR_FRAC = 0.05, 0.15
"""How far runs are from any formula, and constants from what is known of them elsewhere; a fit weighs one against the
other, and a constant that no run of a laboratory's rivals shows stays what it was."""
PRIORS: Mapping[str, float] = {
    "matmul A100": 1 / 0.85, "matmul H100": 1 / 0.75,  # large matmuls by cuBLAS; an H200 did 0.69 to 0.78 (measured.md)
    # Forward: 25 to 40 % and 50 to 73 % on A100 (arXiv 2307.08691), 35 % on H100 (2407.08608); flash-1 there in ratio.
    "flash-1 A100": 1 / 0.32, "flash-2 A100": 1 / 0.5, "flash-1 H100": 1 / 0.18, "flash-2 H100": 1 / 0.35,
    # Counted: eager norms 2 x 24.5, as measured, positions 8, residuals 6, a gated MLP 13; fused, each is moved once.
    "eager": 76.0, "compiled": 40.0,
    "exposed": 0.8,
}  # fmt: skip
"""What multiplies `Parts`, by name: one over fractions of a sheet's peak, `Program.moves`, `EXPOSED_FRAC` at such a
sheet's rate."""


class Parts(NamedTuple):
    """GPU-seconds that a run takes per token: what the fitted constants scale, and the rest."""

    matmul_s: float
    """At the peak of the data sheet."""
    attention_s: float
    """At the same peak."""
    hidden_s: float
    """Moving the hidden state of every layer and pass once, at the sheet's rate."""
    sharding_s: float
    """Gathering parameters and scattering gradients, at the sheet's rate."""
    rest_s: float


def parts_of(run: PublicRun) -> Parts:
    """What one token of a run takes."""
    sheet, spec, exchange, again = run.sheet, run.spec, EXCHANGES[run.tp_exchange], RECOMPUTED[run.recompute]
    num_tokens, passes = (
        run.micro_batch * run.seq_len / run.cp,
        Passes(1.0 + again.matmul, 1.0, float(not run.lora_rank)),
    )
    once = layer_work(spec, run.tp)
    work = once + once.times(
        passes.of_rows + passes.of_weights + again.matmul, 2.5 + again.attention, 2.0 + again.moved
    )
    slower = 1 + slower_frac(spec) * (run.ep > 1)
    # A stage waits for the first microbatch and after its last; only the last stage has the head.
    layers = spec.num_layers * run.tp * (1 + (run.pp - 1) / run.grad_accum)
    heads, whole = run.pp, 1.0
    if not exchange.has_sequence_parallelism:
        heads, whole = run.pp * run.tp, float(run.tp)
    message_s = _messages_s(run, spec)
    num_trained = run.num_adapter_params or spec.num_params
    if run.vision is not None and run.vision_trains == "yes":
        num_trained += run.vision.num_params
    shares = run.gpus // (run.tp * run.pp) if run.sharding in SHARED_OPTIMIZER + SHARDED else 1
    optimizer_s = OPTIMIZER_BYTES[run.optimizer] * num_trained / shares
    optimizer_s /= OPTIMIZER_FRAC * sheet.memory_bytes_per_s * num_tokens * run.grad_accum
    if run.fp8 != FP8_OFF:
        token_s, microbatch_s = float8_seconds(spec, run.tp, sheet, run.program, RECIPES[run.fp8], passes)
        message_s += token_s + microbatch_s / num_tokens
    of_head = (2.0 + passes.of_rows * 2 + passes.of_weights * 2) * spec.vocab_size * run.hidden
    of_adapters = 6.0 * run.num_adapter_params * spec.mean(lambda kind: kind.num_used_params / kind.num_params)
    matmul, attention, hidden = _vision_work(run)
    return Parts(
        matmul_s=(layers * slower * work.matmul_flops + heads * of_head + of_adapters + matmul) / sheet.peak_bf16_flops,
        attention_s=(layers * work.attention_flops * run.seq_len + attention) / sheet.peak_bf16_flops,
        hidden_s=(whole * layers * work.hidden_bytes + hidden) / sheet.memory_bytes_per_s,
        sharding_s=_sharding_s(run, spec, num_trained) / num_tokens,
        rest_s=heads * LOGIT_BYTES * run.vocab / sheet.memory_bytes_per_s + layers * message_s + optimizer_s,
    )


def _messages_s(run: PublicRun, spec: ModuleSpec) -> float:
    """Seconds of a layer and token in messages of tensor, context and expert parallelism."""
    exchange, num_again = EXCHANGES[run.tp_exchange], float(run.recompute == "full")
    halves = exchange.forward + exchange.backward + exchange.again.get(run.recompute, 0)
    num_bytes = exchange.exposed_frac * halves * moved_frac(ALL_GATHER, run.tp) * BYTES_PER_VALUE * run.hidden
    found = num_bytes / (LINK_FRAC * _node_rate(run, run.tp))
    # A rank is sent keys and values of what the others have of its sequence, and sends gradients back.
    of_sequence = (2 + num_again) * 2 * BYTES_PER_VALUE * spec.key_width / run.tp * (run.cp - 1)
    found += of_sequence / (LINK_FRAC * _node_rate(run, run.cp))
    line = 0.0, 1 / (LINK_FRAC * _node_rate(run, run.ep))
    return found + (2 + num_again) * float(exchange_seconds(spec, run.ep, np.ones(()), line, BYTES_PER_VALUE)) / run.tp


def _vision_work(run: PublicRun) -> tuple[float, float, float]:
    """(matmul FLOPs, attention FLOPs, hidden bytes) of a tower per token of the LLM, on all ranks of a replica."""
    if run.vision is None:
        return 0.0, 0.0, 0.0
    once, trains = layer_work(run.vision), float(run.vision_trains == "yes")
    work = once + once.times(2.0 * trains, 2.5 * trains, 2.0 * trains)
    # The other stages wait for it, and tensor-parallel ranks all run it.
    tokens = run.vision_tokens / run.seq_len * run.vision.num_layers * run.tp * run.pp
    return (
        tokens * work.matmul_flops,
        tokens * work.attention_flops * run.vision_item_tokens,
        tokens * work.hidden_bytes,
    )


def _sharding_s(run: PublicRun, spec: ModuleSpec, num_trained: int) -> float:
    """GPU-seconds of the messages of replicas per microbatch, at the sheet's rates.

    Under a pipeline every microbatch of a stage gathers, too, and stages wait for one another. All of the model is
    gathered, but for experts of other ranks, and gradients are those of what trains.
    """
    num_experts = sum(n * kind.num_expert_params for kind, n in spec.layers)
    of_vision = 0 if run.vision is None else run.vision.num_params
    num_params = spec.num_params - num_experts * (1 - 1 / run.ep) + of_vision
    share = num_trained / (spec.num_params + of_vision)
    replicas, passes = run.gpus // (run.tp * run.pp), 1 + (run.pp - 1) / run.grad_accum
    gathers, scatters = 2 * BYTES_PER_VALUE * passes, SCATTER_BYTES * passes
    group, rate, summed_s = replicas, _replica_rate(run), 0.0
    if run.scatter == "step":
        scatters = SCATTER_BYTES / run.grad_accum
    if run.sharding == "hsdp":
        group, rate, nodes = run.gpus_per_node, run.sheet.nvlink_bytes_per_s, run.gpus // run.gpus_per_node
        summed_s = SCATTER_BYTES * moved_frac(ALL_REDUCE, nodes) / run.gpus_per_node / run.sheet.network_bytes_per_s
    elif run.sharding not in SHARDED:
        gathers, scatters = BYTES_PER_VALUE / run.grad_accum, SCATTER_BYTES / run.grad_accum
        if run.sharding not in SHARED_OPTIMIZER:
            gathers = SCATTER_BYTES / run.grad_accum
    gathers *= 1.0 if run.sharding in SHARDED else share
    sent_s = (gathers + share * scatters) * moved_frac(ALL_GATHER, group) / rate
    return num_params * (sent_s + share * summed_s / run.grad_accum)


def _node_rate(run: PublicRun, num_ranks: int) -> float:
    """Bytes per second of ranks in a node; four GPUs have no switch, and a third of the links between any two."""
    rate = run.sheet.nvlink_bytes_per_s
    return rate * (min(num_ranks, 4) - 1) / 3 if run.gpus_per_node == 4 and num_ranks > 1 else rate


def _replica_rate(run: PublicRun) -> float:
    """As `_node_rate`, of replicas; over nodes, of the adapters of those in one."""
    if run.gpus <= run.gpus_per_node:
        return _node_rate(run, run.gpus // (run.tp * run.pp))
    return min(run.sheet.nvlink_bytes_per_s, run.sheet.network_bytes_per_s * max(1, run.gpus_per_node // run.tp))


def names_of(run: PublicRun) -> tuple[str, ...]:
    """The constants that multiply `Parts`; the last part is multiplied by none."""
    of = _class_of(run.sheet)
    return f"matmul {of}", f"{run.kernels} {of}", run.program.name, "exposed"


def _class_of(sheet: Device) -> str:
    """Of devices with the same fractions of their peaks."""
    return "A100" if sheet.accuracy == A100.accuracy else "H100"


def package_constants() -> dict[str, float]:
    """Those that plans are made with, and of this file."""
    found = {"exposed": EXPOSED_FRAC / LINK_FRAC} | {program.name: program.moves for program in (EAGER, COMPILED)}
    for sheet, flash_1_frac in FLASH_1_FRACS.items():
        of = _class_of(sheet)
        found |= {f"matmul {of}": 1 / sheet.matmul_frac, f"flash-2 {of}": 1 / sheet.attention_frac}
        found[f"flash-1 {of}"] = 1 / flash_1_frac
    return found


def seconds_of(run: PublicRun, constants: Mapping[str, float] | None = None) -> float:
    """Predicted for a token on one GPU, by constants as of `fit_runs`; None: those of the package."""
    known, parts = constants or package_constants(), parts_of(run)
    return parts.rest_s + sum(known[name] * part for name, part in zip(names_of(run), parts, strict=False))


def error_fracs(runs: Iterable[PublicRun], constants: Mapping[str, float] | None = None) -> Floats:
    """Predicted over published seconds of a token, less one."""
    return np.array([seconds_of(run, constants) * run.tokens_per_s_per_gpu - 1 for run in runs])


def fit_runs(runs: Sequence[PublicRun]) -> dict[str, float]:
    """The constants that published runs and `PRIORS` ask for, by name.

    Least squares on relative errors; those beyond `NOISE_FRAC` pull less than squared.
    """
    names, start = list(PRIORS), np.array(list(PRIORS.values()))
    features, rest = np.zeros((len(runs), len(names))), np.zeros(len(runs))
    for i, run in enumerate(runs):
        *scaled, rest_s = parts_of(run)
        rest[i] = rest_s * run.tokens_per_s_per_gpu - 1
        for name, part in zip(names_of(run), scaled, strict=True):
            features[i, names.index(name)] = part * run.tokens_per_s_per_gpu
    weight = NOISE_FRAC / PRIOR_FRAC

    def residuals(x: Floats) -> Floats:
        return np.concatenate([features @ (x * start) + rest, weight * (x - 1)])

    found = least_squares(residuals, np.ones(len(names)), bounds=(0, np.inf), loss="soft_l1", f_scale=NOISE_FRAC)
    return dict(zip(names, (found.x * start).tolist(), strict=True))


def unseen_errors(runs: Sequence[PublicRun]) -> Floats:
    """As `error_fracs`, by fits that saw no run of the laboratory."""
    fits = {lab: fit_runs([r for r in runs if r.laboratory != lab]) for lab in {run.laboratory for run in runs}}
    return np.array([seconds_of(r, fits[r.laboratory]) * r.tokens_per_s_per_gpu - 1 for r in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", type=Path, help="CSV with the columns of published.csv; else both tables")
    runs = [run for path in parser.parse_args().tables or (TABLE, LATER) for run in read_runs(path)]
    errors, unseen = error_fracs(runs), unseen_errors(runs)
    shown = ("device", "model", "seq_len", "gpus", "micro_batch", "sharding", "tp", "pp", "recompute", "compile", "fp8")
    rows = [
        (*(getattr(run, name) for name in shown), run.tokens_per_s_per_gpu, round(1 / seconds_of(run), 1), *both)
        for run, *both in zip(runs, errors.tolist(), unseen.tolist(), strict=True)
    ]
    print_rows((*shown, "published", "predicted", "seconds_error_frac", "unseen_error_frac"), rows, "table")
    print(*check_lines(runs, errors, unseen), *fit_lines(runs), sep="\n")


def fit_lines(runs: Sequence[PublicRun]) -> Iterator[str]:
    """The constants that a fit to these runs has, fractions as such."""
    for name, value in fit_runs(runs).items():
        shown = value if name in (EAGER.name, COMPILED.name, "exposed") else 1 / value
        yield f"fit: {name} {shown:.3f}"


if __name__ == "__main__":
    main()
