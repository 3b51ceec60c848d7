"""Files of a processor and a tokenizer with which transformers treats media and text as a family here does.

For models that nobody published, which are a config of numbers: what a published model says in its own files is copied
instead (`dflop/run/model_files.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflop.models.family import Family
from dflop.models.processor_settings import section_of


def processor_config(family: Family) -> dict[str, Any]:
    """Content of a `processor_config.json` with the family's media limits, as transformers 5 reads it."""
    found: dict[str, Any] = {"processor_class": family.processor.whole, **family.processor_entries()}
    for kind, name in family.processor.parts.items():
        section = section_of(kind)
        found[section] = {f"{section}_type": name, **_settings(family, kind)}
    return found


def tokenizer_config(family: Family, end_of_answer: str) -> dict[str, Any]:
    """Content of a `tokenizer_config.json` beside a `tokenizer.json`.

    Args:
        family: Whose processor asks the tokenizer for tokens by name.
        end_of_answer: The special token that ends an answer; empty: there is none.
    """
    ends = {"eos_token": end_of_answer, "pad_token": end_of_answer} if end_of_answer else {}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": family.processor.whole,
        **ends,
        "extra_special_tokens": dict(family.processor.tokens),
    }


def _settings(family: Family, kind: str) -> Mapping[str, Any]:
    found = {entry: value for entry, value in family.fixed_settings(kind).items() if value is not None}
    stated: set[str] = set()
    for entry, limit in family.settings.get(kind, {}).items():
        if limit in stated:  # another spelling of it
            continue
        stated.add(limit)
        above, _, edge = entry.rpartition(".")
        if above:
            found[above] = {**found.get(above, {}), edge: family.media[limit]}
        else:
            found[entry] = family.media[limit]
    # Whole seconds: transformers multiplies them to a number of samples.
    return {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in found.items()}
