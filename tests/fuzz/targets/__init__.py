"""Every door to the outside, by name. A new one is a `Target` in one of these files."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets import (
    command_line,
    config,
    dataset,
    media,
    models,
    pages,
    plans,
    runs,
    slurm,
    sql,
    store,
    texts,
)

TARGETS: dict[str, Target] = {
    target.name: target
    for room in (config, dataset, texts, media, models, store, sql, plans, runs, slurm, command_line, pages)
    for target in room.TARGETS
}
