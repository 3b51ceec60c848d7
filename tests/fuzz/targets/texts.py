"""Chat templates and tokenizers of strangers."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from dflop.data.chat import BUILT_IN, ChatTemplate
from dflop.data.conversation import parse_row
from dflop.data.tokens import ChatTokenizer
from dflop.models.media import MediaRules
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
    "{{", "}}", "{%", "%}", "{{ messages }}", "{{ 1 // 0 }}", "{{ messages[9].content }}",
    "{{ ''.__class__.__mro__ }}", "{% for x in range(99999999) %}a",
    "{{ 'a' * 10 ** 10 }}", "{{ m.content.format(m) }}", "{% include 'a' %}", "{% import 'os' as o %}", "{{ cycler }}",
    "{{ lipsum(9) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% set ns = namespace(a=1) %}", "{{ m['content'] | tojson }}",
    "{{ undefined.a.b }}",
    "{% break %}", "{{ m.content | float }}", "{{ messages | length / 0 }}", "{{ raise_exception(messages) }}",
    "{{ strftime_now() }}", "{{ (1,2)[5] }}",
    "{% if m.content in 5 %}{% endif %}", "{{ m.role + 1 }}", "{{ [1] | sum('a') }}",
    "{% filter nope %}{% endfilter %}", "\ue0f00\ue0f1", "\ue0f099\ue0f1", "\ue0f0٣\ue0f1",
    "(" * 300, "{{ " + "(" * 150 + "1" + ")" * 150 + " }}", "{{ dict(a=m).a.b() }}", "{{ m() }}",
    "{{ {}|dictsort|first }}", "{{ 2 ** 99999999 }}",
)  # fmt: skip
_ROLES = st.lists(st.sampled_from(("system", "user", "assistant", "text")), min_size=1, max_size=4)


@functools.cache
def _tokenizer() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = json.loads(make_tokenizer(Path(folder)).read_text())
    vocabulary = found["model"]["vocab"]
    kept = {token: number for token, number in vocabulary.items() if number < 280}  # an example must stay readable
    found["model"]["vocab"] = kept
    found["model"]["merges"] = [
        m for m in found["model"]["merges"] if "".join(m if isinstance(m, list) else m.split()) in kept
    ]
    return found


def _template(folder: Path) -> Callable[[Any], None]:
    def check(example: tuple[str, list[str]]) -> None:
        source, roles = example
        found = attempt(ChatTemplate, source, "fuzz")
        if found is not None:
            skeleton = attempt(found.skeleton, tuple(roles))
            assert skeleton is None or [p for p in skeleton if isinstance(p, int)] == list(range(len(roles)))

    return check


def _template_file(folder: Path) -> Callable[[Any], None]:
    def check(example: Any) -> None:
        path = folder / "tokenizer_config.json"
        path.write_bytes(example if isinstance(example, bytes) else json.dumps(example).encode())
        found = attempt(ChatTemplate.load, str(path))
        if found is not None:
            attempt(found.skeleton, ("user", "assistant"))

    return check


def _template_files() -> st.SearchStrategy[Any]:
    sound = {"chat_template": BUILT_IN["chatml"], "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    named = {**sound, "chat_template": [{"name": "default", "template": BUILT_IN["qwen"]}]}
    return st.one_of(
        hostile.broken(sound), hostile.broken(named), hostile.broken_bytes([json.dumps(named).encode()]),
        st.sampled_from((b"[" * 3000, b'{"chat_template":' * 3000, b"9" * 5000)),
    )  # fmt: skip


def _names(folder: Path) -> Callable[[Any], None]:
    return lambda name: attempt(ChatTemplate.load, name) and None


def _tokenizer_file(folder: Path) -> Callable[[Any], None]:
    family = rules()
    row = {
        "conversations": [
            {"from": "human", "value": "what? \x00\ufffd <|im_end|>"},
            {"from": "gpt", "value": "the cat"},
        ]
    }
    sample = parse_row(row, 0)

    def check(example: Any) -> None:
        path = folder / "tokenizer.json"
        path.write_bytes(example if isinstance(example, bytes) else json.dumps(example).encode())
        found = attempt(ChatTokenizer, path, family)
        if found is not None:
            _encode(found, sample, family)

    return check


def _encode(tokenizer: ChatTokenizer, sample: Any, family: MediaRules) -> None:
    counts = attempt(tokenizer.count, [sample], [[]])
    encoded = attempt(tokenizer.encode, sample, [])
    if counts is not None and encoded is not None:
        assert counts[0].num_text_tokens == len(encoded.input_ids)
        assert counts[0].num_supervised_tokens == encoded.num_supervised_tokens


TARGETS = (
    Target(
        "chat-template",
        "Jinja of chat templates cut up",
        lambda: st.tuples(hostile.broken_text(_TEMPLATES, _JINJA), _ROLES),
        _template,
    ),
    Target(
        "chat-template-file",
        "`tokenizer_config.json` with values of any type, broken bytes",
        _template_files,
        _template_file,
    ),
    Target("chat-template-name", "names of templates and files", lambda: hostile.TEXTS, _names),
    Target(
        "tokenizer",
        "`tokenizer.json` with values of any type, broken bytes",
        lambda: st.one_of(hostile.broken(_tokenizer()), hostile.broken_bytes([json.dumps(_tokenizer()).encode()])),
        _tokenizer_file,
    ),
)
