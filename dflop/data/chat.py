r"""Chat templates: what a model's own template writes around the turns of a conversation.

A template is the Jinja text that ships with a tokenizer. It is rendered once per sequence of roles, with a mark in
place of every turn's text; what lies between the marks is the template's. So ten million conversations cost a few
dozen renderings, no text of a user can act as template, and which characters are an answer is known exactly.
Texts go in as they are: a template that trims its messages does not get to.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from dflop.errors import ConfigError, did_you_mean

BUILT_IN = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}",
    "qwen": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    ),
    "llama3": (
        "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] }}<|eot_id|>{% endfor %}"
    ),
}
"""Templates by name: ChatML bare, ChatML with Qwen's system prompt, Llama 3."""

Skeleton = tuple[str | int, ...]
"""A rendered template: its own text, and the numbers of the turns whose texts stand in between."""

PLAIN_ROLE = "text"
"""Role of a turn that is no conversation: pre-training text, which no template touches."""

# Characters of a private-use area, so that no template holds them.
_MARK = "\ue0f0{}\ue0f1"
_MARKS = re.compile("\ue0f0(\\d+)\ue0f1")
_MAX_CACHED = 4096


class ChatTemplate:
    """A Jinja chat template, and the names of the special tokens it may use.

    Args:
        source: Jinja text, as in a `chat_template.jinja`.
        name: Where it comes from, for errors.
        variables: Further names the template may use (`bos_token`, ...).

    Raises:
        ConfigError: the text is no Jinja template.
    """

    def __init__(self, source: str, name: str, variables: dict[str, str] | None = None) -> None:
        self.source, self.name = source, name
        self._variables = variables or {}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template is no valid Jinja: {error}", where=name) from error
        self.skeleton: Callable[[tuple[str, ...]], Skeleton] = functools.lru_cache(_MAX_CACHED)(self._skeleton)

    @classmethod
    def load(cls, spec: str) -> ChatTemplate:
        """A built-in template by name, or the one of a file.

        Args:
            spec: One of `BUILT_IN`, or the path of a `.jinja` file or of a JSON file with a `chat_template`
                (`tokenizer_config.json`, `chat_template.json`).

        Raises:
            ConfigError: no such name or file, or no template in it.
        """
        if spec in BUILT_IN:
            return cls(BUILT_IN[spec], spec)
        path = Path(spec)
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"chat template `{spec}` cannot be read: {error}",
                where="dataset.chat_template",
                hint=f"a path, or {did_you_mean(spec, BUILT_IN)}",
            ) from error
        if path.suffix != ".json":
            return cls(text, spec)
        return cls(*_of_json(text, spec))

    def _skeleton(self, roles: tuple[str, ...]) -> Skeleton:
        """What the template writes around turns of these roles.

        Raises:
            ConfigError: the template refuses them, or loses or repeats a turn.
        """
        if roles == (PLAIN_ROLE,):
            return (0,)
        for as_parts in (False, True):
            try:
                rendered = self._render(roles, as_parts)
            except jinja2.TemplateError as error:
                if as_parts:
                    raise self._error(roles, f"does not render: {error}") from error
                continue
            pieces = _MARKS.split(rendered)
            skeleton = tuple(int(p) if i % 2 else p for i, p in enumerate(pieces) if i % 2 or p)
            if [p for p in skeleton if isinstance(p, int)] == list(range(len(roles))):
                return skeleton
        raise self._error(roles, "does not show every turn once, in order")

    def _render(self, roles: tuple[str, ...], as_parts: bool) -> str:
        """Multimodal templates take a turn's content as a list of parts, others as a string."""
        marks = [_MARK.format(i) for i in range(len(roles))]
        contents: list[Any] = [[{"type": "text", "text": m}] for m in marks] if as_parts else marks
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        return self._template.render(messages=messages, add_generation_prompt=False, **self._variables)

    def _error(self, roles: tuple[str, ...], what: str) -> ConfigError:
        shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
        return ConfigError(
            f"chat template {what} (turns: {shown})", where=self.name, hint="set dataset.chat_template to another one"
        )


def _of_json(text: str, spec: str) -> tuple[str, str, dict[str, str]]:
    try:
        content = json.loads(text)
        template = content["chat_template"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("no `chat_template` in this file", where=spec) from error
    if isinstance(template, list):  # several named ones
        template = {t["name"]: t["template"] for t in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError("`chat_template` is neither a text nor a list with one named `default`", where=spec)
    variables = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = content.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        variables[key] = value if isinstance(value, str) else ""
    return template, spec, variables


def _environment() -> jinja2.Environment:
    # The names and settings templates are written against are those of Hugging Face tokenizers.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda _format: ""  # a template with a clock in it would change every day
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for a loss mask; which characters are answers is known here anyhow."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
