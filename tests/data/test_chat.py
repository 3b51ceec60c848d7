"""Chat templates: rendered once per sequence of roles, whatever the template does."""

import json

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflop.data.chat import BUILT_IN, ChatTemplate
from dflop.errors import ConfigError

# In the manner of published templates: default system prompt, parts, control structures, helpers.
ELABORATE = """
{%- if messages[0]['role'] == 'system' %}{% set first = 1 %}{{ '<|s|>' + messages[0]['content'] + '<|e|>' }}
{%- else %}{% set first = 0 %}{{ '<|s|>Be kind.<|e|>' }}{% endif -%}
{%- for message in messages[first:] %}
    {%- if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('no role ' + message['role']) }}{% endif %}
    {%- if loop.index0 > 40 %}{% break %}{% endif %}
    {{- '<|' + message.role + '|>' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- else %}{% for part in message['content'] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}
    {%- endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}"""
PARTS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)

roles = st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=6).map(tuple)


@given(roles, st.booleans(), st.sampled_from([*BUILT_IN.values(), PARTS_ONLY]))
def test_a_skeleton_filled_in_is_the_rendered_template(turns, with_system, source):
    turns = ("system", *turns) if with_system else turns
    contents = [f"text {i}" for i in range(len(turns))]
    parts = source == PARTS_ONLY
    messages = [
        {"role": role, "content": [{"type": "text", "text": text}] if parts else text}
        for role, text in zip(turns, contents, strict=True)
    ]
    expected = jinja2.Environment(trim_blocks=True).from_string(source).render(messages=messages)
    skeleton = ChatTemplate(source, "here").skeleton(turns)
    assert "".join(contents[p] if isinstance(p, int) else p for p in skeleton) == expected


@pytest.mark.parametrize("name", BUILT_IN)
def test_transformers_is_given_the_same_template_with_media_and_an_answer_to_come(name):
    source = ChatTemplate.for_transformers(name, {"image": "<v><i></v>", "audio": "<a>"})
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    shown = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "what?"}, {"type": "audio"}]
    said = [{"role": "user", "content": shown}, {"role": "assistant", "content": "a cat"}]
    written = "".join(
        p if isinstance(p, str) else ("<v><i></v>what?<a>", "a cat")[p]
        for p in ChatTemplate(BUILT_IN[name], name).skeleton(("user", "assistant"))
    )
    assert made.render(messages=said) == written
    asked = made.render(messages=said[:1], add_generation_prompt=True)
    assert written.startswith(f"{asked}a cat")


def test_an_elaborate_template():
    template = ChatTemplate(ELABORATE, "here", {"eos_token": "<|e|>"})
    assert template.skeleton(("user", "assistant")) == ("<|s|>Be kind.<|e|><|user|>", 0, "<|assistant|>", 1, "<|e|>")
    assert template.skeleton(("system", "user")) == ("<|s|>", 0, "<|e|><|user|>", 1)


def test_what_a_template_refuses_or_loses_is_an_error():
    with pytest.raises(ConfigError, match=r"does not render: no role tool \(turns: user, tool\)"):
        ChatTemplate(ELABORATE, "here").skeleton(("user", "tool"))
    with pytest.raises(ConfigError, match="does not show every turn once, in order"):
        ChatTemplate(ELABORATE, "here").skeleton(("user", "assistant") * 30)
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% for %}", "here")


def test_a_template_cannot_reach_the_interpreter():
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}{{ messages[0].content }}"
    with pytest.raises(ConfigError, match="does not render"):
        ChatTemplate(source, "here").skeleton(("user",))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}", "more than 200000 lines"),
        ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "recursion|more than 200000 lines"),
        ("{{ 'x' * 10000000000 }}", "makes more than 100000 elements"),
        ("{{ 10000000000 * ['x'] }}", "makes more than 100000 elements"),
        ("{{ 10 ** 10 ** 10 }}", "is not allowed in chat templates"),
        ("{{ '%09999999999d' % 1 }}", "is not allowed in chat templates"),
        ("{% for i in range(10000000000) %}{% endfor %}", "too big"), ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe|does not render"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"), ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ strftime_now('%d %b %Y') }}", "today's date"),
        ("{% if strftime_now('%Y') > '2025' %}{% endif %}", "today's date"),
        ("{% set year = 'in ' + strftime_now('%Y')[:2] %}", "today's date"),
    ],
)  # fmt: skip
def test_a_hostile_template_is_one_error(source, told):
    with pytest.raises(ConfigError, match=f"does not render: .*({told})"):
        ChatTemplate(source + "{{ messages[0].content }}", "here").skeleton(("user",))


def test_a_date_that_is_not_written_is_no_matter():
    source = (
        "{% set d = strftime_now('%d') %}{% if messages[0].role != 'system' %}{{ d }}{% endif %}" + BUILT_IN["chatml"]
    )
    assert ChatTemplate(source, "here").skeleton(("system",)) == ("<|im_start|>system\n", 0, "<|im_end|>\n")


def test_long_conversations_are_far_below_the_limit():
    skeleton = ChatTemplate(PARTS_ONLY, "here").skeleton(("user",) * 2000)
    assert [part for part in skeleton if isinstance(part, int)] == list(range(2000))


def test_templates_come_from_files(tmp_path):
    jinja, config, named, none = (tmp_path / n for n in ("t.jinja", "tokenizer_config.json", "n.json", "x.json"))
    jinja.write_text("{% for m in messages %}|{{ m.content }}{% endfor %}")
    bos = "{{ bos_token }}{{ messages[0].content }}"
    config.write_text(json.dumps({"chat_template": bos, "bos_token": {"content": "<s>"}}))
    named.write_text(json.dumps({"chat_template": [{"name": "default", "template": bos}], "bos_token": "<b>"}))
    none.write_text("{}")
    assert ChatTemplate.load(str(jinja)).skeleton(("user", "user")) == ("|", 0, "|", 1)
    assert ChatTemplate.load(str(config)).skeleton(("user",)) == ("<s>", 0)
    assert ChatTemplate.load(str(named)).skeleton(("user",)) == ("<b>", 0)
    jinja.write_text(bos)
    assert ChatTemplate.load(str(jinja)).skeleton(("user",)) == ("<s>", 0), "of the tokenizer beside it"
    named.write_text(json.dumps({"chat_template": {"default": bos, "tools": "x"}}))
    assert ChatTemplate.load(str(named)).skeleton(("user",)) == ("<s>", 0)
    with pytest.raises(ConfigError, match="no `chat_template`"):
        ChatTemplate.load(str(none))
    with pytest.raises(ConfigError, match="cannot be read") as error:
        ChatTemplate.load("chatlm")
    assert "chatml" in error.value.hint


def test_plain_text_has_no_template():
    assert ChatTemplate.load("qwen").skeleton(("text",)) == (0,)
