r"""Chat templates: what a model's own template writes around the turns of a conversation.

A template is the Jinja text that ships with a tokenizer. It is rendered once per sequence of roles, with a mark in
place of every turn's text; what lies between the marks is the template's. So ten million conversations cost a few
dozen renderings, no text of a user can act as template, and which characters are an answer is known exactly.

A template that looks into its texts (reasoning, trimming; `probe.py` tells) is rendered with every conversation's own
ones. What it writes around turns in every case is still the template's; what is left between is the turn as it shows
it, with reasoning it put there or moved. Where the two cannot be told apart the row is refused.

Templates come with tokenizers from elsewhere: they run in Jinja's sandbox, where they reach nothing but their messages,
and for so many lines only. Lines are counted and not seconds, so that a template works everywhere or nowhere.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from dflop.data.annotations import BadSample
from dflop.data.probe import Looks, Probe, joins_unseen, watched
from dflop.errors import ConfigError, did_you_mean
from dflop.records import parse_json

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


class Shown(NamedTuple):
    """One conversation as a template shows it."""

    skeleton: Skeleton
    texts: tuple[str, ...]
    """Of every turn."""


PLAIN_ROLE = "text"
"""Role of a turn that is no conversation: pre-training text, which no template touches."""

# Characters of a private-use area, so that no template holds them.
_MARK = "\ue0f0{}\ue0f1"
_MARKS = re.compile("\ue0f0(\\d+)\ue0f1")
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_CACHED = 4096
MAX_LINES = 200_000
"""Of the Python that a template is compiled to, per rendering: a thousand turns take some ten thousand."""
_MAX_CHARACTERS = 100_000


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
            environment = _environment()
            self._template = environment.from_string(source)
            self._joins_unseen = joins_unseen(environment.parse(source))
        except Exception as error:  # what is constant in a template is computed here, see `_render`
            raise ConfigError(f"chat template is no valid Jinja: {_words(error)}", where=name) from error
        self._around: Callable[[tuple[str, ...]], _Around] = functools.lru_cache(_MAX_CACHED)(self._look)
        self._gaps: Callable[[tuple[str, ...], bool], tuple[str, ...]] = functools.lru_cache(_MAX_CACHED)(self._common)

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
        except (OSError, ValueError) as error:  # a name with a zero in it is a ValueError
            raise ConfigError(
                f"chat template `{spec}` cannot be read: {error}",
                where="dataset.chat_template",
                hint=f"a path, or {did_you_mean(spec, BUILT_IN)}",
            ) from error
        if path.suffix != ".json":
            return cls(text, spec, _special_tokens(path.with_name(_TOKENIZER_CONFIG)))
        template, variables = _of_json(text, spec)
        return cls(template, spec, variables or _special_tokens(path.with_name(_TOKENIZER_CONFIG)))

    def skeleton(self, roles: tuple[str, ...]) -> Skeleton:
        """What the template writes around turns of these roles.

        Raises:
            ConfigError: the template refuses them, or loses or repeats a turn.
        """
        return self._around(roles).skeleton

    def looks_into(self, roles: tuple[str, ...], texts: tuple[str, ...]) -> bool:
        """Whether what the template writes may depend on these texts.

        Raises:
            ConfigError: as `skeleton`.
        """
        around = self._around(roles)
        return around.looks.inside or (around.looks.for_empty and not all(texts))

    def shown(self, roles: tuple[str, ...], texts: tuple[str, ...]) -> Shown:
        """A conversation as the template shows it.

        Args:
            roles: Of its turns.
            texts: Of its turns. None holds what the template itself writes between turns, or marks of this module.

        Raises:
            ConfigError: as `skeleton`.
            BadSample: the template refuses the texts, or writes around them what it writes around no others.
        """
        if not self.looks_into(roles, texts):
            return Shown(self._around(roles).skeleton, texts)
        as_parts = self._around(roles).as_parts
        gaps = self._gaps(roles, as_parts)
        try:
            rendered = self._render(roles, texts, as_parts)
        except Exception as error:
            raise BadSample(f"the chat template refuses the conversation: {_words(error)}") from error
        refused = BadSample("the chat template looks into the texts, and its own text cannot be separated from theirs")
        if not all(gaps[1:-1]) or any(gap in text for gap in gaps if gap for text in texts):
            raise refused
        first, last = len(gaps[0]), len(rendered) - len(gaps[-1])
        if not rendered.startswith(gaps[0]) or not rendered.endswith(gaps[-1]) or first > last:
            raise refused
        found = []
        for gap in gaps[1:-1]:
            at = rendered.find(gap, first, last)
            if at < 0:
                raise refused
            found.append(rendered[first:at])
            first = at + len(gap)
        found.append(rendered[first:last])
        pieces = (part for number, gap in enumerate(gaps) for part in (gap, number)[: 1 + (number < len(roles))])
        return Shown(tuple(part for part in pieces if part != ""), tuple(found))

    def _look(self, roles: tuple[str, ...]) -> _Around:
        """Renders marks for texts of these roles, and notes what the template does with them."""
        if roles == (PLAIN_ROLE,):
            return _Around((0,), False, Looks())
        for as_parts in (False, True):
            looks = Looks()
            looks.inside = self._joins_unseen
            try:
                marks = tuple(Probe.of(_MARK.format(i), looks) for i in range(len(roles)))
                rendered = self._render(roles, marks, as_parts)
            except Exception as error:  # a template can divide by zero, or ask for more memory than there is
                if as_parts:
                    raise self._error(roles, f"does not render: {_words(error)}") from error
                continue
            pieces = _MARKS.split(rendered)
            skeleton = tuple(int(p) if i % 2 else p for i, p in enumerate(pieces) if i % 2 or p)
            if [p for p in skeleton if isinstance(p, int)] == list(range(len(roles))):
                return _Around(skeleton, as_parts, looks)
        raise self._error(roles, "does not show every turn once, in order")

    def _common(self, roles: tuple[str, ...], as_parts: bool) -> tuple[str, ...]:
        """What stands before, between and behind the turns, whatever answers are like and wherever they stand.

        An answer with reasoning, and one that is not the last, tell a turn's header from what a template adds to it.
        """
        plain = tuple(_MARK.format(i) for i in range(len(roles)))
        reasoned = tuple(
            f"<think>\n{mark}\n</think>\n\n{mark}" if role == "assistant" else mark
            for role, mark in zip(roles, plain, strict=True)
        )
        variants = [(roles, plain), (roles, reasoned), ((*roles, "user"), (*plain, _MARK.format(len(roles))))]
        found: list[list[str]] = []
        for number, (of_roles, texts) in enumerate(variants):
            try:
                gaps = _gaps_of(self._render(of_roles, texts, as_parts), len(of_roles))
            except Exception:  # refuses one of them: the others tell
                continue
            if gaps is not None and number == 1:
                gaps = [gap.removesuffix("<think>\n") for gap in gaps]  # of the answer, not of its header
            if gaps is not None:
                found.append(gaps if number < 2 else gaps[: len(roles)])
        ends = [gaps[len(roles)] for gaps in found if len(gaps) > len(roles)]
        return (
            *(_common_prefix([gaps[i] for gaps in found]) for i in range(len(roles))),
            _common_prefix(ends),
        )

    def _render(self, roles: tuple[str, ...], texts: tuple[str, ...], as_parts: bool) -> str:
        """Multimodal templates take a turn's content as a list of parts, others as a string."""
        contents: list[Any] = [[{"type": "text", "text": text}] for text in texts] if as_parts else list(texts)
        messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
        with _at_most(MAX_LINES):
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=False, **self._variables
            )

    def _error(self, roles: tuple[str, ...], what: str) -> ConfigError:
        shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
        return ConfigError(
            f"chat template {what} (turns: {shown})", where=self.name, hint="set dataset.chat_template to another one"
        )


class _Around(NamedTuple):
    skeleton: Skeleton
    as_parts: bool
    looks: Looks


def _common_prefix(texts: list[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _gaps_of(rendered: str, num_turns: int) -> list[str] | None:
    """Texts before, between and behind the marks of turns; None where a turn is missing or out of order."""
    pieces = _MARKS.split(rendered)
    gaps, seen = [pieces[0]], -1
    for number, text in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
        if number == seen:
            gaps[-1] = text
        elif number == seen + 1:
            gaps.append(text)
            seen = number
        else:
            return None
    return gaps if seen == num_turns - 1 else None


def _of_json(text: str, spec: str) -> tuple[str, dict[str, str]]:
    try:
        content = parse_json(text)
        template = content["chat_template"]
        if isinstance(template, list):  # several named ones
            template = next((t["template"] for t in template if t["name"] == "default"), None)
        elif isinstance(template, dict):
            template = template.get("default")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError("no `chat_template` in this file", where=spec) from error
    if not isinstance(template, str):
        raise ConfigError("`chat_template` is neither a text nor a list with one named `default`", where=spec)
    return template, _variables(content)


def _special_tokens(path: Path) -> dict[str, str]:
    """Names of special tokens in a tokenizer's config, where there is one: templates of other files use them, too."""
    try:
        content = parse_json(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return _variables(content) if isinstance(content, dict) else {}


def _variables(content: dict[str, Any]) -> dict[str, str]:
    found = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = content.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _environment() -> jinja2.Environment:
    # The names and settings templates are written against are those of Hugging Face tokenizers.
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # folding constants takes time that grows with the square of an expression
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.filters = {name: watched(name, filter_) for name, filter_ in environment.filters.items()}
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda _format: ""  # a template with a clock in it would change every day
    return environment


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's, in which no single operation makes a long text or a huge number either."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Whatever the operator stands for, unless a text or a list is repeated or filled, or a power taken."""
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateError(f"`{operator}` is not for templates of conversations")
        sequence, number = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(sequence, str | list | tuple) and len(sequence) * max(0, int(number)) > _MAX_CHARACTERS:
            raise jinja2.TemplateError(f"`*` makes more than {_MAX_CHARACTERS} elements")
        return super().call_binop(context, operator, left, right)


@contextmanager
def _at_most(num_lines: int) -> Iterator[None]:
    """Within it, code of templates that this thread runs ends with an error after so many lines of it."""
    before, left = sys.gettrace(), num_lines

    def trace(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise jinja2.TemplateError(f"it takes more than {num_lines} lines to render")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks answers for a loss mask; which characters are answers is known here anyhow."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _words(error: Exception) -> str:
    """What went wrong in a template, in a line."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, jinja2.TemplateError) and text else f"{type(error).__name__} {text}".strip()


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
