"""Costs of samples with images, videos and audio from what lies on disk: no store, no job, nothing timed.

A model's `config.json` says how media become tokens, headers of media files say how large they are, its tokenizer
counts the texts, and a device's data sheet turns the sizes into seconds. Only their proportions matter to a sampler.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflop.errors import ConfigError, DataError
from dflop.sampler.costs_of_samples import SampleCosts, sample_costs_from_tables

if TYPE_CHECKING:
    from dflop.data.shapes import ShapeRules
    from dflop.records import QuarantinedSample, SampleShape

BLOCK_ROWS = 256
_ANY_LENGTH = 2**40
_log = logging.getLogger(__name__)


def media_costs(
    model: Path | str,
    dataset: Path | str | Sequence[Any],
    *,
    device: str = "h100",
    media_root: Path | str | None = None,
    tokenizer: Path | str | None = None,
    max_tokens: int | None = None,
    frozen: Collection[str] = (),
    recompute: bool = False,
    tp: int = 1,
    num_workers: int = 1,
) -> SampleCosts:
    """Seconds of every sample by a data sheet, encoders included; samples that cannot be read are left out.

    Args:
        model: Folder of a Hugging Face model, or its `config.json`.
        dataset: File of rows, or the rows: a Hugging Face dataset, or mappings with a position each.
        device: Whose data sheet: a100, a100-40, h100, h200 or b200.
        media_root: That paths of media are relative to; None: the file's folder, or the working directory.
        tokenizer: Folder of `tokenizer.json` and chat template, if it is not the model's.
        max_tokens: Where the trainer cuts samples off; None: nowhere.
        frozen: Modules whose weights do not train.
        recompute: Whether layers run again in the backward pass (gradient checkpointing).
        tp: Tensor-parallel ranks a replica consists of.
        num_workers: Processes that read a file of rows.

    Raises:
        ConfigError: the model or the device is not known, or there is no tokenizer that fits.
        DataError: the data cannot be read, or no sample of them.
    """
    try:
        from dflop.cost.analytic import analytic_cost_tables
        from dflop.cost.devices import find_device
        from dflop.data.model_tokenizer import find_tokenizer
        from dflop.data.shapes import ShapeRules
        from dflop.data.tokens import ChatTokenizer
        from dflop.models.hub import read_hub_model
    except ModuleNotFoundError as error:
        raise ConfigError(f"media_costs needs the package {error.name}", hint="pip install 'dflop[plan]'") from error

    sheet, config = find_device(device), Path(model)
    config = config / "config.json" if config.is_dir() else config
    family = read_hub_model(config).family
    folders = (Path(tokenizer), config.parent) if tokenizer else (config.parent,)
    found = find_tokenizer(folders, family)
    if found.path is None or found.problem:
        raise ConfigError(
            found.problem, where=str(config.parent), hint="tokenizer=: a folder with the model's tokenizer.json"
        )
    rules = ShapeRules(
        "", family, ChatTokenizer(found.path, family, found.template), max_tokens or _ANY_LENGTH,
        ("truncate",) if max_tokens else (), min_side_px=2,
    )  # fmt: skip
    if isinstance(dataset, Path | str):
        path = Path(dataset)
        shapes, bad = _of_file(path, Path(media_root or path.parent), rules, found.path, found.template, num_workers)
    else:
        shapes, bad = _of_rows(dataset, Path(media_root or "."), rules)
    _check(shapes, bad, str(dataset) if isinstance(dataset, Path | str) else type(dataset).__name__)
    tables = analytic_cost_tables(family.specs(), sheet, profile_key="", frozen=frozen, recompute=(recompute,))
    costs = sample_costs_from_tables(tables, shapes, frozen=frozen, recompute=recompute, tp=tp)
    # Which tokens carry loss is the trainer's business: its own template and collator decide.
    return replace(costs, supervised=None, index=costs.index if bad else None, origin=sheet.source)


def _of_file(
    path: Path, media_root: Path, rules: ShapeRules, tokenizer: Path, template: str, num_workers: int
) -> tuple[list[SampleShape], list[QuarantinedSample]]:
    from dflop.data.dataset_profile import DatasetRef, profile_shard

    dataset = replace(
        DatasetRef.of_file(path, media_root, tokenizer, rules.max_llm_tokens),
        chat_template=template,
        overlong=rules.overlong,
    )
    return profile_shard(dataset, rules.media, 0, 1, _log.info, key="media", num_workers=num_workers)


def _of_rows(
    rows: Sequence[Any], media_root: Path, rules: ShapeRules
) -> tuple[list[SampleShape], list[QuarantinedSample]]:
    from dflop.data.annotations import BadSample
    from dflop.data.formats.row_source import RowSource
    from dflop.data.frame_files import header_of_source
    from dflop.data.shapes import shapes_of
    from dflop.records import QuarantinedSample, SampleShape

    given = _undecoded(rows)

    class Rows(RowSource):
        def __len__(self) -> int:
            return len(given)

        def row(self, index: int) -> dict[str, Any]:
            return dict(given[index])

    source = Rows(Path("rows"))

    def sample(index: int) -> Any:
        try:
            return source.sample(index)
        except BadSample as error:
            return error

    found: list[SampleShape | QuarantinedSample] = []
    for first in range(0, len(given), BLOCK_ROWS):
        block = [(i, sample(i)) for i in range(first, min(first + BLOCK_ROWS, len(given)))]
        found += shapes_of(
            block, rules, lambda i, ref: header_of_source(ref.kind, source.open_media(i, ref, media_root))
        )
    return (
        [x for x in found if isinstance(x, SampleShape)],
        [x for x in found if isinstance(x, QuarantinedSample)],
    )


def _undecoded(rows: Any) -> Any:
    """A Hugging Face dataset with columns that hand out files and bytes, not decoded media."""
    for name, feature in (getattr(rows, "features", None) or {}).items():
        plain = copy.deepcopy(feature)
        inner = getattr(plain, "feature", plain)
        if getattr(inner, "decode", False):
            inner.decode = False
            rows = rows.cast_column(name, plain)
    return rows


def _check(shapes: Sequence[SampleShape], bad: Sequence[QuarantinedSample], where: str) -> None:
    first = f"row {bad[0].sample_index}: {bad[0].reason}" if bad else "it is empty"
    if not shapes:
        raise DataError(f"no sample can be read, {first}", where=where, hint="media_root=: the folder of the media")
    if bad:
        _log.warning("%d of %d samples are left out; %s", len(bad), len(bad) + len(shapes), first)
