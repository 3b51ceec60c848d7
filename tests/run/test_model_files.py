"""What a run keeps of its model's folder, and what of that stands beside the weights it trained."""

from __future__ import annotations

import json

import pytest

from dflop.config import load_config
from dflop.run import lifecycle
from dflop.run.directory import family_of, tokenizer_of
from dflop.run.model_files import with_kept_tokenizer, write_model_files
from tests.jobs.configs import make_dataset, write_config

SHIPPED = ("preprocessor_config.json", "tokenizer_config.json", "merges.txt", "spiece.model", "generation_config.json")


@pytest.fixture
def folder(tmp_path):
    """The dataset's, which is the model's, too."""
    make_dataset(tmp_path)
    data = tmp_path / "data"
    for name in (*SHIPPED, "config.json", "model.safetensors.index.json", "model.safetensors", "rows.jsonl"):
        (data / name).write_text("{}")
    (data / "large.json").write_text(" " * (65 << 20))
    return data


def begin(tmp_path, *overrides):
    return lifecycle.begin(load_config(write_config(tmp_path), overrides))[0]


def kept(run):
    return {path.name for path in run.model_files.iterdir()}


def test_a_run_keeps_what_is_text_and_no_weights(tmp_path, folder):
    assert kept(begin(tmp_path)) == {"tokenizer.json", *SHIPPED}


def test_a_folder_without_a_models_config_gives_its_tokenizer_alone(tmp_path, folder):
    (folder / "config.json").unlink()
    assert kept(begin(tmp_path)) == {"tokenizer.json"}


def test_rows_that_lie_with_the_model_are_left_where_they_are(tmp_path, folder):
    (folder / "rows.json").write_text("[]")
    assert "rows.json" not in kept(begin(tmp_path, f"dataset.annotations={folder}/rows.json"))


def test_processors_come_with_the_weights_and_the_tokenizer_from_its_own_folder(tmp_path, folder):
    (weights := tmp_path / "weights").mkdir()
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json", "vocab.json"):
        (weights / name).write_text(json.dumps({"of": "weights"}))
    run = begin(tmp_path, f"model.weights={weights}")
    assert "vocab.json" not in kept(run)
    assert json.loads((run.model_files / "preprocessor_config.json").read_text()) == {"of": "weights"}
    assert json.loads((run.model_files / "tokenizer_config.json").read_text()) == {}


def test_what_is_gone_since_is_written_as_it_was(tmp_path, folder):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ other }}", "kept": 1}))
    run = begin(tmp_path, f"dataset.chat_template={folder}/chat_template.json")
    before = (folder / "tokenizer.json").read_bytes()
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    config = with_kept_tokenizer(run.config(), run)
    (out := tmp_path / "out").mkdir()
    assert write_model_files(run, config, family_of(config), tokenizer_of(config), out) == []
    assert (out / "tokenizer.json").read_bytes() == before
    assert (out / "chat_template.jinja").read_text() == template
    assert not (out / "chat_template.json").exists()
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"kept": 1}


def test_limits_of_training_that_the_processor_states_otherwise_are_told(tmp_path, folder):
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"max_pixels": 4096, "min_pixels": 784, "do_resize": False})
    )
    run = begin(tmp_path, "model.media.min_pixels=784", "model.media.max_pixels=8000")
    config = run.config()
    (out := tmp_path / "out").mkdir()
    told = write_model_files(run, config, family_of(config), tokenizer_of(config), out)
    assert told[0].startswith("trained otherwise: preprocessor_config.json: do_resize = False is not supported")
    assert told[1:] == ["trained with max_pixels 8000; the processor has 4096 (preprocessor_config.json: max_pixels)"]
