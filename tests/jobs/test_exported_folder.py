"""What a run exports is used by transformers' automatic classes: processor and answer of every family."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from dflop.jobs.weights import export_run
from dflop.models import family_class
from tests.jobs.answering import SUBJECTS, begin_run, forget, save_checkpoints, write_source, write_tokenizer
from tests.models.conftest import ask_processor  # noqa: F401, fixture
from tests.train.ranks import run_ranks

pytestmark = pytest.mark.lane("jobs")
QUESTION = "what is this?"
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def runs(ask_processor, tmp_path_factory):  # noqa: F811
    """By subject: a run whose model had a folder, which is gone, and one of a model that is a config of numbers."""
    made, folder = {}, tmp_path_factory.mktemp("families")
    for name, subject in SUBJECTS.items():
        published, numbers = folder / name / "published", folder / name / "numbers"
        write_source(subject, published / "source", ask_processor)
        first = begin_run(subject, published, published / "source", str(published / "source" / "chat_template.jinja"))
        write_tokenizer(subject, numbers / "source")
        second = begin_run(subject, numbers, numbers / "source", "chatml")
        made[name] = first, second
    run_ranks(save_checkpoints, 1, folder, [run for pair in made.values() for run in pair])
    for name in SUBJECTS:
        forget(folder / name / "published" / "source")
        forget(folder / name / "numbers" / "source")
    return made


def ask_for_answer(ask, subject, folder, where):
    """What transformers says of a picture or a sound, and of no media."""
    kind = "audio" if subject.family == "qwen2_audio" else "image"
    path = where / ("a.npy" if kind == "audio" else "a.png")
    if kind == "audio":
        np.save(path, np.sin(np.arange(9600, dtype=np.float32) / 9))
    else:
        Image.effect_noise((84, 56), 60).convert("RGB").save(path)
    content = [{"type": kind, kind: str(path)}, {"type": "text", "text": QUESTION}]
    said = ask(
        subject.family, options={}, generate_by=str(folder), auto=subject.auto, num_tokens=NUM_TOKENS,
        messages=[{"role": "user", "content": content}],
        images=[str(path)] * (kind == "image"), audio=[str(path)] * (kind == "audio"),
    )  # fmt: skip
    assert said.get("error") is None
    return said


@pytest.mark.parametrize("name", SUBJECTS)
def test_transformers_answers_with_what_every_family_exports(name, runs, ask_processor, tmp_path):  # noqa: F811
    subject, told = SUBJECTS[name], []
    of_folder, of_numbers = runs[name]
    export_run(of_folder, tmp_path / "out", told.append)
    assert told == ["checkpoint of 3 steps of 40"]
    said = ask_for_answer(ask_processor, subject, tmp_path / "out", tmp_path)
    assert len(said["said"]) == NUM_TOKENS
    export_run(of_numbers, tmp_path / "made", told.append)
    assert "no model's folder had tokenizer_config.json, generation_config.json, processor_config.json" in told[-1]
    again = ask_for_answer(ask_processor, subject, tmp_path / "made", tmp_path)
    assert again["class"] == said["class"]
    assert again["said"]
    pads = {tokens.pad for tokens in family_class(subject.family).media_tokens.values()}
    ids = {Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).token_to_id(pad) for pad in pads}
    rows = [sum(token in ids for token in of["prompt"]) for of in (said, again)]
    assert rows[0] == rows[1] > 1
