"""The demo's texts and its tokenizer: real prose that ships with Python and scikit-learn, and a small BPE over it.

Answers are runs of whole paragraphs of documentation, cut to a lognormal number of words, so that text lengths have
the long tail of instruction data. The tokenizer is byte-level, so every text encodes; 4096 entries train in seconds.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from dflop.data.demo_media import lognormal
from dflop.data.demo_sources import find_files

CHAT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPECIAL_TOKENS = (
    *CHAT_TOKENS,
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|AUDIO|>",
)
VOCAB_SIZE = 4096

_QUESTIONS = (
    "What does the documentation of {source} say about {topic}?",
    "Explain {topic}, as in the documentation of {source}.",
    "Quote the passage on {topic} from the documentation of {source}.",
)


@dataclass(frozen=True, slots=True)
class Text:
    """Paragraphs of prose on one topic; `source` is the documentation they come from."""

    source: str
    topic: str
    paragraphs: tuple[str, ...]


def load_texts() -> list[Text]:
    """Python's language reference by topic and scikit-learn's dataset descriptions, sorted.

    Raises:
        ConfigError: scikit-learn's files are missing.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    texts = [Text("Python", f"`{name}`", _paragraphs(text)) for name, text in sorted(topics.items())]
    for path in find_files("scikit-learn", ".rst"):
        if path.parent.name == "descr":
            name = path.stem.replace("_", " ")
            texts.append(Text("scikit-learn", f"the dataset `{name}`", _paragraphs(path.read_text("utf-8"))))
    return [text for text in texts if text.paragraphs]


def question_and_answer(rng: np.random.Generator, texts: list[Text]) -> tuple[str, str, Text]:
    """A question about a random text, and a passage of it of lognormal length (median 60 words, at most 420)."""
    text = texts[rng.integers(len(texts))]
    question = _QUESTIONS[rng.integers(len(_QUESTIONS))].format(source=text.source, topic=text.topic)
    num_words = round(lognormal(rng, 60, 1.0, 7, 420))
    words_left = np.cumsum([len(paragraph.split(" ")) for paragraph in reversed(text.paragraphs)])[::-1]
    num_begins = int(np.count_nonzero(words_left >= num_words))
    begin = int(rng.integers(max(1, num_begins)))  # early enough for a passage of that length
    words = " ".join(text.paragraphs[begin:]).split(" ")[:num_words]
    return question, _whole_sentences(" ".join(words)), text


def train_tokenizer(texts: Iterable[str], path: Path, special_tokens: Sequence[str] = SPECIAL_TOKENS) -> None:
    """Train the byte-level BPE on `texts` and write it as `tokenizer.json`."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(special_tokens),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _paragraphs(rst: str) -> tuple[str, ...]:
    """Prose paragraphs on one line each; headings, directives, code and tables are left out."""
    blocks = (block for block in re.split(r"\n\s*\n", rst) if not re.match(r"\s|\.\.|[*=~|+-]{2}|:", block))
    prose = (" ".join(block.split()) for block in blocks if not re.search(r"\n[*=~^-]{3}", block))
    # A tag in prose (`<video>` in an example, say) would read as a placeholder.
    return tuple(p for p in prose if len(p) >= 40 and not re.search(r"<(image|video|audio)>", p))


def _whole_sentences(text: str) -> str:
    """Cut after the last full stop, unless that would lose more than half."""
    end = text.rfind(". ")
    return text[: end + 1] if end > len(text) // 2 else text
