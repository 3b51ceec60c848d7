"""A question to a trained model, answered on the spot: of a run's newest checkpoint, or of a folder.

The prompt and the media are made as training made them, by the same tokenizer, chat template and media rules, so no
processor of transformers is needed; the model that answers is transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflop.data.annotations import PLACEHOLDER, BadSample, MediaRef, Turn
from dflop.data.headers import read_header
from dflop.data.load_media import load_item
from dflop.data.media_value import EXTENSIONS
from dflop.data.model_tokenizer import find_tokenizer
from dflop.data.tokens import ChatTokenizer
from dflop.errors import ConfigError
from dflop.jobs.weights import read_trained
from dflop.models.family import Family
from dflop.models.hf_inputs import hf_inputs
from dflop.models.hub import read_hub_model
from dflop.models.weights import load_folder, plain_model
from dflop.records import MediaItem
from dflop.run.directory import RunDir

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model of transformers in evaluation mode, with what makes its prompts."""

    family: Family
    tokenizer: ChatTokenizer
    model: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said."""

    text: str
    num_prompt_tokens: int
    num_tokens: int
    is_complete: bool
    """Whether the model ended it, and not the limit of tokens."""


def is_model_folder(path: Path) -> bool:
    """Whether it is the folder of a model, and no run."""
    return (path / _CONFIG).is_file() and not RunDir(path).config_file.exists()


def model_of_run(run: RunDir, progress: Callable[[str], None]) -> ChatModel:
    """The model of a run's newest checkpoint, in the memory of this process.

    Raises:
        ConfigError: the run has no checkpoint.
        TrainError: no checkpoint can be read.
    """
    of = read_trained(run, progress)
    return ChatModel(of.family, of.tokenizer, plain_model(of.family, of.hf_config, of.weights))


def model_of_folder(folder: Path) -> ChatModel:
    """The model in a Hugging Face folder of a family that dflop trains.

    Raises:
        ConfigError: another family, or no weights, tokenizer or chat template that it works with.
    """
    family = read_hub_model(folder / _CONFIG).family
    found = find_tokenizer((folder,), family)
    if found.path is None or found.problem:
        hint = "`dflop export` writes a tokenizer.json; for another folder, copy that of the model it came from"
        raise ConfigError(found.problem, where=str(folder), hint=hint)
    return ChatModel(family, ChatTokenizer(found.path, family, found.template), load_folder(family, folder))


def answer(of: ChatModel, question: str, media: Sequence[Path], *, max_tokens: int) -> Answer:
    """The model's most likely answer to a question about some media, on a GPU where there is one.

    Raises:
        ConfigError: a file cannot be read, or is of a kind that the model does not take; or the chat template does not
            show such a question.
    """
    refs, items, arrays, layouts = [], [], [], []
    kinds = [_kind_of(path, of.family) for path in media]
    for path, kind in zip(media, kinds, strict=True):
        try:
            header = read_header(kind, path)
            placed = of.family.place(header, kinds.count("image"))
            item: MediaItem = header.item(str(path), placed)
            arrays.append(torch.from_numpy(load_item(path, item, of.family)))
        except ValueError as error:  # BadMedia is one
            raise ConfigError(str(error), where=str(path)) from error
        refs.append(MediaRef(kind, str(path)))
        items.append(item)
        layouts.append(placed.layout)
    before = "".join(f"<{kind}>" for kind in kinds)
    literal = tuple(len(before) + match.start() for match in PLACEHOLDER.finditer(question))
    try:
        prompt = of.tokenizer.prompt((Turn("user", before + question, literal),), refs, layouts)
    except BadSample as error:
        raise ConfigError(error.reason, hint="the chat template decides which questions it shows") from error
    positions = [torch.from_numpy(where) for where in prompt.media_positions]
    inputs = hf_inputs(of.family, torch.from_numpy(prompt.input_ids), items, arrays, positions)
    said = _generate(of, inputs, max_tokens)
    end = of.tokenizer.end_of_answer
    is_complete = bool(said) and said[-1] == end
    text = of.tokenizer.decode(said[:-1] if is_complete else said)
    return Answer(text, len(prompt.input_ids), len(said), is_complete)


def _generate(of: ChatModel, inputs: dict[str, Any], max_tokens: int) -> list[int]:
    """Token ids behind the prompt, the one that ends the answer included."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, end = of.model.to(device), of.tokenizer.end_of_answer
    placed = {
        name: x.to(device, model.dtype if x.is_floating_point() and not name.endswith("_per_grid") else None)
        for name, x in inputs.items()
    }
    ends = {} if end is None else {"eos_token_id": end, "pad_token_id": end}
    with torch.inference_mode():
        said = model.generate(**placed, max_new_tokens=max_tokens, do_sample=False, **ends)[0].tolist()
    found: list[int] = said[inputs["input_ids"].shape[1] :]
    return found


def _kind_of(path: Path, family: Family) -> str:
    """Media kind of a file by its extension.

    Raises:
        ConfigError: it has none that is known, or the family does not take its kind.
    """
    extension = path.suffix.removeprefix(".").lower()
    kind = next((kind for kind, of_kind in EXTENSIONS.items() if extension in of_kind), "")
    takes = ", ".join(family.media_tokens)
    if not kind:
        raise ConfigError(f"`{path.name}` is no image, video or audio file by its extension", where=str(path))
    if kind not in family.media_tokens:
        raise ConfigError(f"{family.name} takes no {kind}", where=str(path), hint=f"it takes {takes}")
    return kind
