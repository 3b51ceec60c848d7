"""`dflop init` as a new user meets it: a model's config.json, a folder of data, and what is still to be done."""

import json
from pathlib import Path

import pytest

from dflop import resources
from dflop.config import load_config, load_model
from dflop.data.demo_content import SPECIAL_TOKENS, train_tokenizer
from dflop.models.weights import hf_types
from dflop.starter.starter import make_starter
from dflop.steps.planning import batch_note
from tests.data.helpers import chat
from tests.models.tiny_families import CASES
from tests.test_cli import assert_refused, dflop


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Qwen2.5-VL without a tokenizer, and three rows with one picture missing."""
    case = CASES["Qwen2.5-VL"]
    (tmp_path / "model").mkdir()
    content = hf_types(case.family, case.family.hf_config)[0].to_dict()
    (tmp_path / "model" / "config.json").write_text(json.dumps(content))
    (tmp_path / "data" / "images").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "data" / "images" / f"{name}.jpg").touch()
    rows = [chat("<image>\nwhat?", "that", image=f"{name}.jpg") for name in "abc"]
    rows.append(chat("<audio>\nwhat?", "that", audio="x.wav"))
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def init(folder: Path, *arguments: str) -> tuple[str, list[str]]:
    done = dflop("init", "--model", "model/config.json", "--data", "data", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr.splitlines()


def test_what_was_found_and_what_must_be_edited_is_said(folder):
    out, talk = init(folder, "--out", "my.yaml")
    assert out == "my.yaml\n"
    said = "\n".join(talk)
    for words in (
        "found  model: qwen2_5_vl, ", "found  weights: none", "found  data: data/train.jsonl, JSON Lines, 4 rows",
        "found  media: 2 of 4 named files are under data/images", "edit   dataset.tokenizer: no tokenizer.json",
        "edit   dataset.media_root: 2 of 4 named files", "1 of 4 sampled rows have audio, which qwen2_5_vl does not",
        "dflop config validate my.yaml",
    ):  # fmt: skip
        assert words in said
    text = (folder / "my.yaml").read_text()
    assert text.count("EDIT") >= 5
    config = load_config(folder / "my.yaml")
    assert config.model.family == "qwen2_5_vl"
    assert config.dataset.media_root == Path("data/images")
    done = dflop("config", "validate", "my.yaml", cwd=folder)
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("my.yaml:")
    assert "dataset.tokenizer: `MISSING/tokenizer.json` does not exist" in line


def test_a_section_that_is_a_file_is_a_model_too_and_stays_a_file(folder):
    section = resources.path("configs") / "models" / "qwen2_5_vl_7b.yaml"
    made = make_starter(section, folder / "data")
    (folder / "my.yaml").write_text(made.text)
    assert load_config(folder / "my.yaml").model == load_model(section)
    assert made.found[0].startswith("model: qwen2_5_vl, 8.29G parameters")
    assert not any(line.startswith("weights") for line in made.found), "the section says where they are"


def test_with_everything_there_it_validates(folder):
    tokens = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|box_start|>"]
    train_tokenizer(["what that\n"], folder / "model" / "tokenizer.json", [*SPECIAL_TOKENS, *tokens])
    (folder / "model" / "model.safetensors").touch()
    (folder / "model" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with (folder / "data" / "train.jsonl").open("a") as rows:
        rows.write(json.dumps(chat("where?", "<|box_start|>(1,2)")) + "\n")
    (folder / "model" / "preprocessor_config.json").write_text('{"max_pixels": 802816, "patch_size": 32}')
    out, talk = init(folder)
    assert "found  model.media.max_pixels: 802816, model/preprocessor_config.json: max_pixels" in talk
    assert any(line.startswith("edit   model.media: not in the model") and "min_pixels 3136" in line for line in talk)
    assert any(line.startswith("edit   model: model/preprocessor_config.json: patch_size = 32 is not") for line in talk)
    assert any("<|box_start|> in 1" in line for line in talk)
    assert any("chat template in model/chat_template.jinja is not used" in line for line in talk)
    assert "edit   dataset.chat_template: no file states one; `chatml` is assumed" in talk
    (folder / "my.yaml").write_text(out)
    config = load_config(folder / "my.yaml")
    assert config.dataset.special_tokens == ("<|box_start|>",)
    assert config.model.media == {"max_pixels": 802816, "video_max_pixels": 802816}
    assert config.model.weights == Path("model")
    assert (config.dataset.tokenizer, config.dataset.chat_template) == (Path("model/tokenizer.json"), "chatml")
    done = dflop("config", "validate", "my.yaml", cwd=folder)
    assert (done.returncode, done.stdout) == (0, "my.yaml: ok\n")
    shown = dflop("config", "show", "my.yaml", "--origins", cwd=folder).stdout.splitlines()
    (stated,) = (line for line in shown if " max_pixels:" in line)
    (silent,) = (line for line in shown if " video_fps:" in line)
    assert "802816 " in stated
    assert "# my.yaml:" in stated
    assert silent.split() == ["video_fps:", "2.0", "#", "default"]
    assert dflop("init", "--model", "model", "--data", "data", cwd=folder).stdout == out


def test_a_tokenizer_without_the_familys_tokens_is_said_at_once(folder):
    train_tokenizer(["x\n"], folder / "data" / "tokenizer.json")
    out, talk = init(folder)
    (line,) = (line for line in talk if "dataset.tokenizer" in line)
    assert "data/tokenizer.json: tokenizer lacks special tokens" in line
    assert "<|image_pad|>" in line
    assert "# EDIT: tokenizer lacks special tokens" in out


@pytest.mark.parametrize(
    ("gpus", "num_rows", "batch", "note"),
    [
        (64, 5000, 512, "8 for each of 64 GPUs"),
        (6, 5000, 48, "8 for each of 6 GPUs"),
        (64, 200, 192, "3 for each of 64 GPUs, as there are 200 rows"),
        (3, 5, 3, "1 for each of 3 GPUs, as there are 5 rows"),
        (64, 40, 40, "all rows: fewer than 64 GPUs, so most of them work in a pipeline or idle"),
    ],
)
def test_the_global_batch_fits_the_gpus_that_are_asked_for(folder, gpus, num_rows, batch, note):
    (folder / "data" / "train.jsonl").write_text((json.dumps(chat("what?", "that")) + "\n") * num_rows)
    made = make_starter(folder / "model", folder / "data", gpus)
    (folder / "my.yaml").write_text(made.text)
    assert load_config(folder / "my.yaml").plan.global_batch_size == batch
    assert f"plan.global_batch_size: {batch}, {note}" in made.to_edit
    assert f"  global_batch_size: {batch}   # EDIT: samples per optimizer step, {note}\n" in made.text
    assert bool(batch_note(load_config(folder / "my.yaml"), gpus)) == (batch < gpus)


def test_the_card_of_data_is_shown_and_a_choice_is_asked_for(folder):
    rows = (folder / "data" / "train.jsonl").read_text()
    (folder / "data" / "test.jsonl").write_text(rows * 2)
    card = "data/train.jsonl, JSON Lines, 4 rows, split train"
    _, talk = init(folder)
    assert [line for line in talk if line.startswith(f"found  data: {card}; of 4 rows sampled")]
    assert "found  not taken: test.jsonl, JSON Lines, 8 rows, split test" in talk
    shown = dflop("data", "card", "data", cwd=folder)
    assert shown.stderr.splitlines() == [card, "not taken: test.jsonl, JSON Lines, 8 rows, split test"]
    done = dflop("data", "card", "data", "--split", "test", "--json", cwd=folder)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["taken"], row["split"], row["rows"]) for row in found] == [(True, "test", 8), (False, "train", 4)]
    assert found[0]["columns"] == "conversations, image, audio"
    (folder / "data" / "train.jsonl").rename(folder / "data" / "val.jsonl")
    for command in (
        ("init", "--model", "model", "--data", "data"),
        ("plan", "model", "data"),
        ("data", "card", "data"),
    ):
        assert_refused(dflop(*command, cwd=folder), 2, "test.jsonl (8 rows), val.jsonl (4 rows)", "--split validation")


def test_nothing_is_overwritten_and_nonsense_is_refused(folder):
    (folder / "my.yaml").write_text("mine")
    given = ("init", "--model", "model/config.json", "--data", "data")
    assert_refused(dflop(*given, "--out", "my.yaml", cwd=folder), 2, "already exists")
    assert (folder / "my.yaml").read_text() == "mine"
    assert_refused(dflop(*given, "--out", "no/such/my.yaml", cwd=folder), 2, "no folder `no/such`")
    assert_refused(
        dflop("init", "--model", "none.json", "--data", "data", cwd=folder), 2, "does not exist", "none.json"
    )
    assert_refused(dflop("init", "--model", "model/config.json", "--data", "x", cwd=folder), 2, "`x` does not exist")
    assert_refused(dflop("init", "--data", "data", cwd=folder), 2, "--model", "dflop init --help")
    assert_refused(dflop(*given, "--gpus", "0", cwd=folder), 2, "cannot train on 0 GPUs", "--gpus")
