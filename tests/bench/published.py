"""Published trainings of language models against data sheets: `python -m tests.bench.published [TABLE]`.

A row of `published.csv` is a layout and the tokens/s/GPU that its authors measured. The seconds of a token are linear
in what is fitted: matmuls and attention of each device, moved bytes, and the gathers and scatters of sharded weights.
The rest is as the planner has it: cross entropy, optimizer, gradients of replicas, messages of tensor parallelism, and
the bubble of a pipeline. No encoder has been published this way. Printed are predicted and measured tokens/s/GPU, how
far they are apart by kind of run, by laboratory and as choices between layouts, and a fit to them. The rows of
`published_2026.csv` are of 2024 to 2026, and no constant was fitted to them.
"""

import argparse
import csv
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dflop.cost.analytic import LINK_FRAC, OPTIMIZER_BYTES_PER_PARAM, OPTIMIZER_FRAC
from dflop.cost.curve import Floats
from dflop.cost.devices import Device, find_device
from dflop.cost.link_costs import ALL_GATHER, ALL_REDUCE, moved_frac
from dflop.cost.regression import robust_nnls
from dflop.cost.roofline import BYTES_PER_VALUE, EXPOSED_FRAC, LOGIT_BYTES, TRAFFIC, backward_work, layer_work
from dflop.cost.tensor_parallel import LAYER_ALL_REDUCES
from dflop.errors import CostError, did_you_mean
from dflop.records import LLM, LayerKind, ModuleSpec
from dflop.report.rows import print_rows
from tests.bench.published_checks import check_lines

TABLE = Path(__file__).with_name("published.csv")
UNSEEN = TABLE.with_name("published_2026.csv")
"""Runs that no constant was fitted to."""
GRADIENT_BYTES = 4
RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}
"""Part of the forward pass that runs again; what is selected differs from one framework to the next."""
MATRICES = {"gelu-2-matrices": 2, "swiglu": 3}
REPLICATED, SHARED_OPTIMIZER = ("none", "ddp"), ("zero1", "zero2", "distributed-optimizer")
SHARDED = ("fsdp", "fsdp2", "hsdp", "zero3")
WORDS: dict[str, Collection[str]] = {
    "mlp": MATRICES,
    "recompute": RECOMPUTED,
    "embeddings": ("tied", "untied"),
    "sharding": (*REPLICATED, *SHARED_OPTIMIZER, *SHARDED),
}
"""Values of the columns that hold words."""


@dataclass(frozen=True, slots=True)
class PublicRun:
    """One row; field names are the columns."""

    source: str
    device: str
    model: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    mlp: str
    vocab: int
    embeddings: str
    seq_len: int
    gpus: int
    micro_batch: int
    grad_accum: int
    sharding: str
    tp: int
    pp: int
    recompute: str
    compile: str
    tokens_per_s_per_gpu: float

    @property
    def sheet(self) -> Device:
        """Data sheet of its device."""
        return find_device(self.device)

    @property
    def spec(self) -> ModuleSpec:
        """The model as the planner sees it; norms and biases are noise here."""
        is_tied = self.embeddings == "tied"
        kv_frac = self.kv_heads / self.heads
        layer = 2 * self.hidden**2 * (1 + kv_frac) + MATRICES[self.mlp] * self.hidden * self.intermediate
        kind = LayerKind(
            "attention",
            num_params=round(layer),
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            mlp_width=self.intermediate,
            num_mlp_tensors=2 if self.mlp == "swiglu" else 1,
            is_gated_mlp=self.mlp == "swiglu",
            num_norm_values=4 * self.hidden,
        )
        return ModuleSpec(
            module=LLM,
            layers=((kind, self.layers),),
            hidden_size=self.hidden,
            num_edge_params=self.vocab * self.hidden * (1 if is_tied else 2),
            max_pp=self.layers,
            tp_choices=(self.tp,),
            vocab_size=self.vocab,
            is_tied=is_tied,
        )


def read_runs(path: Path = TABLE) -> list[PublicRun]:
    """Rows of a table of published runs.

    Raises:
        CostError: a column or a value is missing or not of its kind; the file and the line are named.
        OSError: the file cannot be read.
    """
    kinds = {f.name: f.type for f in fields(PublicRun)}
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        missing = sorted(set(kinds) - set(lines.fieldnames or ()))
        if missing:
            raise CostError(f"no column `{missing[0]}`", where=str(path), hint=f"columns: {', '.join(kinds)}")
        runs = []
        for line in lines:
            try:
                run = PublicRun(**{name: kind(line[name]) for name, kind in kinds.items()})
            except (TypeError, ValueError) as error:
                raise CostError(str(error), where=f"{path}:{lines.line_num}") from error
            _check(run, f"{path}:{lines.line_num}")
            runs.append(run)
    return runs


def _check(run: PublicRun, where: str) -> None:
    for name, valid in WORDS.items():
        if (word := getattr(run, name)) not in valid:
            raise CostError(f"{name} `{word}`", where=where, hint=did_you_mean(word, valid))
    numbers = {f.name: getattr(run, f.name) for f in fields(run) if f.type is not str}
    if wrong := [f"{name} {value:g}" for name, value in numbers.items() if not 0 < value < math.inf]:
        raise CostError(f"{', '.join(wrong)}: must be positive", where=where)
    if run.gpus % (run.tp * run.pp):
        raise CostError(f"{run.gpus} gpus are not whole replicas of tp {run.tp} pp {run.pp}", where=where)


class Parts(NamedTuple):
    """GPU-seconds that a run takes per token: what the fitted constants scale, and the rest."""

    matmul_s: float
    """At the peak of the data sheet."""
    attention_s: float
    """At the same peak."""
    hidden_s: float
    """Moving the hidden state of every layer and pass once, at the sheet's rate."""
    sharding_s: float
    """Gathering parameters for both passes and scattering gradients, at the sheet's rate."""
    rest_s: float


def parts_of(run: PublicRun) -> Parts:
    """What one token of a run takes."""
    sheet, spec = run.sheet, run.spec
    group = run.tp * run.pp
    replicas, num_tokens = run.gpus // group, run.micro_batch * run.seq_len
    rate = sheet.nvlink_bytes_per_s if run.gpus <= sheet.num_per_node else sheet.network_bytes_per_s
    params = spec.num_params
    again = RECOMPUTED[run.recompute]
    once = layer_work(spec, run.tp)
    work = once + backward_work(once, recomputed_frac=again)
    bubble = 1 + (run.pp - 1) / run.grad_accum
    layers = spec.num_layers * run.tp * bubble
    head_flops = 6.0 * spec.vocab_size * spec.hidden_size * bubble
    messages = (2 + again) * LAYER_ALL_REDUCES * moved_frac(ALL_REDUCE, run.tp) * BYTES_PER_VALUE * spec.hidden_size
    is_sharded = run.sharding in SHARDED
    shares = 1 if run.sharding in REPLICATED else replicas
    synced = 0.0 if is_sharded else GRADIENT_BYTES * moved_frac(ALL_REDUCE, replicas) * params
    per_step_s = synced / (LINK_FRAC * rate) + OPTIMIZER_BYTES_PER_PARAM * params / shares / (
        OPTIMIZER_FRAC * sheet.memory_bytes_per_s
    )
    gathered = 3 * BYTES_PER_VALUE * params * moved_frac(ALL_GATHER, replicas) if is_sharded else 0.0
    return Parts(
        matmul_s=(layers * work.matmul_flops + head_flops) / sheet.peak_bf16_flops,
        attention_s=layers * work.attention_flops * run.seq_len / sheet.peak_bf16_flops,
        hidden_s=layers * work.hidden_bytes / sheet.memory_bytes_per_s,
        sharding_s=gathered / rate / num_tokens,
        rest_s=LOGIT_BYTES * spec.vocab_size / sheet.memory_bytes_per_s
        + layers * messages / (LINK_FRAC * sheet.nvlink_bytes_per_s)
        + per_step_s / (num_tokens * run.grad_accum),
    )


def constants_of(sheet: Device) -> Floats:
    """What multiplies `Parts`: one over each fraction of a sheet's peak, `TRAFFIC`, `EXPOSED_FRAC`, and 1."""
    return np.array([1 / sheet.matmul_frac, 1 / sheet.published_attention_frac, TRAFFIC, EXPOSED_FRAC, 1.0])


def seconds_of(run: PublicRun, constants: Floats | None = None) -> float:
    """Predicted for a token on one GPU, by constants as of `fit_runs`; None: those of the package."""
    return float(np.dot(parts_of(run), constants_of(run.sheet) if constants is None else constants))


def error_fracs(runs: Iterable[PublicRun]) -> Floats:
    """Predicted over published seconds of a token, less one."""
    return np.array([seconds_of(run) * run.tokens_per_s_per_gpu - 1 for run in runs])


def fit_runs(runs: Sequence[PublicRun]) -> dict[str, Floats]:
    """The constants that published runs ask for, by name of data sheet and as those of `constants_of`.

    Least squares on relative errors of the seconds of a token; no constant is negative.
    """
    devices = sorted({run.sheet.name for run in runs})
    parts = [parts_of(run) for run in runs]
    features = np.zeros((len(runs), 2 * len(devices) + 2))
    for row, run, found in zip(features, runs, parts, strict=True):
        column = 2 * devices.index(run.sheet.name)
        row[column : column + 2], row[-2:] = found[:2], found[2:4]
    seconds = [1 / run.tokens_per_s_per_gpu - found.rest_s for run, found in zip(runs, parts, strict=True)]
    fitted = robust_nnls(features, seconds)
    return {name: np.array([*fitted[2 * i : 2 * i + 2], *fitted[-2:], 1.0]) for i, name in enumerate(devices)}


def unseen_errors(runs: Sequence[PublicRun]) -> Floats:
    """As `error_fracs`, by a fit that saw no run of its model; NaN on a device that the fit did not see."""
    nothing = np.full(len(Parts._fields), math.nan)
    fits = {name: fit_runs([run for run in runs if run.model != name]) for name in {run.model for run in runs}}
    constants = [fits[run.model].get(run.sheet.name, nothing) for run in runs]
    return np.array([seconds_of(r, c) * r.tokens_per_s_per_gpu - 1 for r, c in zip(runs, constants, strict=True)])


def summary(runs: Sequence[PublicRun]) -> Iterator[str]:
    """How far off predictions are on every device, and the constants that a fit to these runs has."""
    unseen = unseen_errors(runs) if len({run.model for run in runs}) > 1 else np.full(len(runs), math.nan)
    seen, fit = error_fracs(runs), fit_runs(runs)
    for name, constants in fit.items():
        here = [run.sheet.name == name for run in runs]
        line = f"{name}: {sum(here)} runs, error {_spread(seen[here])}"
        if not np.isnan(unseen[here]).any():
            line += f"; by a fit that saw no run of the model {_spread(unseen[here])}"
        yield line
        matmul_frac, attention_frac = (1 / x if x else math.inf for x in constants[:2])
        yield f"  fit: matmul_frac {matmul_frac:.3f}, published_attention_frac {attention_frac:.3f} (devices.py)"
    _, _, traffic, exposed_frac, _ = next(iter(fit.values()))
    yield f"  fit: TRAFFIC {traffic:.1f}, EXPOSED_FRAC {exposed_frac:.3f} (roofline.py)"


def _spread(errors: Floats) -> str:
    found = np.abs(errors)
    return f"{np.median(found):.1%} (median), {np.quantile(found, 0.9):.1%} (90 % of runs)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", nargs="?", type=Path, default=TABLE, help="CSV with the columns of published.csv")
    args = parser.parse_args()
    runs = read_runs(args.table)
    errors = error_fracs(runs).tolist()
    shown = ("device", "model", "seq_len", "gpus", "micro_batch", "sharding", "tp", "pp", "recompute")
    rows = [
        (*(getattr(run, name) for name in shown), run.tokens_per_s_per_gpu, round(1 / seconds_of(run), 1), error)
        for run, error in zip(runs, errors, strict=True)
    ]
    print_rows((*shown, "published", "predicted", "seconds_error_frac"), rows, "table")
    print(*summary(runs), *check_lines(runs, np.array(errors)), sep="\n")


if __name__ == "__main__":
    main()
