"""Names and addresses of the Hugging Face hub: what to type, and what `--download` fetches."""

import json
from pathlib import Path

import pytest

from dflop.errors import ConfigError
from dflop.starter.hub_files import local, model_config
from tests.test_cli import dflop

NAME = "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with two models."""
    monkeypatch.chdir(tmp_path)
    for name in ("qwen", "more/intern"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def fetched(monkeypatch):
    """What would be downloaded."""
    calls = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **named: calls.append((args, named)))
    return calls


def test_a_name_of_the_hub_is_told_with_its_command_and_the_models_nearby(here):
    with pytest.raises(ConfigError, match=f"`{NAME}` is no file or folder here") as raised:
        local(Path(NAME), print, is_dataset=False, downloads=False)
    assert f"hf download {NAME} --local-dir Qwen2.5-VL-7B-Instruct; or add --download" in raised.value.hint
    assert raised.value.hint.endswith("folders with a config.json: more/intern, qwen")


def test_what_is_there_or_mistyped_is_left_as_it_is(here, fetched):
    for given in ("more/intern", "more/intrn", "qwen", "rows.jsonl"):
        assert local(Path(given), print, is_dataset=False, downloads=True) == Path(given)
    assert fetched == []


def test_a_model_comes_without_its_weights_unless_they_are_trained(here, fetched):
    assert local(Path(NAME), print, is_dataset=False, downloads=True) == Path("Qwen2.5-VL-7B-Instruct")
    local(Path(f"https://huggingface.co/{NAME}"), print, is_dataset=False, downloads=True, with_weights=True)
    assert [args for args, _ in fetched] == [(NAME,)] * 2
    assert [named["allow_patterns"] for _, named in fetched] == [["*.json", "*.jinja", "*.model", "*.txt"], None]


def test_a_dataset_or_a_part_of_it_is_fetched(here, fetched):
    found = local(Path("hf://datasets/me/set@v2/data"), print, is_dataset=True, downloads=True)
    assert found == Path("set/data")
    ((args, named),) = fetched
    assert (args, named["repo_type"], named["revision"], named["allow_patterns"]) == (
        ("me/set",), "dataset", "v2", ["data*"],
    )  # fmt: skip
    with pytest.raises(ConfigError, match="is a model, and a dataset is expected"):
        local(Path("hf://me/model"), print, is_dataset=True, downloads=True)


def test_a_hub_that_does_not_answer_is_one_sentence(here, monkeypatch):
    def fails(*_args, **_named):
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fails)
    with pytest.raises(ConfigError, match=f"cannot download `{NAME}`: no route to host") as raised:
        local(Path(NAME), print, is_dataset=False, downloads=True)
    assert raised.value.hint == f"with a network: hf download {NAME} --local-dir Qwen2.5-VL-7B-Instruct"


def test_a_folder_of_models_is_no_model(here):
    with pytest.raises(ConfigError, match=r"`more` has no config\.json") as raised:
        model_config(Path("more"))
    assert raised.value.hint == "folders with a config.json: more/intern"
    with pytest.raises(ConfigError, match="`more/intrn` does not exist"):
        model_config(Path("more/intrn"))


def test_commands_end_with_2_and_name_the_address_as_it_was_typed(here):
    (here / "rows.jsonl").write_text(json.dumps({"id": "a", "conversations": []}) + "\n")
    for words, said in (
        (("plan", "qwen", "s3://bucket/rows.jsonl"), "aws s3 cp s3://bucket/rows.jsonl ."),
        (("init", "--model", "gs://b/m", "--data", "rows.jsonl"), "gcloud storage cp --recursive gs://b/m ."),
        (("compare", "qwen", "hf://datasets/me/set"), "hf download me/set --repo-type dataset --local-dir set"),
        (("plan", NAME, "rows.jsonl", "--gpus", "64"), f"hf download {NAME}"),
        (("config", "validate", "https://example.org/my.yaml"), "curl -LO https://example.org/my.yaml"),
    ):
        done = dflop(*words, cwd=here)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
