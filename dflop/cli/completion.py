"""`dflop completion`: what makes a shell complete commands, options and their choices."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

Shell = Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Whose script to print.")]


def completion(
    shell: Shell,
    /,
    *,
    install: Annotated[bool, Parameter(help="Write it where the shell looks for it, and say where that is.")] = False,
) -> None:
    """Print the completion script of a shell, or install it for this user.

    Example: dflop completion zsh --install; eval "$(dflop completion bash)"
    """
    from dflop.cli import app

    if install:
        print(app.install_completion(shell=shell))
        return
    print(app.generate_completion(shell=shell))
