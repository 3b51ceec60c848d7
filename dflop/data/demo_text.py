"""The demo's texts and its tokenizer: real prose that ships with Python and scikit-learn, and a small BPE over it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dflop.data.demo_media import lognormal
from dflop.data.demo_sources import find_files

CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL_TOKENS = (
    *CHAT_TOKENS, "<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|audio_eos|>",
    "<|AUDIO|>",
)  # fmt: skip
VOCAB_SIZE = 4096
_QUESTIONS = (
    "What does the documentation of {source} say about {topic}?",
    "Explain {topic}, as in the documentation of {source}.",
    "Quote the passage on {topic} from the documentation of {source}.",
)


class Text(NamedTuple):
    """Paragraphs of prose on one topic; `source` is the documentation they come from."""

    source: str
    topic: str
    paragraphs: tuple[str, ...]


def load_texts() -> Iterator[Text]:
    """Python's language reference by topic and scikit-learn's dataset descriptions, sorted.

    Raises:
        ConfigError: scikit-learn's files are missing.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    rst = [("Python", f"`{name}`", text) for name, text in sorted(topics.items())]
    files = (path for path in find_files("scikit-learn", ".rst") if path.parent.name == "descr")
    rst += [("scikit-learn", f"the dataset `{p.stem.replace('_', ' ')}`", p.read_text("utf-8")) for p in files]
    for source, topic, text in rst:
        if paragraphs := _paragraphs(text):
            yield Text(source, topic, paragraphs)


def question_and_answer(rng: np.random.Generator, texts: Sequence[Text]) -> tuple[str, str, str]:
    """A question about a random text, a passage of it of lognormal length (7 to 420 words), and its source."""
    text = texts[int(rng.integers(len(texts)))]
    question = _QUESTIONS[rng.integers(len(_QUESTIONS))].format(source=text.source, topic=text.topic)
    num_words = round(lognormal(rng, 60, 1.0, 7, 420))
    words_left = np.cumsum([len(paragraph.split(" ")) for paragraph in reversed(text.paragraphs)])[::-1]
    num_begins = int(np.count_nonzero(words_left >= num_words))
    begin = int(rng.integers(max(1, num_begins)))  # early enough for so many words
    answer = " ".join(" ".join(text.paragraphs[begin:]).split(" ")[:num_words])
    end = answer.rfind(". ")  # whole sentences, unless that would lose more than half
    return question, answer[: end + 1] if end > len(answer) // 2 else answer, text.source


def train_tokenizer(texts: Iterable[str], path: Path, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """Train a byte-level BPE on `texts`, in which every text encodes, and write it as `tokenizer.json`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _paragraphs(rst: str) -> tuple[str, ...]:
    """Prose paragraphs on one line each; headings, directives, code and tables are left out."""
    blocks = (block for block in re.split(r"\n\s*\n", rst) if not re.match(r"\s|\.\.|[*=~|+-]{2}|:", block))
    prose = (" ".join(block.split()) for block in blocks if not re.search(r"\n[*=~^-]{3}", block))
    # A tag in prose (`<video>` in an example, say) would read as a placeholder.
    return tuple(p for p in prose if len(p) >= 40 and not re.search(r"<(image|video|audio)>", p))
