"""The values that travel round the loop, one frozen dataclass per noun.

Every value here is also a table in the store (same name in snake_case, same field names), a JSON object and a
paragraph in ARCHITECTURE.md. Fields are limited to int, float, str, bool, nested records and tuples of these, so
that one generic mapping serves Parquet, DuckDB and JSON alike. Units are in the names: `_s` seconds, `_bytes`,
`_tokens`, `_px`, `_frac` ratios in 0..1, `num_` counts.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

LLM = "llm"
"""Name of the language-model module; every other module is an encoder that feeds it."""


@dataclass(frozen=True, slots=True)
class ModuleLoad:
    """Work that some set of samples brings to one module, in the units the cost model understands."""

    num_items: int
    """Media items (encoders) or packed sequences (LLM)."""
    num_tokens: int
    """Positions the module's layers process (patches, audio frames after convolution, LLM tokens)."""
    sum_sq_tokens: int
    """Sum of squared lengths over the sequences attention runs on."""

    def __add__(self, other: ModuleLoad) -> ModuleLoad:
        return ModuleLoad(
            self.num_items + other.num_items,
            self.num_tokens + other.num_tokens,
            self.sum_sq_tokens + other.sum_sq_tokens,
        )


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or audio clip of a sample: its size as read from the header, and what it costs."""

    kind: str
    """`image`, `video` or `audio`."""
    path: str
    """Relative to the dataset's media root."""
    width_px: int
    height_px: int
    num_frames: int
    """Frames in the container (1 for an image, 0 for audio)."""
    duration_s: float
    module: str
    """Encoder module that consumes the item."""
    grid: tuple[int, int, int]
    """(temporal, height, width) patches of the encoder input; (feature frames, 0, 0) for audio."""
    num_tokens: int
    sum_sq_tokens: int
    num_rows: int
    """Rows the encoder hands to the LLM for this item, equal to its placeholder tokens."""

    @property
    def load(self) -> ModuleLoad:
        return ModuleLoad(1, self.num_tokens, self.sum_sq_tokens)


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What one sample will cost every module, known from headers and the tokenizer alone."""

    profile_key: str
    """Identity of the data profile (annotations, media root, tokenizer, family rules) the row belongs to."""
    sample_index: int
    """Row of the sample in the annotation file; with `profile_key` the identity of the sample."""
    sample_id: str
    num_text_tokens: int
    num_supervised_tokens: int
    """Tokens that carry loss; the sample's share of the global loss denominator."""
    num_llm_tokens: int
    """Text tokens plus every media row: the length of the sample's sequence in the LLM."""
    items: tuple[MediaItem, ...]

    def load(self, module: str) -> ModuleLoad:
        """Work this sample brings to `module`; zero when it has no item for it."""
        if module == LLM:
            return ModuleLoad(1, self.num_llm_tokens, self.num_llm_tokens**2)
        return sum((i.load for i in self.items if i.module == module), ModuleLoad(0, 0, 0))


@dataclass(frozen=True, slots=True)
class QuarantinedSample:
    """A sample that cannot be trained on, and why. Nothing is dropped without such a row."""

    profile_key: str
    sample_index: int
    sample_id: str
    phase: str
    """`profile` when headers gave it away, `train` when decoding did."""
    path: str
    reason: str
    run_id: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """A finished data or model profile; its presence means every row under `profile_key` is in the spool."""

    profile_key: str
    kind: str
    """`data` or `model`."""
    run_id: str
    inputs: str
    """JSON object of what the key was computed from, for people."""
    num_rows: int
    num_quarantined: int
    created_at_s: float
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module of a model: its depth, width and size, as the planner sees it."""

    module: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    num_layer_params: int
    """Parameters of one layer."""
    num_edge_params: int
    """Parameters outside the layers (embeddings, patch embedding, projector, head)."""
    max_pp: int
    """Deepest pipeline the engine can cut the module into."""
    tp_choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Where training runs: how many processes (one per device), and what each may use."""

    name: str
    backend: str
    """Launcher backend: `inline`, `local` or `slurm`."""
    num_nodes: int
    num_processes_per_node: int
    memory_per_process_bytes: int
    device: str
    """`cpu` or `cuda`."""
    num_cores_per_node: int
    """CPU cores shared by the processes of a node; bounds how many run at once when `device` is `cpu`."""

    @property
    def num_processes(self) -> int:
        return self.num_nodes * self.num_processes_per_node

    @property
    def max_concurrency(self) -> int:
        """Processes that can really compute at the same time."""
        if self.device == "cuda":
            return self.num_processes
        return self.num_nodes * min(self.num_processes_per_node, self.num_cores_per_node)


@dataclass(frozen=True, slots=True)
class ParallelSpec:
    """Tensor, pipeline and data parallel degrees of one module."""

    tp: int
    pp: int
    dp: int

    @property
    def num_processes(self) -> int:
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed probe: a module at a shallow depth on one packed group of samples."""

    profile_key: str
    module: str
    hardware: str
    software: str
    dtype: str
    tp: int
    num_layers: int
    group: str
    """How the probe's samples were drawn: `random`, `length_sorted`, `tile_sorted` or `single`."""
    num_items: int
    num_tokens: int
    sum_sq_tokens: int
    forward_s: float
    backward_s: float
    forward_spread_s: float
    """Half the interquartile range over repeats."""
    backward_spread_s: float
    num_repeats: int
    param_bytes: int
    activation_bytes: int
    """Bytes autograd keeps alive between forward and backward."""


@dataclass(frozen=True, slots=True)
class CostTerms:
    """Linear cost of one phase: layers * (layer terms) + edge terms. Edge = everything outside the layers."""

    layer_fixed: float
    layer_per_token: float
    layer_per_sq_token: float
    edge_fixed: float
    edge_per_token: float
    edge_per_item: float


@dataclass(frozen=True, slots=True)
class CostTable:
    """Fitted cost of one module at one tp on one kind of hardware."""

    table_id: str
    profile_key: str
    module: str
    hardware: str
    software: str
    dtype: str
    tp: int
    source: str
    """`measured` or `analytic`."""
    num_layers: int
    """Depth of the module in the full model."""
    forward_s: CostTerms
    backward_s: CostTerms
    activation_bytes: CostTerms
    layer_param_bytes: int
    edge_param_bytes: int
    num_measurements: int
    median_error_frac: float
    """Median absolute relative error of forward + backward seconds on the probes themselves."""
    p95_error_frac: float


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Where one module runs: global rank = first_rank + (stage * dp + dp_rank) * tp + tp_rank."""

    module: str
    parallel: ParallelSpec
    first_rank: int
    layers_per_stage: tuple[int, ...]
    stage_memory_bytes: tuple[int, ...]
    """Predicted peak per process of each stage."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout of the model on the cluster, with what it was predicted to take."""

    plan_id: str
    run_id: str
    candidate_rank: int
    """0 is the plan that runs; higher ranks are the runners-up, kept for the record."""
    layout: str
    """`split`: every module has its own processes."""
    modules: tuple[ModulePlan, ...]
    num_microbatches: int
    global_batch_size: int
    formula_step_s: float
    """Objective of the mixed-integer program (planning formula, no simulation)."""
    predicted_step_s: float
    """Mean simulated step with the scheduler that will run."""
    baseline_step_s: float
    """Mean simulated step of the same layout with data-blind (arrival order, equal counts) microbatches."""
    table_ids: tuple[str, ...]
    snapshot_seq: int
    """Store snapshot the cost tables and shapes were read from."""
    reason: str

    def module(self, name: str) -> ModulePlan:
        for m in self.modules:
            if m.module == name:
                return m
        raise KeyError(name)

    @property
    def encoders(self) -> tuple[ModulePlan, ...]:
        return tuple(m for m in self.modules if m.module != LLM)

    @property
    def num_processes(self) -> int:
        return sum(m.parallel.num_processes for m in self.modules)


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """Items of one module in a global batch and who owns them.

    For an encoder an item is a `MediaItem` of some sample; for the LLM an item is a whole sample.
    """

    module: str
    item_sample: tuple[int, ...]
    """Position in `StepPlan.sample_index` of the sample each item belongs to."""
    item_rank_in_sample: tuple[int, ...]
    """Which item of that sample (index into `SampleShape.items`); 0 for the LLM."""
    item_rows: tuple[int, ...]
    """Rows each item sends to the LLM (encoders) or tokens of the sample (LLM)."""
    owner: tuple[tuple[tuple[int, ...], ...], ...]
    """`owner[microbatch][dp_rank]` = item ids in packed order."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Which sample runs in which microbatch on which data-parallel rank, in which order."""

    run_id: str
    step: int
    policy: str
    """Scheduling candidate that won: `arrival`, `balanced`, ..."""
    sample_index: tuple[int, ...]
    """The global batch in arrival order, as rows of the annotation file."""
    num_microbatches: int
    work: tuple[ModuleWork, ...]
    num_supervised_tokens: int
    """Loss denominator of the whole global batch."""
    predicted_step_s: float
    arrival_step_s: float
    """Simulated step of the data-blind order of the same batch."""

    def of(self, module: str) -> ModuleWork:
        for w in self.work:
            if w.module == module:
                return w
        raise KeyError(module)


@dataclass(frozen=True, slots=True)
class MicrobatchSpan:
    """What one stage measured for one microbatch. Start times count from the start of the step."""

    microbatch: int
    num_items: int
    num_tokens: int
    sum_sq_tokens: int
    predicted_forward_s: float
    predicted_backward_s: float
    forward_start_s: float
    forward_s: float
    backward_start_s: float
    backward_s: float


@dataclass(frozen=True, slots=True)
class StepObservation:
    """What one rank saw of one optimizer step."""

    run_id: str
    attempt: int
    step: int
    policy: str
    rank: int
    module: str
    stage: int
    dp_rank: int
    predicted_step_s: float
    step_s: float
    busy_s: float
    """Forward + backward compute. Idle is `step_s - busy_s - reduce_s - optimizer_s`."""
    data_wait_s: float
    schedule_wait_s: float
    reduce_s: float
    optimizer_s: float
    loss: float
    """Mean loss over the supervised tokens of the global batch; NaN off the last LLM stage."""
    grad_norm: float
    num_supervised_tokens: int
    observed_at_s: float
    spans: tuple[MicrobatchSpan, ...]


@dataclass(frozen=True, slots=True)
class Correction:
    """Multiplicative correction of a module's predicted seconds, learnt from what a run observed."""

    run_id: str
    effective_step: int
    module: str
    table_id: str
    factor: float
    residual_frac: float
    """Median absolute relative error of the uncorrected prediction in the window."""
    num_observations: int
    observed_at_s: float


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One job and what became of it; a new row per change of state."""

    run_id: str
    job_name: str
    job_key: str
    backend: str
    job_id: str
    state: str
    reason: str
    folder: str
    num_tasks: int
    attempt: int
    observed_at_s: float


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of the pipeline; a new row per change of state."""

    run_id: str
    name: str
    config_key: str
    state: str
    """`running`, `done` or `failed`."""
    hardware: str
    software: str
    code_rev: str
    run_dir: str
    observed_at_s: float


def to_dict(record: Any) -> dict[str, Any]:
    """Plain nested dict of a record: what JSON, Parquet and DuckDB see."""
    return dataclasses.asdict(record)


def from_dict(cls: type[T], data: dict[str, Any]) -> T:
    """Inverse of `to_dict`: rebuilds nested records and tuples from dicts and lists.

    Raises:
        KeyError: a field without a default is missing.
    """
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(typing.cast(Any, cls))}
    return cls(**{name: _revive(hints[name], value) for name, value in data.items() if name in known})


def _revive(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value)
    origin = typing.get_origin(hint)
    if origin is tuple:
        args = typing.get_args(hint)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_revive(args[0], v) for v in value)
        return tuple(_revive(a, v) for a, v in zip(args, value, strict=True))
    if origin is types.UnionType or value is None:
        return value
    return hint(value)
