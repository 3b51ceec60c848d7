"""The profiles of a run, of its data and of its modules: found in the store, or made by jobs, and judged."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflop.config import Config
from dflop.data.dataset_profile import dataset_keys
from dflop.data.distribution import summary_text
from dflop.data.size_table import check_overlong
from dflop.errors import DataError
from dflop.launch import JobSpec, Launcher
from dflop.profile.groups import used_modules
from dflop.records import ModuleSpec, ProfileRecord, QuarantinedSample
from dflop.run.batches import TRAIN
from dflop.run.directory import RunDir, dataset_ref, family_of
from dflop.run.messages import Meter, Say
from dflop.run.training_claim import num_attempts
from dflop.steps import planning, submit
from dflop.steps.follow import Listener, follow_jobs, ingest_run
from dflop.store.console import named_query, query
from dflop.store.ingest import ingest
from dflop.store.profile_copy import copy_profile
from dflop.store.profile_frames import profile_frame
from dflop.store.reader import Reader
from dflop.store.spool import spool_rows
from dflop.units import count

Counts = Mapping[str, float]
"""What a job counted: of measurements, or of samples."""

MAX_EXAMPLES = 5
_ROWS = "rows"
"""In the inputs of a data profile: `DatasetKeys.rows` of its dataset."""
MAX_PROFILES = 4
"""Older profiles tried as what a dataset has grown from: each costs a hash of the files."""
_TOO_LONG = re.compile(r"sample too long: (\d+) tokens > max_llm_tokens (\d+)")
_NUMBER = re.compile(r"[0-9a-f]{12,}|\d+")
MAX_REASONS = 5
SHORTEN = "raise dataset.max_llm_tokens, or shorten longer rows with dataset.overlong: [shrink] or [shrink, truncate]"


@dataclass(frozen=True, slots=True)
class DataKey:
    """Which profile a run's samples have, worked out once: that reads every row."""

    key: str
    inputs: Mapping[str, object]
    """What the key is made of, for people."""
    base: ProfileRecord | None = None
    """A profile in the store of the first rows: they are taken from there."""
    num_new_rows: int = 0
    """After those."""

    def __str__(self) -> str:
        return self.key


def data_profile_key(run: RunDir, say: Say) -> DataKey:
    """Key of the profile of a run's samples; once training has begun they stay what they were.

    The order of samples hangs on which of them there are. A media file that has changed since costs its own sample,
    when it is decoded; rows that have changed would be other samples under old numbers.

    Raises:
        DataError: the dataset cannot be read, or its rows or tokenizer have changed under a run that trains on them.
    """
    config = run.config()
    dataset, family, stated = dataset_ref(config), family_of(config), config.model.media
    if dataset.sizes is not None:
        check_overlong(dataset.overlong)  # known from the configuration: no job need find out
    known = {} if _has_begun(run) else _profiles(config)
    num_rows = {key: p.num_rows + p.num_quarantined for key, p in known.items()}
    keys = dataset_keys(dataset, family, num_rows, Meter(say))
    inputs = {
        "annotations": str(config.dataset.annotations),
        "family": family.name,
        _ROWS: keys.rows,
        "limits": {k: [v, "model.media" if k in stated else "default"] for k, v in family.media.items()},
    }
    if not _has_begun(run) or keys.profile == (kept := run.profile_key()):
        return DataKey(keys.profile, inputs, known.get(keys.base), keys.num_rows - keys.num_base_rows)
    found = stored_profile(config.store, kept)
    before = json.loads(found.inputs).get(_ROWS) if found is not None else None
    if before is not None and before != keys.rows:
        raise DataError(
            "the rows of the dataset, its tokenizer or chat template differ from those at the start of training",
            where=str(config.dataset.annotations),
            hint="restore the files; or train on the new ones as a new run, under another `name`",
        )
    say(
        "files of the dataset have changed since training began; the run keeps its samples and their order, and "
        "samples whose files differ from the profile carry no loss"
    )
    return DataKey(kept, inputs)


def _profiles(config: Config) -> dict[str, ProfileRecord]:
    """The newest data profiles by key, those of the same annotations before others: no key is tried without end."""
    ingest(config.store)
    with Reader(config.store) as reader:
        found = reader.records(ProfileRecord, where={"kind": "data"})
    ours = json.dumps(str(config.dataset.annotations))
    found.sort(key=lambda p: (f'"annotations": {ours}' in p.inputs, p.created_at_s), reverse=True)
    return {p.profile_key: p for p in found[:MAX_PROFILES]}


def _has_begun(run: RunDir) -> bool:
    """Whether a run has trained: the order of its samples is made from those that are in its directory."""
    return num_attempts(run, TRAIN) > 0 and (run.path / "shapes.parquet").is_file()


async def profile_data(run: RunDir, launcher: Launcher, to: Listener, key: DataKey) -> ProfileRecord:
    """The profile of the run's dataset, out of the store or from jobs over shards of the rows that are not in it.

    Raises:
        DataError: the dataset cannot be read, or has changed under a run that trains on it.
        LaunchError: a job failed.
    """
    config = run.config()
    found = await asyncio.to_thread(stored_profile, config.store, key.key)
    if found is not None:
        to.say(f"data profile {key} is in the store: {found.num_rows} samples, reused")
        return found
    if _has_begun(run) and key.key == run.profile_key():  # the store has lost it; the run goes on with what it has
        return ProfileRecord(key.key, "data", run.run_id, "{}", len(run.shapes()), 0, time.time(), 0.0)
    started_s, base, first_row, counts = time.time(), key.base, 0, list[Counts]()
    if base is not None and await asyncio.to_thread(_reuse, run, key, base):
        first_row = base.num_rows + base.num_quarantined
        counts = [{"num_samples": base.num_rows, "num_quarantined": base.num_quarantined}]
        num_rows = f"{count(first_row)} of {count(first_row + key.num_new_rows)} rows"
        to.say(f"{num_rows} from profile {base.profile_key}, {count(key.num_new_rows)} profiled")
    jobs = submit.data_jobs(run, config, key.key, launcher.backend, first_row, key.num_new_rows)
    counts += [ranks[0] for ranks in await follow_jobs(run, launcher, jobs, to)]
    record = note_profile(run, key.key, "data", counts, time.time() - started_s, key.inputs)
    await ingest_run(run, to.say)
    return record


def _reuse(run: RunDir, key: DataKey, base: ProfileRecord) -> bool:
    """Writes rows of a profile again, under the key of the dataset that has grown since; False where some are lost."""
    config, dataset = run.config(), dataset_ref(run.config())
    weights = dataset.open().weights() if dataset.entries[0].weight is not None else None  # they depend on all rows
    return copy_profile(config.store, base, key.key, run.run_id, weights)


def take_samples(run: RunDir, data: ProfileRecord, say: Say) -> None:
    """Judges a profile, and brings its healthy samples into the run directory, where jobs look for them.

    Raises:
        DataError: more of the dataset is unusable than `data_profile.max_bad_frac` allows.
    """
    judge(run, data, say)
    store = run.config().store
    if not _has_begun(run):
        with Reader(store) as reader:
            run.write_shapes(reader.shapes(data.profile_key))
    summary = summary_text(profile_frame(store, data.profile_key))
    say(f"{data.num_rows} valid samples, {data.num_quarantined} skipped\n{summary}")


def judge(run: RunDir, profile: ProfileRecord, say: Say) -> None:
    """Says what is odd about a profile, and which rows it skips; stops the run where too many are unusable.

    Raises:
        DataError: more of the dataset is unusable than `data_profile.max_bad_frac` allows.
    """
    config = run.config()
    _, duplicates = query(config.store, named_query("duplicate_ids").sql, {"profile_key": profile.profile_key})
    if duplicates:
        shown = ", ".join(str(row[0]) for row in duplicates[:3]) + (", ..." if len(duplicates) > 3 else "")
        say(f"{len(duplicates)} sample ids occur more than once (all rows kept): {shown}")
    total = profile.num_rows + profile.num_quarantined
    if not profile.num_quarantined:
        return
    with Reader(config.store) as reader:
        bad = reader.records(QuarantinedSample, where={"profile_key": profile.profile_key, "phase": "profile"})
    bad = sorted({b.sample_index: b for b in bad}.values(), key=lambda b: b.sample_index)
    for line in skipped_text(bad, total):
        say(line)
    if profile.num_quarantined <= config.data_profile.max_bad_frac * total:
        return
    examples = "\n".join(f"    row {b.sample_index} `{b.sample_id}`: {b.path} {b.reason}" for b in bad[:MAX_EXAMPLES])
    raise DataError(
        f"{profile.num_quarantined} of {total} rows are skipped, more than max_bad_frac = "
        f"{config.data_profile.max_bad_frac:g}; the first ones:\n{examples}",
        where=str(config.dataset.annotations),
        hint=hint_for(bad),
    )


async def profile_model(run: RunDir, launcher: Launcher, to: Listener, data: ProfileRecord) -> ProfileRecord:
    """Measurements of every module over the run's shapes, and of messages, out of the store or from jobs.

    They are submitted together, but after the data profile: the sizes that they probe are drawn from the run's samples.
    A profile that does not determine every cost table that the run needs gets the probes that are missing.

    Args:
        run: The run; its samples are in its directory.
        launcher: Of its jobs.
        to: Receives their progress.
        data: Profile of the samples.

    Raises:
        LaunchError: a job failed; raised when all have ended.
    """
    config = run.config()
    key, hardware, inputs = await asyncio.to_thread(planning.model_profile_key, config)
    specs = await asyncio.to_thread(specs_of, run)

    async def measure(jobs: Sequence[JobSpec], *before: Counts) -> ProfileRecord:
        to.say(f"profiling on {hardware}, over samples of data profile {data.profile_key}")
        started_s, counts = time.time(), [*before]
        for group in submit.in_turns(config, jobs):
            counts += [ranks[0] for ranks in await follow_jobs(run, launcher, group, to)]
        record = note_profile(run, key, "model", counts, time.time() - started_s, inputs)
        await ingest_run(run, to.say)
        return record

    found = await asyncio.to_thread(stored_profile, config.store, key)
    if found is None:
        found = await measure(submit.model_jobs(run, config, key, hardware, [spec.module for spec in specs]))
    else:
        to.say(f"model profile {key} is in the store: {found.num_rows} measurements, reused")
    gaps = await asyncio.to_thread(planning.profile_gaps, config, key, specs)
    for gap in gaps:
        why = "it was not probed" if gap.is_unprobed else f"needed: {gap.missing}"
        to.say(f"model profile {key} determines no cost table of `{gap.module}`, tp {gap.tp}; {why}: adding probes")
    if gaps:
        jobs = submit.missing_jobs(run, config, key, hardware, gaps, int(found.created_at_s))
        found = await measure(jobs, {"num_measurements": found.num_rows})
    return found


def is_profiled(run: RunDir) -> bool:
    """Whether the store has all measurements that the run needs; its samples are in the run directory."""
    config = run.config()
    key, *_ = planning.model_profile_key(config)
    return stored_profile(config.store, key) is not None and not planning.profile_gaps(config, key, specs_of(run))


def specs_of(run: RunDir) -> tuple[ModuleSpec, ...]:
    """Modules that the run's samples use."""
    return used_modules(planning.bound_family(run.config()), run.shapes())


def stored_profile(store: Path, key: str) -> ProfileRecord | None:
    """The finished profile of this key; None also for a store that has never been written."""
    ingest(store)
    with Reader(store) as reader:
        return reader.profile(key)


def note_profile(
    run: RunDir, key: str, kind: str, counts: Sequence[Counts], elapsed_s: float,
    inputs: Mapping[str, object],
) -> ProfileRecord:  # fmt: skip
    """Spools the record that says a profile (`data` or `model`) is complete.

    `counts` is what its jobs counted, `elapsed_s` includes waiting, `inputs` say to people what the key is made of.
    """
    num_rows = sum(int(c.get("num_samples", c.get("num_measurements", 0))) for c in counts)
    num_quarantined = sum(int(c.get("num_quarantined", 0)) for c in counts)
    text = json.dumps(inputs)
    record = ProfileRecord(key, kind, run.run_id, text, num_rows, num_quarantined, time.time(), elapsed_s)
    spool_rows(run.config().store, run.run_id, "profile-record", [record])
    return record


def skipped_text(bad: Sequence[QuarantinedSample], num_rows: int) -> list[str]:
    """A line per reason, the most frequent first; reasons that differ in numbers only are one.

    Args:
        bad: Rows that were left out.
        num_rows: Of the dataset, those left out included.
    """
    lengths = [(int(found[1]), int(found[2])) for b in bad if (found := _TOO_LONG.match(b.reason))]
    lines = []
    if lengths:
        tokens, limit = sorted(length for length, _ in lengths), lengths[0][1]
        span = f"{tokens[0]:,}" if tokens[0] == tokens[-1] else f"{tokens[0]:,} to {tokens[-1]:,}"
        longer = f"{len(tokens)} of {num_rows} rows are longer ({span} tokens) and skipped"
        lines.append(f"dataset.max_llm_tokens: {limit}; {longer}; {SHORTEN}")
    others: dict[str, list[QuarantinedSample]] = {}
    for b in bad:
        if not _TOO_LONG.match(b.reason):
            others.setdefault(_NUMBER.sub("#", b.reason), []).append(b)
    ordered = sorted(others.values(), key=len, reverse=True)
    for alike in ordered[:MAX_REASONS]:
        first = alike[0]
        lines.append(f"{len(alike)} of {num_rows} rows are skipped, first row {first.sample_index}: {first.reason}")
    if rest := sum(map(len, ordered[MAX_REASONS:])):
        lines.append(f"{rest} rows are skipped for other reasons: dflop sql quarantine")
    return lines


def hint_for(bad: Sequence[QuarantinedSample]) -> str:
    """What to do about most of the rows that were left out."""
    num_long = sum(_TOO_LONG.match(b.reason) is not None for b in bad)
    return SHORTEN if 2 * num_long > len(bad) else "fix the dataset or raise data_profile.max_bad_frac"
