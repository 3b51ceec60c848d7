"""The base of a model that trains adapters: parameters that checkpoints leave out, as they never change.

A checkpoint names the base by its folder and by a digest of every byte of its weights. Ranks share out the reading, in
pieces, so that a start takes about as long as loading does. A folder that moved is fine; one that changed is not: the
adapters were trained for other weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.errors import ConfigError

PIECE_BYTES = 64 << 20
META = "base"
"""Key of a checkpoint's metadata."""


@dataclass(frozen=True, slots=True)
class Base:
    """Parameters that never train."""

    names: frozenset[str] = frozenset()
    """Global names."""
    folder: Path | None = None
    """With their weights; None: they are random."""
    seed: int = 0
    """Seed of random weights."""

    def digests(self, share: slice = slice(None)) -> dict[str, str]:
        """SHA-256 of every piece of the weights' files, by file and number, or of some of them.

        Args:
            share: Which pieces.

        Raises:
            ConfigError: a file cannot be read.
        """
        if self.folder is None:
            return {}
        try:
            sizes = {path: path.stat().st_size for path in sorted(self.folder.glob("*.safetensors"))}
            pieces = [(path, at) for path, size in sizes.items() for at in range(0, max(size, 1), PIECE_BYTES)]
            return {f"{path.name}:{at}": _digest(path, at) for path, at in pieces[share]}
        except OSError as error:
            raise ConfigError(f"cannot read the base: {error.strerror or error}", where=str(self.folder)) from error

    def described(self, digests: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """What a checkpoint says of the base.

        Args:
            digests: As `digests` returns them, of all shares.
        """
        if self.folder is None:
            return {"weights": f"random, seed {self.seed}", "sha256": ""}
        every = sorted((name, digest) for share in digests for name, digest in share.items())
        return {"weights": str(self.folder), "sha256": hashlib.sha256(repr(every).encode()).hexdigest()}


def base_problem(meta: Mapping[str, Any], described: Mapping[str, str]) -> str:
    """What keeps adapters of a checkpoint from going on with a base; empty where nothing does.

    Args:
        meta: Of the checkpoint.
        described: Of the base at hand, as of `Base.described`; empty where nothing has adapters.
    """
    kept = meta.get(META, {})
    if not kept:
        return ""
    if not described:
        return "the checkpoint holds adapters, and `train.lora` is not set"
    if kept["sha256"] != described["sha256"] or (not kept["sha256"] and kept != described):
        then, now = (f"{of['weights']} (SHA-256 {of['sha256'][:12] or 'none'})" for of in (kept, described))
        return f"the adapters were trained with another base: {then}, now {now}"
    return ""


def _digest(path: Path, at: int) -> str:
    with open(path, "rb") as file:
        file.seek(at)
        return hashlib.sha256(file.read(PIECE_BYTES)).hexdigest()
