"""Media rules that are read from a model's processor, held against real calls and against the families' own rules."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dflop import resources
from dflop.cli.model import rows_of
from dflop.config import load_model
from dflop.data.demo_content import train_tokenizer
from dflop.errors import ConfigError
from dflop.models import load_family
from dflop.models.family import Family
from dflop.models.generic import check
from dflop.models.generic.exactness import Exactness
from dflop.models.generic.media_check import check_media, grid
from dflop.models.generic.media_processor import MediaProcessor, load_processor, parse_layout
from dflop.models.media import Layout, MediaHeader
from dflop.models.processor_files import processor_config, tokenizer_config
from dflop.models.weights import hf_types

MODELS = {path.stem: path for path in sorted((resources.path("configs") / "models").glob("*.yaml"))}
OF_FAMILY = {load_model(path).family: name for name, path in MODELS.items() if not name.startswith("tiny")}


def write_processor(family: Family, folder: Path) -> str:
    """The files of a family's processor in a folder, as a release has them."""
    named = tokenizer_config(family, "<|im_end|>")
    tokens = dict.fromkeys(["<|im_end|>", *named["extra_special_tokens"].values(), *family.special_tokens])
    train_tokenizer(["Frame1: \n <3.5 seconds>"], folder / "tokenizer.json", tuple(tokens))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "processor_config.json").write_text(json.dumps(processor_config(family)))
    return str(folder)


def joined(layout: Layout | list[Any]) -> list[str | int]:
    """A layout with neighbouring texts as one."""
    runs = itertools.groupby(layout, lambda part: isinstance(part, str))
    return [part for is_text, run in runs for part in (["".join(map(str, run))] if is_text else list(run))]


@pytest.mark.parametrize("name", OF_FAMILY.values(), ids=OF_FAMILY)
def test_rules_read_from_a_processor_equal_the_familys(ask_media, tmp_path, name):
    model = load_model(MODELS[name])
    family = load_family(model.family, model.hf_config, model.media)
    headers = [header for kind in family.media_tokens for header in grid(kind)]
    said = ask_media({"folder": write_processor(family, tmp_path), "items": [_fields(h) for h in headers]})
    assert {kind: bool(check["way"]) for kind, check in said["checks"].items()} == dict.fromkeys(
        family.media_tokens, True
    )
    apart = {kind: check["several"] for kind, check in said["checks"].items() if check["several"]}
    # A sample's only image is shown in tiles there, several are one tile each.
    assert list(apart) == ["image"] * (family.name == "llava_onevision")
    own = [_of_family(family, header) for header in headers]
    read = [_of_processor(family, item) for item in said["items"]]
    assert [differ for differ in zip(headers, own, read, strict=True) if differ[1] != differ[2]] == []


def _fields(header: MediaHeader) -> list[Any]:
    return [header.kind, header.width_px, header.height_px, header.num_frames, header.duration_s]


def _of_family(family: Family, header: MediaHeader) -> tuple[Any, ...]:
    """(layout, frames), or that it is refused."""
    try:
        layout = joined(family.media_tokens[header.kind].in_its_place(family.place(header).layout))
        frames = family.frame_indices(header.num_frames, header.duration_s) if header.kind == "video" else ()
    except ValueError:
        return ("refused",)
    # LLaVA's own loader takes the first and the last frame; transformers' processor begins equal intervals.
    return layout, list(frames) if family.name != "llava_onevision" else len(frames)


def _of_processor(family: Family, said: dict[str, Any]) -> tuple[Any, ...]:
    if "error" in said:
        return ("refused",)
    frames = said["frames"]
    if family.name == "llava_onevision":
        return joined(said["layout"]), len(frames)
    if hasattr(family, "factor_px"):  # whole temporal patches: the processor repeats the last frame after it is given
        frames += frames[-1:] * (len(frames) % 2)
    return joined(said["layout"]), frames


OTHERS = {
    "LlavaProcessor": ("llava", {"image": "sizes"}),
    "Gemma3Processor": ("gemma3", {"image": "sizes"}),
    "JanusProcessor": ("janus", {"image": "shapes"}),
    "VideoLlavaProcessor": ("video_llava", {"image": "fitted", "video": "fitted"}),
    "Llama4Processor": ("llama4", {"image": "calls"}),
}  # fmt: skip
"""Processors of no family: their model type, and the way in which each medium is counted; empty: refused."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_processors_are_counted_or_refused_by_medium(ask_media, name):
    model_type, ways = OTHERS[name]
    said = ask_media({"class": name, "types": [model_type]})
    assert {kind: medium["way"] for kind, medium in said["checks"].items()} == ways
    assert all(bool(medium["reason"]) == (not medium["way"]) for medium in said["checks"].values())


class Words:
    """A tokenizer that has a token per word; takes one text, in a list or not."""

    def __init__(self) -> None:
        self.ids = {"<image>": 0, "<audio>": 1}

    def get_added_vocab(self) -> dict[str, int]:
        return {"<image>": 0, "<audio>": 1}

    def convert_tokens_to_ids(self, token: str) -> int:
        return self.ids[token]

    def __call__(self, text: str | list[str]) -> dict[str, list[int]]:
        text = text if isinstance(text, str) else text[0]
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"<\w+>|\w+", text)]}


class Miscounting:
    """A processor whose count is wrong for wide pictures with something in them; it takes no media without values."""

    chat_template = None
    image_token, audio_token = "<image>", "<audio>"
    image_processor = object()

    def __init__(self) -> None:
        self.tokenizer: Any = Words()
        self._audio_processor = type("Part", (), {"sampling_rate": 100})

    def __call__(self, text: list[str], images: Any = None, audio: Any = None, **_: Any) -> dict[str, Any]:
        number = (
            len(audio[0]) // 10 if audio else min(images[0].size[0], 8000 if images[0].getbbox() else 2000) // 100 + 3
        )
        ids: dict[str, list[int]] = self.tokenizer([f"begin {text[0] * number} end"])
        return {"input_ids": [ids["input_ids"]]}

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, audio_lengths: Any = None, **_: Any) -> Any:
        if audio_lengths:
            return {"num_audio_tokens": [n // 10 for n in audio_lengths]}
        return {"num_image_tokens": [min(width, 2000) // 100 + 3 for _, width in image_sizes]}


def test_a_medium_whose_count_differs_is_refused_with_the_sizes_and_both_numbers():
    checks = check_media(MediaProcessor(Miscounting()))
    pictures = checks["image"]
    assert not pictures.is_exact
    assert {"sizes: 4 of 60 differ", "calls: 4 of 60 differ"} <= set(pictures.reason.split("; "))
    assert [(m.header.width_px, m.counted, m.real) for m in pictures.mismatches] == [
        (8000, (23, 2), (83, 2)), (3000, (23, 2), (33, 2)), (2500, (23, 2), (28, 2)),
    ]  # fmt: skip
    assert checks["audio"].rule is not None
    assert checks["audio"].rule.way == "sizes"
    assert checks["audio"].rule.expand(MediaHeader("audio", 0, 0, 0, 7.77)) == ("begin ", 77, " end")


def test_layouts_are_texts_and_runs():
    assert parse_layout("<a><p><p>\n<p><b>", "<p>") == ("<a>", 2, "\n", 1, "<b>")
    assert parse_layout("", "<p>") == ()


def test_a_folder_without_a_processor_is_refused_with_what_it_needs(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(ConfigError, match="no processor") as caught:
        load_processor(tmp_path)
    assert "tokenizer.json" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "processor_config.json"])
def test_a_file_that_was_cut_off_is_named(tmp_path, name):
    write_processor(load_family("qwen2_audio", {}, {}), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_audio"}')
    (tmp_path / name).write_text('{"processor_cl')
    with pytest.raises(ConfigError, match="not JSON") as caught:
        load_processor(tmp_path)
    assert caught.value.where == str(tmp_path / name)


def test_a_processor_that_transformers_does_not_know_is_refused_with_the_entry(tmp_path):
    write_processor(load_family("qwen2_audio", {}, {}), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_audio"}')
    for file in tmp_path.glob("*processor_config.json"):
        file.write_text('{"processor_class": "ZorgProcessor"}')
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"processor_class": "ZorgProcessor"}))
    with pytest.raises(ConfigError, match=r"no processor: transformers makes a .* for text or media alone") as caught:
        load_processor(tmp_path)
    assert "`processor_class`" in caught.value.hint


def test_a_model_is_checked_with_its_media_and_without_a_processor_that_loads(tmp_path, monkeypatch):
    model = load_model(MODELS["qwen2_audio_7b"])
    family = load_family(model.family, model.hf_config, model.media)
    write_processor(family, tmp_path)
    config = hf_types(family, model.hf_config)[0]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setattr(check, "check_exactness", lambda *_: Exactness((), 0))
    assert _media_rows(check.check_model(tmp_path)) == [("audio", 10, "equal for 10 sizes, by fitted")]

    def missing(folder: Path) -> Any:
        raise ConfigError("a package is missing", hint="pip install torchvision")

    monkeypatch.setattr(check, "load_processor", missing)
    refused = "a package is missing; pip install torchvision"
    assert _media_rows(check.check_model(tmp_path / "config.json")) == [("", None, refused)]


def _media_rows(found: check.ModelCheck) -> list[tuple[Any, ...]]:
    return [(row[1], row[2], row[-1]) for row in rows_of(found) if row[0] == "tokens"]
