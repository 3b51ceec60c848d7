"""Real files through reader, workers and feed: who reads what, and what becomes of files that changed meanwhile."""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from dflop.data.dataset_profile import DatasetRef, profile_shard
from dflop.data.demo_content import write_audio, write_video
from dflop.data.mixture import Dataset
from dflop.data.tokens import ChatTokenizer
from dflop.jobs.sample_source import DatasetSource
from dflop.models.build import cut_stage
from dflop.parallel.topology import seats
from dflop.records import LLM
from dflop.train.feed import Feed
from dflop.train.prefetch import Prefetcher
from tests.models.whole_model import build_model
from tests.train.synthetic import HF_CONFIG, family, make_inline_plan, make_plan, make_step_plan

ROWS = [["image"], ["audio"], [], ["image", "image"], ["video"], ["image", "audio"], ["video", "image"], []]


def write_image(path, size=(60, 40), seed=0):
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)).save(path)


def write_clip(path, num_frames=10, size=(64, 48)):
    write_video([np.full((size[1], size[0], 3), 9 * i, np.uint8) for i in range(num_frames)], path, Fraction(10))


def write_tone(path, duration_s=2.0):
    write_audio(np.sin(np.arange(int(16_000 * duration_s)) / 5).astype(np.float32) / 2, path)


WRITERS = {"image": (write_image, "png"), "video": (write_clip, "mp4"), "audio": (write_tone, "flac")}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder of rows with the media of `ROWS`, every item in a file of its own: `<row>-<place>.<suffix>`."""
    folder, lines = tmp_path_factory.mktemp("written"), []
    for number, kinds in enumerate(ROWS):
        row, text = {"id": f"row-{number}"}, "look at the cat"
        for place, kind in enumerate(kinds):
            write, suffix = WRITERS[kind]
            name = f"{number}-{place}.{suffix}"
            write(folder / name)
            row.setdefault(kind, []).append(name)
            text = f"<{kind}>{text}"
        row["conversations"] = [{"from": "human", "value": text}, {"from": "gpt", "value": "the cat sat"}]
        lines.append(json.dumps(row))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def shapes(written, tokenizer_path):
    return profile_shard(dataset_in(written, tokenizer_path), family(), 0, 1)[0]


@pytest.fixture
def dataset(written, tmp_path, tokenizer_path):
    """A copy that a test may damage."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return dataset_in(tmp_path, tokenizer_path)


def dataset_in(folder, tokenizer_path):
    return DatasetRef.of_file(folder / "rows.jsonl", folder, tokenizer_path, 4096)


@pytest.fixture
def prepare():
    """Prepares a step on some ranks of a plan; with workers where their number is not 0."""
    prefetchers = []

    def run(source, plan, step_plan, ranks, num_workers=0, llm_stage=None):
        found = {}
        for seat in seats(plan):
            if seat.rank in ranks:
                ahead = None
                if num_workers:
                    ahead = Prefetcher(source.reader, num_workers, timeout_s=60, max_ahead_bytes=0)
                    prefetchers.append(ahead)
                stage = {LLM: llm_stage} if seat.part(LLM) else {}
                found[seat.rank] = Feed(source, family(), plan, seat, stage, prefetcher=ahead).prepare(step_plan)
        return found

    yield run
    for prefetcher in prefetchers:
        prefetcher.close()


@pytest.fixture(scope="module")
def llm_stage(written, tokenizer_path):
    """A decoder that knows the dataset's tokens."""
    dataset = dataset_in(written, tokenizer_path)
    tokenizer = ChatTokenizer(dataset.tokenizer, family(), dataset.chat_template)
    config = {**HF_CONFIG, **family().token_ids(tokenizer.special_ids)}
    config["text_config"] = {**HF_CONFIG["text_config"], "vocab_size": tokenizer.vocab_size}
    return cut_stage(build_model(family(), config, seed=0, dtype=torch.float32), family(), LLM, (0, 1))


PLANS = {
    "split": make_plan({"vision": (1, 2), "audio": (1, 1), LLM: (2, 2)}, num_microbatches=3),
    "split, tensor parallel": make_plan({"vision": (1, 1, 2), "audio": (1, 1), LLM: (1, 1, 2)}, num_microbatches=2),
    "inline": make_inline_plan([{"vision": 2}, {"audio": 2, LLM: 2}, {LLM: 2}], dp=2, num_microbatches=2),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_opens_only_the_files_of_its_own_samples_that_its_stages_take(
    dataset, shapes, llm_stage, prepare, monkeypatch, name
):
    plan = PLANS[name]
    step_plan, source = make_step_plan(plan, shapes, 0), DatasetSource(dataset, family(), shapes)
    opened, read = [], []
    open_media, sample = Dataset.open_media, Dataset.sample
    monkeypatch.setattr(Dataset, "open_media", lambda s, i, ref: (opened.append(ref.path), open_media(s, i, ref))[1])
    monkeypatch.setattr(Dataset, "sample", lambda s, i: (read.append(i), sample(s, i))[1])
    everything = []
    for seat in seats(plan):
        opened.clear(), read.clear()
        prepare(source, plan, step_plan, {seat.rank}, llm_stage=llm_stage)
        files, rows = [], []
        for work in step_plan.work:
            part = seat.part(work.module)
            mine = [i for slot in work.owner for i in slot[seat.dp_rank]] if part else []
            if work.module == LLM:
                rows = [step_plan.sample_index[work.item_sample[i]] for i in mine]
            elif part is not None and part.is_first:
                files += [shapes[work.item_sample[i]].items[work.item_rank_in_sample[i]].path for i in mine]
        assert sorted(opened) == sorted(files)
        assert sorted(read) == sorted(rows)
        everything += opened if seat.tp_rank == 0 else []
    assert sorted(everything) == sorted(i.path for s in shapes for i in s.items), "every file once in the whole step"


def become_a_folder(path):
    path.unlink()
    path.mkdir()


def become_a_pipe(path):
    path.unlink()
    os.mkfifo(path)  # opening it would wait for ever


def rewritten(**arguments):
    """By another file of the same kind, with these arguments of its writer."""

    def rewrite(path):
        (kind,) = (kind for kind, (_, suffix) in WRITERS.items() if path.suffix == f".{suffix}")
        WRITERS[kind][0](path, *arguments[kind])

    return rewrite


DAMAGES = {
    "deleted": (lambda path: path.unlink(), "file not found"),
    "empty": (lambda path: path.write_bytes(b""), "empty file"),
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size // 2), "broken|truncated|video ends after|damaged|No more",
    ),
    "text": (
        lambda path: path.write_text("<html>404 Not Found</html>\n" * 20),
        "not an image|broken container|no audio samples",
    ),
    "folder": (become_a_folder, "not a regular file"),
    "pipe": (become_a_pipe, "not a regular file"),
    "another": (
        rewritten(image=((40, 60),), video=(4,), audio=(7.0,)),
        "but was profiled as|video ends after 4 frames|audio is longer than",
    ),
    "larger": (
        rewritten(image=((600, 400),), video=(10, (128, 96)), audio=(60.0,)),
        "but was profiled as|audio is longer than",
    ),
}  # fmt: skip
DECODED = ("truncated", "text", "another", "larger")
"""The damages that only the decoder of a kind of media can see."""


@pytest.mark.parametrize(
    ("name", "damage", "num_workers"),
    [
        *(("3-1.png", damage, 0) for damage in DAMAGES), ("3-1.png", "deleted", 2), ("3-1.png", "another", 2),
        *((name, damage, 0) for name in ("4-0.mp4", "1-0.flac") for damage in DECODED),
    ],
)  # fmt: skip
def test_a_file_that_changed_since_the_profile_costs_its_own_sample(
    dataset, shapes, prepare, tmp_path, damage, name, num_workers
):
    hurt, reason = DAMAGES[damage]
    plan = make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (1, 1)}, num_microbatches=2)
    step_plan, source = make_step_plan(plan, shapes, 0), DatasetSource(dataset, family(), shapes)
    rank, module = (1, "audio") if name.endswith("flac") else (0, "vision")
    before = prepare(source, plan, step_plan, {rank})[rank]
    assert before.bad_samples == {}
    hurt(tmp_path / name)
    after = prepare(source, plan, step_plan, {rank}, num_workers)[rank]
    ((position, (path, found)),) = after.bad_samples.items()
    assert (shapes[position].sample_id, path) == (f"row-{name[0]}", name)
    assert any(text in found for text in reason.split("|")), found
    num_zeroed = 0
    for mine, reference in zip(after.microbatches, before.microbatches, strict=True):
        if mine is None:
            continue
        mine, reference = mine.encoders[module], reference.encoders[module]
        assert mine.data.shape == reference.data.shape
        differs = mine.data != reference.data
        assert not mine.data[differs].any()
        num_zeroed += int(differs.sum())
    assert num_zeroed > 0


def test_every_hostile_file_that_passed_the_profile_is_trained_on_or_left_out(
    shared_media, tokenizer_path, prepare, tmp_path
):
    of_files = [row for row in (shared_media / "hostile.jsonl").read_text().splitlines() if '"hostile/' in row]
    (tmp_path / "rows.jsonl").write_text("\n".join(of_files))
    dataset = DatasetRef.of_file(tmp_path / "rows.jsonl", shared_media, tokenizer_path, 8192)
    shapes, _ = profile_shard(dataset, family(), 0, 1)
    plan = make_plan({"vision": (1, 1), LLM: (1, 1)}, num_microbatches=2)
    step_plan, source = make_step_plan(plan, shapes, 0), DatasetSource(dataset, family(), shapes)
    found = prepare(source, plan, step_plan, {0})[0]
    assert {shapes[p].sample_id for p in found.bad_samples} == {"hostile-truncated", "hostile-bitflips"}
    stage = cut_stage(build_model(family(), {**HF_CONFIG}, seed=0, dtype=torch.float32), family(), "vision", (0, 2))
    given = [m.encoders["vision"] for m in found.microbatches if m is not None]
    assert given
    for encoder_input in given:
        with torch.no_grad():
            assert len(stage(encoder_input.data, encoder_input.sizes)) == encoder_input.num_rows
