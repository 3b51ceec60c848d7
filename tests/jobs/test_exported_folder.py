"""What a run exports answers by transformers' automatic classes, for every family, and `dflop chat` says the same."""

from __future__ import annotations

import wave

import numpy as np
import pytest
from PIL import Image

from dflop.jobs.chat import answer, model_of_folder, model_of_run
from dflop.jobs.weights import export_run
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


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    """A picture and a sound."""
    folder = tmp_path_factory.mktemp("media")
    Image.effect_noise((84, 56), 60).convert("RGB").save(folder / "a.png")
    sound = (np.sin(np.arange(9600) / 9) * 20000).astype(np.int16)
    with wave.open(str(folder / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, len(sound), "NONE", ""))
        file.writeframes(sound.tobytes())
    np.save(folder / "a.npy", sound.astype(np.float32) / 2**15)
    return folder


def ask_transformers(ask, subject, folder, media):
    """What the model of a folder says of a picture or a sound."""
    kind = "audio" if subject.family == "qwen2_audio" else "image"
    path = media / {"audio": "a.npy", "image": "a.png"}[kind]
    content = [{"type": kind, kind: str(path)}, {"type": "text", "text": QUESTION}]
    said = ask(
        subject.family, options={}, generate_by=str(folder), auto=subject.auto, num_tokens=NUM_TOKENS,
        messages=[{"role": "user", "content": content}],
        images=[str(path)] * (kind == "image"), audio=[str(path)] * (kind == "audio"),
    )  # fmt: skip
    assert said.get("error") is None
    return said


def hold_equal(chat, said, media):
    """Against what `dflop chat` answers."""
    kind = next(iter(chat.family.media_tokens))
    found = answer(chat, QUESTION, [media / {"audio": "a.wav", "image": "a.png"}[kind]], max_tokens=NUM_TOKENS)
    assert found.num_prompt_tokens == len(said["prompt"])
    ids = said["said"]
    assert found.text == chat.tokenizer.decode(ids[:-1] if found.is_complete else ids)
    assert found.num_tokens == len(ids)


@pytest.mark.parametrize("name", SUBJECTS)
def test_transformers_answers_with_what_every_family_exports(name, runs, ask_processor, media, tmp_path):  # noqa: F811
    subject, told = SUBJECTS[name], []
    of_folder, of_numbers = runs[name]
    export_run(of_folder, tmp_path / "out", told.append)
    assert told == ["checkpoint of 3 steps of 40"]
    said = ask_transformers(ask_processor, subject, tmp_path / "out", media)
    assert len(said["said"]) == NUM_TOKENS
    hold_equal(model_of_run(of_folder, print), said, media)
    hold_equal(model_of_folder(tmp_path / "out"), said, media)
    export_run(of_numbers, tmp_path / "made", told.append)
    assert "no model's folder had tokenizer_config.json, generation_config.json, processor_config.json" in told[-1]
    again = ask_transformers(ask_processor, subject, tmp_path / "made", media)
    assert again["class"] == said["class"]
    hold_equal(model_of_run(of_numbers, print), again, media)
