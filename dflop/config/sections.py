"""The sections of a run's configuration: names, types, defaults and limits, nothing else."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, model_validator
from pydantic.fields import FieldInfo

from dflop.config.section import FilePath, Section
from dflop.config.slurm_section import SlurmConfig
from dflop.config.train_section import TrainConfig, ValidationConfig
from dflop.errors import printable
from dflop.records import ClusterSpec


def _one_line(path: Path) -> Path:
    if "\n" in str(path) or printable(str(path)) != str(path):
        raise ValueError("a folder that jobs write into has no line break or control character in its name")
    return path


Folder = Annotated[FilePath, AfterValidator(_one_line)]


class ModelConfig(Section):
    """The model to train."""

    family: str
    """Name of a family in `dflop/models/`, or `generic` for other types of transformers."""
    hf_config: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the family's Hugging Face config class; of `generic` the model's whole `config.json`."""
    processor: FilePath | None = None
    """Folder with the model's processor and tokenizer files, which `generic` counts tokens by."""
    media: dict[str, Any] = Field(default_factory=dict)
    """Media limits of the family (`max_pixels`, `video_fps`, ...)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "flash3", "flash", "varlen", "sdpa"] = "auto"
    """`flash3`: FlashAttention-3, for Hopper GPUs; `flash`: the flash-attn package; `varlen`: torch's own kernel for
    variable lengths; `sdpa`: one call per length, the only one on a CPU or in float32; `auto`: the first that can run.
    """
    seed: int = Field(default=0, ge=0)
    weights: FilePath | None = None
    """Folder of a Hugging Face model to start from (`model.safetensors` or several with an index); its vocabulary is
    the model's. Without one weights are random."""
    frozen: tuple[str, ...] = ()
    """Modules whose weights do not train (`vision`, `audio`, `llm`). An encoder's projector goes with it; of
    `vision.tower` or `audio.tower` the projector trains."""


class DatasetConfig(Section):
    """The training data."""

    annotations: FilePath
    """JSON or JSON Lines (plain, .gz, .zst), Hugging Face Parquet or Arrow, CSV, WebDataset .tar, a pattern of several
    of them, a mixture (.yaml), a folder or an index of another program, or a Parquet table of sizes."""
    split: str = ""
    """Which split of a folder or an index to train on, or several with commas; empty: the one for training."""
    media_root: FilePath
    tokenizer: FilePath
    """A `tokenizer.json` of the `tokenizers` library with the family's special tokens."""
    chat_template: str = "chatml"
    """`chatml`, `qwen`, `llama3`, or a file: `chat_template.jinja`, `tokenizer_config.json`."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens of the tokenizer that texts may name, of boxes and the like; others are tokenized as plain text.
    Never those of the chat template or of media."""
    max_llm_tokens: int = Field(default=8192, ge=8)
    min_side_px: int = Field(default=2, ge=1)
    """Images and videos with a shorter side are skipped (tracking pixels)."""
    ignored_keys: tuple[str, ...] = ()
    """Keys of rows, messages and parts, and extensions of tar members, that may be ignored although a row is skipped
    for them."""
    seed: int = Field(default=0, ge=0)
    """Seed of a mixture's `random:` strategies."""
    overlong: tuple[Literal["shrink", "truncate"], ...] = ()
    """What to do, in this order, with longer samples; empty: skip them. `shrink` halves limits of `model.media`, for
    models of the family `generic` the area of pictures and frames that their processor is given."""
    shuffle_window: int = Field(default=0, ge=0)
    """Samples are shuffled within windows of this many rows of the annotation file, and windows come in the file's
    order:
    as in streaming or a curriculum. 0: over the whole epoch."""
    demo: bool = False
    """Build the demo dataset in the folder of `annotations` when it is not there."""
    demo_num_samples: int = Field(default=320, ge=1)


MAX_AUTO_PROCESSES = 4
_ONE_PER_CORE = BeforeValidator(
    lambda given: min(MAX_AUTO_PROCESSES, os.cpu_count() or 1) if given == "auto" else given,
    json_schema_input_type=int | Literal["auto"],
)


class ClusterConfig(Section):
    """Where jobs run."""

    name: str
    backend: Literal["local", "slurm"] = "local"
    num_nodes: int = Field(default=1, ge=1)
    num_processes_per_node: Annotated[int, _ONE_PER_CORE] = Field(ge=1)
    """`auto`: one per core of this machine, at most 4."""
    memory_per_process_gib: float = Field(gt=0)
    device: Literal["cpu", "cuda"] = "cpu"
    ranks_per_gpu: int = Field(default=1, ge=1)
    """Neighbouring processes of a node that share a GPU, with an equal share of its memory each; to try a layout on
    fewer GPUs than it has ranks. More than 1: they communicate with gloo, through host memory, so times mean little."""
    num_cores_per_node: int | None = Field(default=None, ge=1)
    """CPU cores per node; default: this machine's."""
    hardware: str = "auto"
    """Label of the hardware in the store; `auto` reads this machine's."""
    slurm: SlurmConfig = SlurmConfig()

    @model_validator(mode="after")
    def _fills_gpus(self) -> Any:
        if self.ranks_per_gpu > 1 and self.device != "cuda":
            raise ValueError(f"ranks_per_gpu is {self.ranks_per_gpu} but device is {self.device}; it needs cuda")
        if self.num_processes_per_node % self.ranks_per_gpu:
            what = f"num_processes_per_node ({self.num_processes_per_node}) is no multiple of ranks_per_gpu"
            raise ValueError(f"{what} ({self.ranks_per_gpu})")
        return self

    @property
    def collectives(self) -> Literal["nccl", "gloo"]:
        """What ranks communicate with; NCCL refuses two ranks of one GPU."""
        return "nccl" if self.device == "cuda" and self.ranks_per_gpu == 1 else "gloo"

    def spec(self) -> ClusterSpec:
        """The cluster as the planner sees it."""
        return ClusterSpec(
            name=self.name,
            backend=self.backend,
            num_nodes=self.num_nodes,
            num_processes_per_node=self.num_processes_per_node,
            memory_per_process_bytes=int(self.memory_per_process_gib * 2**30),
            device=self.device,
            num_cores_per_node=self.num_cores_per_node or os.cpu_count() or 1,
        )


class DataProfileConfig(Section):
    """How the dataset is profiled."""

    num_shards: int = Field(default=1, ge=1, le=1000)
    """Jobs the dataset is split over: an array of Slurm, which has 1,001 elements at most by default."""
    num_workers: int = Field(default=1, ge=1)
    """Processes of each job."""
    max_bad_frac: float = Field(default=0.01, ge=0, le=1)
    """A larger share of skipped samples stops the run."""


class ModelProfileConfig(Section):
    """How the modules are profiled."""

    budget_s: float = Field(default=45, gt=0)
    """Time for probes, split over the modules; start-up of the job not included."""
    num_layers: tuple[int, int] = (2, 4)
    """The two shallow depths; everything deeper is extrapolated. A second layer is cheaper than later ones."""
    num_repeats: int = Field(default=3, ge=1)
    num_probes: int = Field(default=12, ge=4)
    """Packed groups per module and way of running it, at most; each is timed at every depth."""
    tp: tuple[int, ...] = Field(default=(1,), min_length=1)
    """Tensor-parallel degrees to measure, of modules whose heads they divide; others are derived from tp 1."""
    ways: tuple[Literal["train", "frozen", "recompute"], ...] = ("train",)
    """Modes to profile: training, frozen, or with recomputation of layers in the backward pass."""
    links_budget_s: float = Field(default=5, ge=0)
    """Time for messages and collectives between processes; 0: none."""


FEWEST_LIKELY = 4
"""Microbatches of a plan when the configuration does not set their number: fewer leave most of a pipeline idle."""


class PlanConfig(Section):
    """The planner's search space."""

    global_batch_size: int = Field(default=24, ge=1)
    """Samples per optimizer step."""
    microbatch_choices: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers of microbatches to try; empty: chosen automatically."""
    share_ranks: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """Whether modules share ranks, so that one pipeline holds the layers of all; `[false]`: each has dedicated ranks;
    `[false, true]`: where it pays off, of some encoders and not of others."""
    context_parallel: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Context-parallel degrees of plans whose modules are colocated: so many ranks of a node share samples, and send
    keys and values of those that are cut; empty: powers of two on GPUs, 1 on CPUs."""
    expert_parallel: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Expert-parallel degrees of such plans: so many neighbouring ranks of a node share the experts of every layer and
    send each other tokens, next to ZeRO-1 or sharded parameters; empty: 1, 2, 4, 8 on GPUs, 1 on CPUs."""
    recompute: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """Activation recomputation in the backward pass, to save memory; `[false, true]`: where it pays off."""
    shard_optimizer: bool = True
    """Whether replicas may shard the optimizer state (ZeRO-1)."""
    shard_parameters: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """Whether they also shard parameters and gradients, over a node or all of them (FSDP2), and gather a layer's
    weights when it runs; `[false, true]`: where memory asks for it."""
    offload_gib_per_process: float = Field(default=0, ge=0)
    """Page-locked host memory that the LLM's activations may take until their backward pass, where copies overlap with
    computing; 0: none. For GPUs; not requested from Slurm."""
    offload_gb_per_s: float | None = Field(default=None, gt=0)
    """Rate of these copies per process, in each direction while the other is busy, too; unset: as profiled, or else of
    the GPU's data sheet."""
    num_scenarios: int = Field(default=6, ge=1)
    """Global batches sampled from the data distribution."""
    horizon_steps: int = Field(default=0, ge=0)
    """Steps ahead whose samples a plan is made for; 0: all samples. With `dataset.shuffle_window`, upcoming samples may
    be unlike what comes later."""
    top: int = Field(default=40, ge=1)
    """Candidates re-ranked by the simulator."""

    @property
    def max_probe_samples(self) -> int:
        """Samples of the largest probe: those of the largest microbatch that a plan can have, or is likely to have."""
        return max(1, self.global_batch_size // min(self.microbatch_choices, default=FEWEST_LIKELY))


class CorrectConfig(Section):
    """How measured times correct predictions."""

    enabled: bool = True
    """Whether measured step times correct predicted seconds."""
    half_life_days: float = Field(default=14, gt=0)
    """Half-life of corrections from earlier runs."""


class ReplanConfig(Section):
    """When a run switches to another plan."""

    mode: Literal["off", "advise", "act"] = "advise"
    """`advise`: only report; `act`: write a checkpoint and continue under the new plan."""
    check_every_s: float = Field(default=20, gt=0)
    """How often the driver ingests the run's rows and checks for drift."""
    min_gain_frac: float = Field(default=0.05, ge=0)
    """Least gain, as a share of the remaining time."""
    restart_cost_s: float | None = Field(default=None, ge=0)
    """Cost of checkpoint, restart and queue; default: what this run's own start took."""
    min_steps: int = Field(default=10, ge=1)
    """Least steps under a plan before switching to another one."""
    max_replans: int = Field(default=3, ge=0)
    reprofile: bool = True
    """Whether a small job profiles shapes with inconsistent costs again during training."""


class StageConfig(Section):
    """A part of training with its own frozen modules, for example projectors first and everything afterwards."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    num_steps: int | None = Field(default=None, ge=1)
    """The last stage has none: it takes the rest of `train.num_steps`."""
    frozen: tuple[str, ...] = ()
    """In place of `model.frozen`."""
    learning_rate: float | None = Field(default=None, gt=0)
    """In place of `train.learning_rate`; warms up and decays within the stage."""


class CompareConfig(Section):
    """The comparison after training: the same global batches in arrival order and balanced."""

    num_batches: int = Field(default=5, ge=0)
    """Global batches trained under every policy; 0 skips the comparison."""
    num_repeats: int = Field(default=2, ge=1)
    baselines: tuple[Literal["length_grouped", "token_lpt", "token_kk"], ...] = ()
    """Further policies to train these batches under: grouped by length, longest first on tokens, tokens balanced over
    ranks."""


class Config(Section):
    """One run of the pipeline."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=150)
    """Prefix of the names of run directories and jobs, which file systems limit to 255 bytes."""
    model: ModelConfig
    cluster: ClusterConfig
    dataset: DatasetConfig
    store: Folder = Path(".dflop/store")
    runs: Folder = Path("runs")
    data_profile: DataProfileConfig = DataProfileConfig()
    model_profile: ModelProfileConfig = ModelProfileConfig()
    plan: PlanConfig = PlanConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    stages: tuple[StageConfig, ...] = ()
    """Parts of training in order; none: one, with `model.frozen` and `train.learning_rate`."""
    correct: CorrectConfig = CorrectConfig()
    replan: ReplanConfig = ReplanConfig()
    compare: CompareConfig = CompareConfig()

    @property
    def key(self) -> str:
        """Hash of everything in the file: two runs with the same key are the same run."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class MixtureEntryConfig(Section):
    """Rows of one file, or of several that one path with braces or a glob names."""

    path: str = Field(min_length=1, validation_alias=AliasChoices("path", "json_path", "annotations"))
    split: str = ""
    """Split of a folder or an index, see `dataset.split`."""
    sampling_strategy: str = "all"
    """`all`, or `first:`, `end:` or `random:` with a number of rows or a percentage."""
    weight: float | None = Field(default=None, gt=0)
    """Relative share of the samples drawn; set it for every entry or for none."""
    media_root: FilePath | None = Field(
        default=None, validation_alias=AliasChoices("media_root", "image_folder", "video_folder", "data_path")
    )
    """Folder of the media of these rows; default: the dataset's."""

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, data: Any) -> Any:
        for name, field in cls.model_fields.items():
            given = [key for key in spellings(name, field) if isinstance(data, Mapping) and key in data]
            if len(given) > 1:
                raise ValueError(f"`{'` and `'.join(given)}` are aliases, keep one of them")
        return data


class MixtureConfig(Section):
    """A training set from many files, in the YAML that LLaVA-NeXT and LLaVA-OneVision use."""

    datasets: tuple[MixtureEntryConfig, ...]


def spellings(name: str, field: FieldInfo) -> list[str]:
    """Every key that may stand for a field in the YAML."""
    choices = field.validation_alias
    return [str(choice) for choice in choices.choices] if isinstance(choices, AliasChoices) else [name]
