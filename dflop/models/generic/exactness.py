"""How exactly stages train a model, as `dflop model check` found it and keeps it for the reports of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflop.models.generic.facts import model_key

LIMIT = 1e-5
"""Relative error of a module's gradients up to which it counts as exact."""
FLOAT64_LIMIT = 1e-9


@dataclass(frozen=True, slots=True)
class MediumCheck:
    """What a check of samples of one kind found."""

    medium: str
    """`text`, or the medium that every sample has an item of."""
    errors: tuple[tuple[str, float], ...]
    """(module, relative error of its gradients), the larger one of both steps, worst first; empty: not checked."""
    problem: str = ""
    """Why it was not checked, or what was refused."""
    float64_error: float | None = None
    """The largest error in float64; None where float32 was within the limit."""

    @property
    def error(self) -> float | None:
        """The largest error in float32."""
        return self.errors[0][1] if self.errors else None

    @property
    def is_exact(self) -> bool:
        """Whether stages compute what transformers does: within `LIMIT`, or apart by rounding alone."""
        is_rounding = self.float64_error is not None and self.float64_error <= FLOAT64_LIMIT
        return self.error is not None and (self.error <= LIMIT or is_rounding)


@dataclass(frozen=True, slots=True)
class Exactness:
    """Exactness of a model: a check of text, and of every medium that it takes."""

    checks: tuple[MediumCheck, ...]
    num_params: int
    """Parameters of the shrunk copy."""

    @property
    def is_exact(self) -> bool:
        """Whether text is exact and nothing that was checked differs."""
        return self.checks[0].is_exact and all(check.is_exact for check in self.checks if check.errors)


@dataclass(frozen=True, slots=True)
class KeptCheck:
    """The result of one check; a later check of the same model replaces it."""

    software: str
    code_rev: str
    """Both as in `RunRecord`."""
    checked_at_s: float
    exactness: Exactness
    refused: tuple[tuple[str, str], ...]
    """(medium, why its tokens are not counted)."""


def check_file(cache: Path, hf_config: Mapping[str, Any], processor: Path) -> Path:
    """The file with a model's `KeptCheck`, whatever version of transformers it is of."""
    return cache / f"check-{model_key(hf_config, processor)}.json"
