"""Chat templates and tokenizers of strangers."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.data.chat import BUILT_IN, ChatTemplate
from dflop.data.conversation import parse_row
from dflop.data.tokens import ChatTokenizer
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt
from tests.fuzz.targets.dataset import make_tokenizer, rules

_TEMPLATES = (
    *BUILT_IN.values(),
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endif %}{% endfor %}",
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{% for c in m.content %}{{ c.text | trim }}{% endfor %}"
    "<|im_end|>{%- endfor -%}",
)
_JINJA = (
    "{{", "}}", "{%", "%}", "{{ messages }}", "{{ 1 // 0 }}", "{{ messages[9].content }}", "{{ {}|dictsort|first }}",
    "{{ ''.__class__.__mro__ }}", "{% for x in range(99999999) %}a", "{{ 'a' * 10 ** 10 }}", "{{ cycler }}",
    "{{ m.content.format(m) }}", "{% include 'a' %}", "{% import 'os' as o %}", "{{ lipsum(9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% set ns = namespace(a=1) %}", "{{ m['content'] | tojson }}",
    "{{ undefined.a.b }}", "{% break %}", "{{ m.content | float }}", "{{ messages | length / 0 }}", "{{ m() }}",
    "{{ raise_exception(messages) }}", "{{ strftime_now() }}", "{{ (1,2)[5] }}", "{{ m.role + 1 }}",
    "{% if m.content in 5 %}{% endif %}", "{{ [1] | sum('a') }}", "{% filter nope %}{% endfilter %}",
    "\ue0f00\ue0f1", "\ue0f099\ue0f1", "\ue0f0٣\ue0f1", "(" * 300, "{{ " + "(" * 150 + "1" + ")" * 150 + " }}",
    "{{ dict(a=m).a.b() }}", "{{ 2 ** 99999999 }}",
)  # fmt: skip
_ROW = {"conversations": [{"from": "human", "value": "what? \x00\ufffd <|im_end|>"},
                          {"from": "gpt", "value": "the cat"}]}  # fmt: skip


def _template(_folder: Path, example: tuple[str, list[str]]) -> None:
    source, roles = example
    found = attempt(ChatTemplate, source, "fuzz")
    skeleton = attempt(found.skeleton, tuple(roles)) if found is not None else None
    assert skeleton is None or [p for p in skeleton if isinstance(p, int)] == list(range(len(roles)))


def _template_file(folder: Path, example: bytes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_bytes(example)
    found = attempt(ChatTemplate.load, str(path))
    if found is not None:
        attempt(found.skeleton, ("user", "assistant"))


@functools.cache
def _sound_tokenizer() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = json.loads(make_tokenizer(Path(folder)).read_text())
    model = found["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < 280}  # an example stays readable
    pairs = [pair if isinstance(pair, list) else pair.split() for pair in model["merges"]]
    model |= {"vocab": kept, "merges": [pair for pair in pairs if "".join(pair) in kept]}
    return found


def _tokenizer(folder: Path, example: bytes) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(example)
    tokenizer, sample = attempt(ChatTokenizer, path, rules()), parse_row(_ROW, 0)
    if tokenizer is not None:
        counts, encoded = attempt(tokenizer.count, [sample], [[]]), attempt(tokenizer.encode, sample, [])
        if counts is not None and encoded is not None:
            assert counts[0].num_text_tokens == len(encoded.input_ids)
            assert counts[0].num_supervised_tokens == encoded.num_supervised_tokens


_ROLES = st.lists(st.sampled_from(("system", "user", "assistant", "text")), min_size=1, max_size=4)
_NAMED = {
    "bos_token": "<s>", "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": BUILT_IN["qwen"]}],
}  # fmt: skip
_FILES = hostile.broken_json(_NAMED, {**_NAMED, "chat_template": BUILT_IN["chatml"]})
_TOKENIZERS = st.deferred(lambda: hostile.broken_json(_sound_tokenizer()))
TARGETS = (
    Target("chat-template", "Jinja of chat templates cut up",
           st.tuples(hostile.broken_text(_TEMPLATES, _JINJA), _ROLES), _template),
    Target("chat-template-file", "`tokenizer_config.json` with values of any type, broken bytes", _FILES,
           _template_file),
    Target("chat-template-name", "names of templates and files", hostile.TEXTS,
           lambda _, name: attempt(ChatTemplate.load, name)),
    Target("tokenizer", "`tokenizer.json` with values of any type, broken bytes", _TOKENIZERS, _tokenizer),
)  # fmt: skip
