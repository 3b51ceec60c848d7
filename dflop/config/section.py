"""What every section of a configuration is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

from dflop.addresses import address_problem
from dflop.errors import path_problem


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys."""

    # Docstrings under fields are their descriptions in the schema.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def _possible(path: Path) -> Path:
    if problem := path_problem(path) or address_problem(path):
        raise ValueError(problem)
    return path


FilePath = Annotated[Path, AfterValidator(_possible)]
"""A path that a file can have; also a pattern, which may be longer than a name."""
