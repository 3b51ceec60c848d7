"""Everything that `dflop model check` finds out about a folder."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflop.errors import ConfigError
from dflop.models.generic.exact import check_exactness
from dflop.models.generic.exactness import Exactness, KeptCheck, check_file
from dflop.models.generic.facts import keep
from dflop.models.generic.folder import is_of_model, read_folder, reason
from dflop.models.generic.kernel_traps import Trap, traps_of
from dflop.models.generic.media_check import MediaCheck, check_media
from dflop.models.generic.media_processor import MediaProcessor, load_processor
from dflop.models.generic.structure import read_structure
from dflop.models.generic.values import Structure
from dflop.models.processor_settings import read_object


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """What a model is made of, and whether stages train it as transformers does."""

    structure: Structure
    exactness: Exactness
    media: tuple[MediaCheck, ...]
    """How tokens counted from sizes compare with the processor's calls, per medium."""
    media_problem: str
    """Why no medium was checked; empty: they were."""
    traps: tuple[Trap, ...]
    """What of it is slow on this device."""


def check_model(folder: Path) -> ModelCheck:
    """Check a model by its config; weights are neither needed nor read.

    Args:
        folder: Folder of the model, or the `config.json` in it.

    Raises:
        ConfigError: the folder holds no model that can be checked.
    """
    with quiet_transformers():
        config = read_folder(folder)
        structure = structure_of(config, str(folder))
        processor, problem = _processor(folder)
        media = tuple(check_media(processor).values()) if processor else ()
        exactness = check_exactness(config, structure, processor)
    return ModelCheck(structure, exactness, media, problem, traps_of(structure))


def keep_check(found: ModelCheck, folder: Path, cache: Path, software: str, code_rev: str) -> Path:
    """Write what was found of a folder to a file of the cache, for the reports of runs of its model.

    Raises:
        ConfigError: the folder's `config.json` is gone.
    """
    refused = tuple((of.kind, of.problem) for of in found.media if of.problem)
    refused = (("every medium", found.media_problem),) if found.media_problem else refused
    folder = _folder(folder)
    path = check_file(cache, read_object(folder / "config.json", "a model's config"), folder)
    keep(path, KeptCheck(software, code_rev, time.time(), found.exactness, refused))
    return path


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _processor(folder: Path) -> tuple[MediaProcessor | None, str]:
    """(processor, why there is none): structure and exactness hold without one that loads."""
    try:
        return MediaProcessor(load_processor(_folder(folder))), ""
    except ConfigError as error:
        return None, f"{error.what}; {error.hint}" if error.hint else error.what


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' warnings about weights that are not loaded; on one thread, as matrices are tiny."""
    from transformers import logging

    before, num_threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.set_verbosity(before)
        torch.set_num_threads(num_threads)


def structure_of(config: Any, where: str) -> Structure:
    """As `read_structure`.

    Raises:
        ConfigError: transformers cannot run the config's text model.
    """
    try:
        return read_structure(config)
    except LookupError as error:
        raise ConfigError(
            f"`model_type`: the text model of a `{config.model_type}` cannot be cut: {error}", where=where,
            hint="use a model with a plain stack of decoder layers",
        ) from error  # fmt: skip
    except ImportError as error:
        raise ConfigError(f"the model's classes need a package: {reason(error)}", where=where) from error
    except Exception as error:  # whatever transformers makes of entries that contradict each other
        if not is_of_model(error):
            raise
        raise ConfigError(
            f"transformers cannot make or run a model of this config: {reason(error)}", where=where,
            hint="the config contradicts itself or lacks an entry; compare it with the release's",
        ) from error  # fmt: skip
