"""Section `train`: steps, AdamW and its groups, checkpoints, scheduling ahead, decoding, and what ends a job.

Section `validation`: what is held out of training, and when its loss is measured.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dflop.config.lora_section import LoraConfig
from dflop.config.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Section):
    """Parameters that AdamW updates with another learning rate or weight decay than the rest."""

    targets: tuple[str, ...] = Field(min_length=1)
    """Modules (`vision`), `norms`, `biases`, `embeddings` (of tokens, positions and patches), or patterns of names
    (`*.merger.*`); any of them."""
    lr_scale: float | None = Field(default=None, ge=0)
    """Factor on the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _says_something(self) -> Any:
        if self.lr_scale is None and self.weight_decay is None:
            raise ValueError("a group needs lr_scale, weight_decay or both")
        return self


class TrainConfig(Section):
    """How the model is trained."""

    num_steps: int = Field(default=40, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=4, ge=0)
    lr_decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How the learning rate changes after the warm-up, per stage; `wsd` holds the peak and falls in the last steps."""
    lr_floor_frac: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a share of its peak; `constant` has none."""
    lr_decay_frac: float = Field(default=0.2, gt=0, le=1)
    """Share of a stage's steps in which `wsd` falls."""
    weight_decay: float = Field(default=0.01, ge=0)
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: torch's Muon for matrices but embeddings and the head, AdamW for all others. Its updates are as large as
    AdamW's, so that one learning rate fits both. Plans keep matrices whole (no tp, no FSDP2), and count the memory and
    time of AdamW, not Muon's iterations over matrices."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    ema_decay: float = Field(default=0, ge=0, lt=1)
    """Keeps an exponential moving average of the weights, of which this share stays in every step; 0: none. Checkpoints
    hold it, `dflop export --ema` writes it."""
    groups: tuple[GroupConfig, ...] = ()
    """Parameters with another learning rate or weight decay; where several name one, the last that gives a number."""
    lora: LoraConfig | None = None
    """Low-rank adapters that train in place of weights; none: weights train."""
    router_loss: float | None = Field(default=None, ge=0)
    """Coefficient of the load balancing loss of layers with experts, which is 1 where experts are used evenly. Default:
    `router_aux_loss_coef` of the model's config, times the experts of a token, where that has `output_router_logits:
    true`; else 0, none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    checkpoint_every: int = Field(default=10, ge=1)
    """Steps between two checkpoints."""
    checkpoint_every_s: float = Field(default=0, ge=0)
    """Write a checkpoint when the last one is older than this; 0: never."""
    keep_checkpoints: int = Field(default=2, ge=1)
    schedule_ahead: int = Field(default=2, ge=1, le=8)
    """Steps the scheduler works ahead of training, at once where cores are free."""
    schedule_patience_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of a step that rank 0 waits for the next step's plan before it uses the fallback schedule; the rest of the
    step is for decoding."""
    num_workers: int | None = Field(default=None, ge=0)
    """Processes per rank that decode media, for ranks that need media; 0: the rank decodes for itself, one file after
    another and without `decode_timeout_s`. Default: 4 per GPU, as far as there are cores; 0 on a
    CPU."""
    prefetch_steps: int = Field(default=2, ge=1)
    """Steps ahead of the one that runs whose media workers decode, once there are plans for them (`schedule_ahead`)."""
    prefetch_gib: float = Field(default=4, ge=0)
    """Decoded media a rank may hold for steps after the next one."""
    decode_timeout_s: float = Field(default=60, gt=0)
    """A file that takes a worker longer is skipped; half of `timeout_s` or of `stall_s` where that is less."""
    scheduler_restarts: int = Field(default=2, ge=0)
    """How often a failed scheduler is restarted; after that training uses the fallback schedule."""
    overfit_samples: int = Field(default=0, ge=0)
    """Train on this many samples again and again, to see whether the loss falls (`dflop train CONFIG --overfit 8`);
    0: on all."""
    seed: int = Field(default=0, ge=0)
    """Seed of the sample order, and of every rank's random generators at a fresh start."""
    deterministic: bool = False
    """Whether the same StepPlans on the same hardware give the same bits, more slowly: deterministic attention and
    `torch.use_deterministic_algorithms`. An operation that has no deterministic form ends the job and is named."""
    compile: bool = False
    """Whether the layers of encoders and LLM are compiled (`torch.compile`), in training and in the model profile,
    which tells what it gains; not with experts or states along the tokens."""
    fp8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Recipe of torchao by which the Linears of the LLM's layers multiply in FP8, in training and in the model profile:
    one scale per tensor is faster, one per row closer to bfloat16. Needs `pip install 'dflop[fp8]'` and GPUs of compute
    capability 8.9 or later; a CPU emulates it. Without `compile` casts cost more than FP8 gains."""
    timeout_s: float = Field(default=120, gt=0)
    """A collective or a message slower than this ends the job."""
    stall_s: float = Field(default=0, ge=0)
    """A rank without heartbeat for this long, or that keeps all others waiting, ends the job and is named; 0: three
    quarters of `timeout_s`. A file is given up earlier, after `decode_timeout_s`, where workers decode."""
    trace_every_steps: int = Field(default=10, ge=0)
    """One step in this many is traced: what every rank did goes to the store; 0: none."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where rank 0 also draws curves, each in its folder in the run directory; `WANDB_MODE=online` and
    `MLFLOW_TRACKING_URI` in the job's environment name a server instead."""


class ValidationConfig(Section):
    """Samples held out of training, and their loss during training."""

    num_samples: int = Field(default=0, ge=0)
    """Samples held out, at random; 0: no validation. Those with the same media or the same content (texts without
    case and white space, media by name and size) are held out together or not at all, so it may be a few less."""
    sources: tuple[str, ...] = ()
    """Entries of the dataset that are held out whole, in place of `num_samples`: entries of a mixture by their names,
    or, by `validation` or `test`, files that are named so (with `dataset.split: train,validation`)."""
    every_steps: int = Field(default=50, ge=1)
    """Training steps between two validations; there is one after the last step, too."""
    keep_best: bool = False
    """Whether the checkpoint with the lowest loss stays besides the newest ones, for `dflop export --best`. Every
    validation with a lower loss than all before writes a checkpoint."""
    patience: int = Field(default=0, ge=0)
    """Validations in a row without a lower loss than the lowest after which training, or a stage of it, ends; the rest
    of its steps is skipped. 0: never."""

    @model_validator(mode="after")
    def _says_once(self) -> Any:
        if self.num_samples and self.sources:
            raise ValueError(f"num_samples is {self.num_samples} and sources are {list(self.sources)}; set one of them")
        return self

    @property
    def is_wanted(self) -> bool:
        """Whether anything is held out."""
        return bool(self.num_samples or self.sources)
