"""How jobs are submitted to a site's Slurm: its dialect, its accounts, its environment."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from dflop.config import sbatch_options
from dflop.config.section import Section
from dflop.errors import printable


def _one_line(text: str) -> str:
    if "\n" in text or printable(text) != text:
        raise ValueError("a value of an sbatch option is one line, without control characters")
    return text


Word = Annotated[str, AfterValidator(_one_line)]


class ContainerConfig(Section):
    """Image that the tasks of jobs run in."""

    image: Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
    """File or address, as the runtime takes it."""
    runtime: Literal["apptainer", "pyxis"] = "apptainer"
    """`apptainer`: every task starts `apptainer exec`; `pyxis`: srun's options `--container-...`."""
    mounts: tuple[Word, ...] = ()
    """Further folders, `PATH` or `SOURCE:TARGET`; runs, store and dataset are mounted where they are."""
    args: tuple[Word, ...] = ()
    """Further options of `apptainer exec`, or of srun."""
    python: Word = "python3"
    """Inside the image, with dflop installed."""


class SlurmConfig(Section):
    """How jobs are submitted to Slurm. Empty or zero: the site's default."""

    partition: Word = ""
    account: Word = ""
    qos: Word = ""
    constraint: Word = ""
    """Features that nodes must have (`a100&ib`)."""
    time_limit_min: int = Field(default=240, ge=1)
    """Time limit of each job; training resumes from its checkpoint in the next one."""
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """The option GPUs are asked for with; `none`: nodes come with all of theirs."""
    gpu_type: Word = ""
    """As in `--gres=gpu:TYPE:4`."""
    ask_for_memory: bool = True
    """Whether jobs request `--mem`, which some sites refuse."""
    requeue: bool = True
    """Whether Slurm may start a job again under its id: after a lost node, a preemption, a time limit. Without it,
    dflop submits another one."""
    signal_delay_s: int = Field(default=90, ge=1)
    """How long before the time limit training is signalled to write a checkpoint; half the limit where that is
    shorter."""
    max_jobs_at_once: int = Field(default=0, ge=0)
    """Elements of a job array that may run at the same time; 0: no limit but the site's."""
    setup: tuple[str, ...] = ()
    """Shell lines before the tasks start (`module load ...`, `source venv/bin/activate`); one that fails ends it."""
    extra: dict[str, str] = Field(default_factory=dict)
    """Further sbatch options without dashes, e.g. `{reservation: r1, exclusive: ""}`, by their long or short names."""
    srun_args: tuple[Word, ...] = ()
    container: ContainerConfig | None = None
    poll_interval_s: float = Field(default=30, gt=0)
    """Least time between two calls of squeue, for all jobs together."""
    lost_after_s: float = Field(default=120, gt=0)
    """A job that Slurm does not know for this long counts as lost."""

    @field_validator("extra")
    @classmethod
    def _are_options(cls, extra: dict[str, str]) -> dict[str, str]:
        for name, value in extra.items():
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
                raise ValueError(f"`{name}` is no long option of sbatch; leave the dashes out")
            if problem := sbatch_options.problem_of(sbatch_options.canonical(name), value):
                raise ValueError(f"`{name}` {problem}")
            _one_line(value)
        return {sbatch_options.canonical(name): value for name, value in extra.items()}

    @field_validator("srun_args")
    @classmethod
    def _are_srun_options(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for problem in sbatch_options.srun_problems(words):
            raise ValueError(problem)
        return words

    @model_validator(mode="after")
    def _say_it_once(self) -> Any:
        for name in ("partition", "account", "qos", "constraint"):
            if getattr(self, name) and name in self.extra:
                raise ValueError(f"`{name}` is also in `extra`; keep one of them")
        return self
