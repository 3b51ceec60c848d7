r"""Chat templates: what a model's own template writes around the turns of a conversation.

A template is the Jinja text that ships with a tokenizer. It is rendered once per sequence of roles, with a mark in
place of every turn's text; what lies between the marks is the template's. So ten million conversations cost a few
dozen renderings, no text of a user can act as template, and which characters are an answer is known exactly.

A template that looks into its texts (reasoning, trimming; `sandbox.py` tells) is rendered with every conversation's own
ones. What it writes around turns in every case is still the template's; what is left between is the turn as it shows
it, with reasoning it put there or moved. Where the two cannot be distinguished the row is refused.

A turn with media reaches the template as a list of parts: text and media in their order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from dflop.data.annotations import BadSample
from dflop.data.sandbox import Looks, Probe, at_most, environment, joins_unseen, words
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
"""A rendered template: its own text, and the numbers of the texts that stand in between."""

Parts = tuple[tuple[str, ...], ...]
"""Per turn what a template is given for it: `text` or a kind of media, each; (): every turn is a text."""


class Shown(NamedTuple):
    """One conversation as a template shows it."""

    skeleton: Skeleton
    texts: tuple[str, ...]


PLAIN_ROLE = "text"
"""Role of a turn that is no conversation: pre-training text, which no template touches."""

# Characters of a private-use area, so that no template holds them.
_MARK = "\ue0f0{}\ue0f1"
_MARKS = re.compile("\ue0f0(\\d+)\ue0f1")
_TODAY = "\ue0f0\ue0f1"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_MAX_CACHED = 4096
MAX_LINES = 200_000
"""Lines of Python that one rendering of a template may run: a thousand turns take some ten thousand."""


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
            jinja = environment()
            self._template = jinja.from_string(source)
            self._joins_unseen = joins_unseen(jinja.parse(source))
        except Exception as error:  # what is constant in a template is computed here, see `_render`
            raise ConfigError(f"chat template is not valid Jinja: {words(error)}", where=name) from error
        self._around: Callable[[tuple[str, ...], Parts], _Around] = functools.lru_cache(_MAX_CACHED)(self._look)
        self._gaps: Callable[[tuple[str, ...], Parts, bool], tuple[str, ...]] = functools.lru_cache(_MAX_CACHED)(
            self._common
        )

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

    @staticmethod
    def for_transformers(spec: str, written: Mapping[str, str]) -> str:
        """Jinja text with which processors of transformers write what `load` gives for the same.

        Args:
            spec: As of `load`. A built-in template knows neither media nor an answer that is to come: here it does.
            written: Per media kind, what stands for an item in a text.

        Raises:
            ConfigError: as `load`.
        """
        if spec not in BUILT_IN:
            return ChatTemplate.load(spec).source
        source, text = BUILT_IN[spec], "{{ m['content'] }}"
        before_answer = (
            source.split("{% for m in messages %}")[1].split(text)[0].replace("{{ m['role'] }}", "assistant")
        )
        items = "".join(f"{{% elif p['type'] == '{kind}' %}}{of_item}" for kind, of_item in written.items())
        part = f"{{% if p['type'] == 'text' %}}{{{{ p['text'] }}}}{items}{{% endif %}}"
        parts = f"{{% for p in m['content'] %}}{part}{{% endfor %}}"
        shown = f"{{% if m['content'] is string %}}{text}{{% else %}}{parts}{{% endif %}}"
        return source.replace(text, shown) + f"{{% if add_generation_prompt %}}{before_answer}{{% endif %}}"

    def skeleton(self, roles: tuple[str, ...], parts: Parts = ()) -> Skeleton:
        """What the template writes around the texts of turns of these roles and parts, and for their media.

        Raises:
            ConfigError: the template refuses them, or loses, moves or repeats a text, or writes the date of today.
        """
        return self._around(roles, parts).skeleton

    def looks_into(self, roles: tuple[str, ...], texts: tuple[str, ...], parts: Parts = ()) -> bool:
        """Whether what the template writes may depend on these texts.

        Raises:
            ConfigError: as `skeleton`.
        """
        around = self._around(roles, parts)
        return around.looks.inside or (around.looks.for_empty and not all(texts))

    def shown(self, roles: tuple[str, ...], texts: tuple[str, ...], parts: Parts = ()) -> Shown:
        """A conversation as the template shows it.

        Args:
            roles: Of its turns.
            texts: Of its turns, or of their parts. None holds what the template itself writes between them, or marks
                of this module.
            parts: Of its turns.

        Raises:
            ConfigError: as `skeleton`.
            BadSample: the template refuses the texts, or writes around them what it writes around no others.
        """
        if not self.looks_into(roles, texts, parts):
            return Shown(self._around(roles, parts).skeleton, texts)
        as_parts = self._around(roles, parts).as_parts
        gaps = self._gaps(roles, parts, as_parts)
        try:
            rendered = self._render(roles, texts, parts, as_parts)
        except Exception as error:
            raise BadSample(f"the chat template refuses the conversation: {words(error)}") from error
        refused = BadSample("the chat template inspects message texts, and its own text cannot be separated from them")
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
        pieces = (piece for number, gap in enumerate(gaps) for piece in (gap, number)[: 1 + (number < len(texts))])
        return Shown(tuple(piece for piece in pieces if piece != ""), tuple(found))

    def shows_alike(self, roles: tuple[str, ...], *given: tuple[tuple[str, ...], Parts]) -> bool:
        """Whether the same turns, as different texts and parts, are shown alike; what takes no parts joins them.

        Raises:
            ConfigError: as `skeleton`.
        """
        _, parts = given[0]
        as_parts = self._around(roles, parts).as_parts
        if not (parts or as_parts):
            return True
        try:
            return len({self._render(roles, texts, of_turns, as_parts) for texts, of_turns in given}) == 1
        except Exception:  # one of them it refuses
            return False

    def _look(self, roles: tuple[str, ...], parts: Parts) -> _Around:
        """Renders marks for texts of these turns, and notes what the template does with them."""
        if roles == (PLAIN_ROLE,):
            return _Around((0,), False, Looks())
        num_texts = len(_roles_of_texts(roles, parts))
        for as_parts in (False, True):
            looks = Looks()
            looks.inside = self._joins_unseen
            try:
                marks = tuple(Probe.of(_MARK.format(i), looks) for i in range(num_texts))
                rendered = self._render(roles, marks, parts, as_parts)
            except Exception as error:  # a template can divide by zero, or ask for more memory than there is
                if as_parts:
                    raise self._error(roles, f"does not render: {words(error)}") from error
                continue
            pieces = _MARKS.split(rendered)
            skeleton = tuple(int(p) if i % 2 else p for i, p in enumerate(pieces) if i % 2 or p)
            if [p for p in skeleton if isinstance(p, int)] == list(range(num_texts)):
                return _Around(skeleton, as_parts, looks)
        raise self._error(roles, "does not show every turn once, in order")

    def _common(self, roles: tuple[str, ...], parts: Parts, as_parts: bool) -> tuple[str, ...]:
        """What stands before, between and behind the texts, whatever answers are like and wherever they stand.

        An answer with reasoning, and one that is not the last, tell a turn's header from what a template adds to it.
        """
        of_texts = _roles_of_texts(roles, parts)
        num_texts = len(of_texts)
        plain = tuple(_MARK.format(i) for i in range(num_texts))
        reasoned = tuple(
            f"<think>\n{mark}\n</think>\n\n{mark}" if role == "assistant" else mark
            for role, mark in zip(of_texts, plain, strict=True)
        )
        more = (*roles, "user"), (*plain, _MARK.format(num_texts)), (*parts, ("text",)) if parts else ()
        found: list[list[str]] = []
        for number, (of_roles, texts, of_turns) in enumerate([(roles, plain, parts), (roles, reasoned, parts), more]):
            try:
                gaps = _gaps_of(self._render(of_roles, texts, of_turns, as_parts), len(texts))
            except Exception:  # refuses one of them: the others tell
                continue
            if gaps is not None and number == 1:
                gaps = [gap.removesuffix("<think>\n") for gap in gaps]  # of the answer, not of its header
            if gaps is not None:
                found.append(gaps if number < 2 else gaps[:num_texts])
        ends = [gaps[num_texts] for gaps in found if len(gaps) > num_texts]
        return (*(_common_prefix([gaps[i] for gaps in found]) for i in range(num_texts)), _common_prefix(ends))

    def _render(self, roles: tuple[str, ...], texts: tuple[str, ...], parts: Parts, as_parts: bool) -> str:
        """Multimodal templates take a turn's content as a list of parts, others as a string."""
        left, messages = iter(texts), []
        for role, of_turn in zip(roles, parts or (("text",),) * len(roles), strict=True):
            content = [{"type": kind, kind: next(left) if kind == "text" else ""} for kind in of_turn]
            is_list = as_parts or of_turn != ("text",)
            messages.append({"role": role, "content": content if is_list else content[0]["text"]})
        clock = Looks()
        with at_most(MAX_LINES):
            rendered = self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=False,
                strftime_now=lambda _format: Probe.of(_TODAY, clock),
                **self._variables,
            )
        if clock.inside or clock.for_empty or _TODAY in rendered:
            raise jinja2.TemplateError(
                "it writes today's date (strftime_now), so tokens would change from day to day: write a date into "
                "a copy of it, or provide the turns that it requires"
            )
        return rendered

    def _error(self, roles: tuple[str, ...], what: str) -> ConfigError:
        shown = ", ".join(roles[:6]) + (", ..." if len(roles) > 6 else "")
        return ConfigError(
            f"chat template {what} (turns: {shown})", where=self.name, hint="set dataset.chat_template to another one"
        )


class _Around(NamedTuple):
    skeleton: Skeleton
    as_parts: bool
    looks: Looks


def _roles_of_texts(roles: tuple[str, ...], parts: Parts) -> tuple[str, ...]:
    if not parts:
        return roles
    return tuple(role for role, of_turn in zip(roles, parts, strict=True) for kind in of_turn if kind == "text")


def _common_prefix(texts: list[str]) -> str:
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in same)


def _gaps_of(rendered: str, num_texts: int) -> list[str] | None:
    """What stands before, between and behind the marks; None where one is missing or out of order."""
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
    return gaps if seen == num_texts - 1 else None


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
    more = content.get("extra_special_tokens")
    found = {}
    for key, value in {**content, **(more if isinstance(more, dict) else {})}.items():
        name = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(name, str):
            found[key] = name
    return found
