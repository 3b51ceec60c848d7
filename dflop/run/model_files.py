"""What ships with a model beside its weights: processor, tokenizer, chat template, how to generate.

A run copies these files when it begins, as the folder that they came from may be gone when it ends, and an export
writes them beside what was trained: with them the folder is one that transformers, vLLM and evaluations can load. The
tokenizer and the chat template are always those that training used. For a model that is a config of numbers the
processor is written from its media limits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflop import files
from dflop.config import Config
from dflop.data.chat import BUILT_IN, ChatTemplate
from dflop.data.tokens import ChatTokenizer
from dflop.models.family import Family
from dflop.models.processor_files import processor_config, tokenizer_config
from dflop.models.processor_settings import read_object, read_settings
from dflop.run.directory import RunDir

_KINDS = (".json", ".jinja", ".model", ".txt")
_MAX_BYTES = 64 << 20
"""Most bytes of a file: tokenizers have up to 40 MB; what is larger is data."""
_CONFIG, _TOKENIZER, _TEMPLATE = "config.json", "tokenizer.json", "chat_template.jinja"
_OF_TOKENIZERS = (
    _TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model",
)  # fmt: skip
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_OLDER_TEMPLATE = "chat_template.json"


def keep_model_files(config: Config, folder: Path) -> None:
    """Copy the files that ship with a configuration's model into a folder, which is made where there are any.

    Raises:
        OSError: a file cannot be read or written.
    """
    for name, path in _model_files(config).items():
        folder.mkdir(exist_ok=True)
        with files.replacing(folder / name) as temporary:
            shutil.copyfile(path, temporary)
    if (template := Path(config.dataset.chat_template)).is_file():
        folder.mkdir(exist_ok=True)
        files.replace(folder / _TEMPLATE, ChatTemplate.load(str(template)).source)


def with_kept_tokenizer(config: Config, run: RunDir) -> Config:
    """The configuration of a run with the tokenizer that it kept; template and processor if their files are gone."""
    kept, dataset = run.model_files, config.dataset
    found: dict[str, Any] = {}
    if (kept / _TOKENIZER).is_file():
        found["tokenizer"] = kept / _TOKENIZER
    is_of_file = dataset.chat_template not in BUILT_IN
    if is_of_file and (kept / _TEMPLATE).is_file() and not Path(dataset.chat_template).is_file():
        found["chat_template"] = str(kept / _TEMPLATE)
    model, processor = config.model, config.model.processor
    if processor is not None and not processor.is_dir() and kept.is_dir():
        model = model.model_copy(update={"processor": kept})
    return config.model_copy(update={"dataset": dataset.model_copy(update=found), "model": model})


def write_model_files(run: RunDir, config: Config, family: Family, tokenizer: ChatTokenizer, out: Path) -> list[str]:
    """Write beside a model's weights what else it takes to use it; returns what a person has to know of that.

    Args:
        run: What it kept is copied; of a run that kept nothing, what is still where it was.
        config: With the tokenizer and template that are meant.
        family: Bound to the media limits of training.
        tokenizer: Of the dataset.
        out: Folder with the weights and their `config.json`.

    Raises:
        ConfigError: a file of settings, or the chat template, cannot be read.
        OSError: a file cannot be read or written.
    """
    kept = {p.name: p for p in run.model_files.iterdir()} if run.model_files.is_dir() else _model_files(config)
    for name, path in kept.items():
        shutil.copyfile(path, out / name)
    shutil.copyfile(config.dataset.tokenizer, out / _TOKENIZER)
    _write_template(config.dataset.chat_template, family, out)
    ends = tokenizer.end_of_answer
    made: dict[str, dict[str, Any]] = {
        "tokenizer_config.json": tokenizer_config(family, "" if ends is None else tokenizer.decode([ends])),
        **({"generation_config.json": {"eos_token_id": ends, "pad_token_id": ends}} if ends is not None else {}),
    }
    if not any((out / name).is_file() for name in _PROCESSORS):
        made |= {_PROCESSORS[0]: processor_config(family)}
    written = [name for name in made if not (out / name).exists()]
    for name in written:
        files.replace(out / name, json.dumps(made[name], indent=2) + "\n")
    return [*_told(written), *_differences(family, out)]


def _told(written: list[str]) -> Iterator[str]:
    if written:
        yield (
            f"no model's folder had {', '.join(written)}: made from the configuration; if the model is published, "
            "replace them with its files"
        )


def _differences(family: Family, out: Path) -> Iterator[str]:
    """What the processor's settings state otherwise than training had it: media limits, and what is fixed here."""
    stated = read_settings(out, family)
    yield from (f"trained otherwise: {entry.removeprefix(f'{out}/')}" for entry in stated.not_followed)
    for key, value in stated.media.items():
        if value != family.media[key]:
            place = stated.sources[key].removeprefix(f"{out}/")
            yield f"trained with {key} {family.media[key]}; the processor has {value} ({place})"


def _write_template(spec: str, family: Family, out: Path) -> None:
    """The template of training, where processors and tokenizers look; none beside it."""
    written = {kind: tokens.in_text for kind, tokens in family.media_tokens.items()}
    files.replace(out / _TEMPLATE, ChatTemplate.for_transformers(spec, written))
    (out / _OLDER_TEMPLATE).unlink(missing_ok=True)
    for name in (_PROCESSORS[0], "tokenizer_config.json"):
        if (out / name).is_file():
            content = read_object(out / name, "a model's settings")
            if content.pop("chat_template", None) is not None:
                files.replace(out / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _model_files(config: Config) -> dict[str, Path]:
    """Name -> file of what ships with the model; a folder is a model's where it has a `config.json`."""
    dataset, weights = config.dataset, config.model.weights
    of_tokenizer = dataset.tokenizer.parent
    folders = dict.fromkeys(f for f in (Path(dataset.chat_template).parent, of_tokenizer, weights) if f is not None)
    found: dict[str, Path] = {}
    if (processor := config.model.processor) is not None and processor.is_dir():
        found |= {p.name: p for p in sorted(processor.iterdir()) if _ships(p)}
    for folder in folders:
        if (folder / _CONFIG).is_file():
            found |= {p.name: p for p in sorted(folder.iterdir()) if _ships(p) and p != dataset.annotations}
    if weights is not None and weights != of_tokenizer:  # a tokenizer comes whole
        found = {name: path for name, path in found.items() if name not in _OF_TOKENIZERS}
        found |= {name: path for name in _OF_TOKENIZERS if (path := of_tokenizer / name).is_file()}
    return found | ({_TOKENIZER: dataset.tokenizer} if dataset.tokenizer.is_file() else {})


def _ships(path: Path) -> bool:
    is_text = path.suffix in _KINDS and path.name != _CONFIG and not path.name.endswith(".index.json")
    return is_text and path.is_file() and path.stat().st_size <= _MAX_BYTES
