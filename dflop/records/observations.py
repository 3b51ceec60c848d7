"""What runs read, saw and went through: inputs, observations, events, jobs."""

from __future__ import annotations

from dataclasses import dataclass

BUSY_RATIO = 1.3
"""Wall over processor time of forward and backward, from which on others are said to use the cores."""


@dataclass(frozen=True, slots=True)
class MicrobatchSpan:
    """What one stage measured for one microbatch. Start times count from the start of the step.

    `forward_s` and `backward_s` are wall time. The `compute` pair is what the cost model predicts: thread CPU time
    where processes share cores, the same as wall time where every process has its device to itself.
    """

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
    forward_compute_s: float
    backward_compute_s: float


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
    """Wall time in forward and backward; the idle share of a step is 1 - busy_s / step_s. Compute is in `spans`."""
    data_wait_s: float
    """Wait for the step's input before the step began, the other ranks' included; not part of `step_s`."""
    schedule_wait_s: float
    """Part of preparing the input ahead that was spent waiting for the StepPlan; hidden unless `data_wait_s` shows."""
    reduce_s: float
    optimizer_s: float
    loss: float
    """Mean loss over the supervised tokens of the global batch, the same on every rank; NaN where it has none."""
    grad_norm: float
    num_supervised_tokens: int
    observed_at_s: float
    spans: tuple[MicrobatchSpan, ...]

    @property
    def compute_s(self) -> float:
        """Compute seconds of forward and backward: processor time on CPUs, wall time on GPUs."""
        return sum(s.forward_compute_s + s.backward_compute_s for s in self.spans)

    @property
    def wall_to_compute(self) -> float:
        """Wall over compute seconds of forward and backward: 1 where the rank had its core; 1 without work."""
        wall_s, compute_s = sum(s.forward_s + s.backward_s for s in self.spans), self.compute_s
        return wall_s / compute_s if compute_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class RankSpan:
    """One thing a rank did in a traced step, and for how long.

    What starts within a step follows one another and leaves only the engine's own time between. Two do not:
    `data_wait` comes before the step and `checkpoint` after it; `schedule_wait` was another thread's, one step ahead.
    """

    run_id: str
    attempt: int
    step: int
    rank: int
    module: str
    stage: int
    dp_rank: int
    tp_rank: int
    name: str
    """`forward`, `backward`, `receive_wait`, `send`, `reduce`, `optimizer`, `data_wait`, `schedule_wait` or
    `checkpoint`."""
    microbatch: int
    """-1 for what belongs to the whole step."""
    start_s: float
    """From the start of the step; negative for what came before it."""
    duration_s: float
    num_bytes: int
    """Received or handed over to be sent; 0 for everything else."""


@dataclass(frozen=True, slots=True)
class StepFlops:
    """What one step asks of the hardware and what the hardware could do."""

    run_id: str
    attempt: int
    step: int
    model_flops: float
    """FLOPs of the model's matmuls and attention, forward and backward; what is recomputed counts once."""
    peak_flops_per_s: float
    """Peak of all devices of the plan together; NaN where no data sheet of the device is known."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens of a rank, under tensor parallelism a part of its replica's, that a layer sent to each of its experts."""

    run_id: str
    attempt: int
    step: int
    """The last of them."""
    rank: int
    stage: int
    dp_rank: int
    num_steps: int
    layer: int
    """Layer of the LLM."""
    num_tokens: tuple[int, ...]
    """Per expert; a token counts once for every expert that it goes to. A rank without samples sends one token."""


@dataclass(frozen=True, slots=True)
class GradNorm:
    """Norm of the gradient of one module in one optimizer step, over all ranks and before clipping."""

    run_id: str
    attempt: int
    step: int
    module: str
    grad_norm: float
    """NaN or infinite in a step that updated nothing."""


ROUTERS = "routers"
"""Split of a `SourceLoss`."""


@dataclass(frozen=True, slots=True)
class SourceLoss:
    """Loss of samples of one source, the same for any layout of the run."""

    run_id: str
    attempt: int
    step: int
    """After which it was measured."""
    split: str
    """`validation`: samples held out of training; `train`: those of the step, where the dataset has several sources;
    `ROUTERS`: the load balancing loss of layers with experts in the step."""
    source: str
    """Entry of a mixture, or the name of the annotation file; of routers their module."""
    loss: float
    """Mean over tokens; of routers over layers, 1 where experts are used evenly, without a coefficient."""
    num_tokens: int
    """Tokens that carry loss; of routers all tokens."""
    num_samples: int
    observed_at_s: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The most memory a rank has held since its process began; a new row when it has become more."""

    run_id: str
    attempt: int
    step: int
    """After which it was read."""
    rank: int
    module: str
    stage: int
    dp_rank: int
    tp_rank: int
    kind: str
    """`allocated`: what tensors held on the device, as plans predict it; `process`: its resident size on the host, with
    interpreter, libraries and samples that wait, and with its tensors where it has no device."""
    peak_bytes: int
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
    """`ready`, `running`, `done`, `failed`, `interrupted` or `cancelled`."""
    hardware: str
    software: str
    code_rev: str
    run_dir: str
    observed_at_s: float
    owner: str = ""
    """`user@host` that began it; empty in rows from before owners were recorded."""


@dataclass(frozen=True, slots=True)
class RunInput:
    """What a job of a run read from the store before it decided anything; enough to give it the same input again."""

    run_id: str
    job: str
    """`plan`, `train` or `compare`."""
    attempt: int
    snapshot_seq: int
    snapshot_revision: str
    """Content identity of that snapshot."""
    data_profile_key: str
    model_profile_key: str
    table_ids: tuple[str, ...]
    """Cost tables that were used."""
    observed_at_s: float


@dataclass(frozen=True, slots=True)
class RunEvent:
    """What a run did otherwise than planned and survived."""

    run_id: str
    job: str
    """`train` or `compare`."""
    attempt: int
    step: int
    """At which it was noticed."""
    kind: str
    """`scheduler_late`, `scheduler_dead`, `scheduler_restarted`, `scheduler_given_up`, `scheduler_behind`,
    `memory_exceeded`, `not_finite`, `checkpoint_failed`, `checkpoint_damaged`, `machine_busy` or `stopped_early`."""
    detail: str
    observed_at_s: float
