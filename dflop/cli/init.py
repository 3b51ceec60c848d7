"""What one begins with: a commented configuration, the demo's data, completion in one's shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from dflop.cli.common import Quiet, at_least, check_folder, check_source, talk, writing
from dflop.cli.configured import Download, Split
from dflop.run.messages import Meter


def init(
    *,
    model: Annotated[
        Path,
        Parameter(
            help="config.json of a Hugging Face model, or its folder with tokenizer and processor files.",
            validator=check_source,
        ),
    ],
    data: Annotated[
        Path, Parameter(help="File of training data, a pattern of several, or a folder.", validator=check_source)
    ],
    split: Split = "",
    download: Download = False,
    gpus: Annotated[
        int | None, Parameter(help="Choose the global batch for this number of GPUs instead of this machine.")
    ] = None,
    cluster: Annotated[str, Parameter(help="`slurm`, or `slurm:PARTITION`: from sinfo; else this machine.")] = "",
    out: Annotated[Path | None, Parameter(help="File to write; stdout without it.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a commented configuration for a model and a dataset.

    Lists what was found, what was not, and what to edit.

    Example: dflop init --model InternVL3-1B-hf/config.json --data my_data --out my.yaml
    """
    from dflop.errors import ConfigError
    from dflop.starter.hub_files import local
    from dflop.starter.starter import make_starter

    if out is not None and out.exists():
        raise ConfigError("already exists", where=str(out), hint="name a new file")
    check_folder(out)
    say = talk(quiet)
    model = local(model, say, is_dataset=False, downloads=download, with_weights=True)
    made = make_starter(model, local(data, say, is_dataset=True, downloads=download), gpus, split, cluster)
    if out is None:
        print(made.text, end="")
    else:
        with writing(out):
            out.write_text(made.text, encoding="utf-8")
        print(out)
    for line in made.found:
        say(f"found  {line}")
    for line in made.to_edit:
        say(f"edit   {line}")
    file, planned = out or "FILE", f" --gpus {gpus}" if gpus else ""
    say(f"then   dflop config validate {file}; dflop plan {file} --device h100{planned}")


def demo_data(
    folder: Annotated[Path, Parameter(help="Folder to create; must be empty or new.")],
    *,
    num_samples: Annotated[int, Parameter(help="Rows of the annotation file.", validator=at_least(1))] = 320,
    seed: Annotated[int, Parameter(help="Equal seeds give equal datasets.", validator=at_least(0))] = 0,
    family: Annotated[str, Parameter(help="Model family to build it for.")] = "qwen2_5_omni_thinker",
    quiet: Quiet = False,
) -> None:
    """Build the demo dataset from media inside Python packages; print its file.

    Example: dflop demo-data data/demo
    """
    from dflop.data.demo import make_demo_dataset
    from dflop.models import load_family

    rules = load_family(family, {}, {})
    say = talk(quiet)
    made = make_demo_dataset(folder, num_samples, seed, progress=say, at=Meter(say), rules=rules)
    print(made.entries[0].paths[0])


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Shell to print the script of.")],
    /,
    *,
    install: Annotated[bool, Parameter(help="Install it where the shell looks for it, and print that path.")] = False,
) -> None:
    """Print the completion script of a shell, or install it for this user.

    Example: dflop completion zsh --install; eval "$(dflop completion bash)"
    """
    from dflop.cli import app

    print(app.install_completion(shell=shell) if install else app.generate_completion(shell=shell))
