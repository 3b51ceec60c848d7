"""A tokenizer's file and the special tokens that a model family, a chat template and texts need of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from dflop.errors import ConfigError


def special_ids(tokenizer: Tokenizer, names: list[str], path: Path, family: str) -> dict[str, int]:
    """Ids of special tokens that template or media write.

    Raises:
        ConfigError: the tokenizer lacks one, or does not mark it as special.
    """
    found = {name: tokenizer.token_to_id(name) for name in names}
    missing = sorted(name for name, token_id in found.items() if token_id is None)
    if missing:
        raise ConfigError(
            f"tokenizer lacks special tokens of family {family} or its chat template: {', '.join(missing)}",
            where=str(path),
            hint="use the tokenizer that belongs to the model, or add the tokens to it as special tokens",
        )
    ids = {name: token_id for name, token_id in found.items() if token_id is not None}
    plain = tokenizer.encode_batch(sorted(ids), add_special_tokens=False)
    forgeable = [name for name, encoded in zip(sorted(ids), plain, strict=True) if ids[name] in encoded.ids]
    if forgeable:
        raise ConfigError(
            f"tokens are not marked special, so user text could forge them: {', '.join(forgeable)}",
            where=str(path),
            hint='set "special": true for them under "added_tokens"',
        )
    return ids


def one_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the names, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"(?!)")


def ids_in_texts(tokenizer: Tokenizer, known: frozenset[str], names: Sequence[str], path: Path) -> dict[str, int]:
    """Ids of special tokens that texts may name.

    Raises:
        ConfigError: a name is none of `known`.
    """
    for name in names:
        if name not in known:
            raise ConfigError(
                f"`{name}` is no special token of {path} that texts may name",
                where="dataset.special_tokens",
                hint=f"not those of the chat template or media; valid: {', '.join(sorted(known)) or 'none'}",
            )
    return {name: token_id for name in names if (token_id := tokenizer.token_to_id(name)) is not None}


def load_tokenizer(path: Path) -> Tokenizer:
    """A `tokenizer.json` that gives a text the same tokens every time.

    Raises:
        ConfigError: it does not load, or draws lots.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and a panic of its Rust is none
        raise ConfigError(f"tokenizer cannot be loaded: {error}", where=str(path)) from error
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise ConfigError(
            f"tokenizer drops merges at random (dropout {dropout:g}), so token counts are not reproducible",
            where=str(path),
            hint='set "dropout": null under "model"',
        )
    return tokenizer
