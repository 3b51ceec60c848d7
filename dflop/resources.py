"""Finds the folders that travel beside the package: `sql/`, `configs/`, `slurm/`, `flows/`.

People edit these at the top of a checkout; a wheel carries the same folders as `dflop/_resources/<name>`. The
wheel's copy is looked for first: next to an installed package, `configs/` in site-packages may belong to somebody
else.
"""

from __future__ import annotations

from pathlib import Path

from dflop.errors import DflopError, did_you_mean

NAMES = ("configs", "flows", "slurm", "sql")


def path(name: str, *, package: Path | None = None) -> Path:
    """Absolute path of the resource folder `name`.

    Args:
        name: One of `NAMES`.
        package: Folder of the `dflop` package; the running one unless given.

    Raises:
        DflopError: `name` is no resource folder, or the installation lacks it.
    """
    if name not in NAMES:
        raise DflopError(f"no resource folder `{name}`", hint=did_you_mean(name, NAMES))
    package = package or Path(__file__).resolve().parent
    packed = package / "_resources"
    folder = (packed if packed.is_dir() else package.parent) / name
    if not folder.is_dir():
        raise DflopError(
            f"this installation of dflop lacks its `{name}` folder",
            where=str(folder),
            hint="reinstall the wheel, or run from a complete checkout",
        )
    return folder
