"""Which chat template is taken of those next to a tokenizer, and what is said where none can be."""

import re

import pytest

from dflop.data.demo_content import train_tokenizer
from dflop.data.model_tokenizer import find_tokenizer
from dflop.models import load_family

RULES = load_family("qwen2_vl", {}, {})
TOKENS = ["</s>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GOOD = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (GOOD, ""),
        ("{{ raise_exception('no system turns') }}", "chat_template.jinja is not used: .*no system turns"),
        ("{% for m in %}", "chat_template.jinja is not used: chat template is not valid Jinja"),
        (None, "tokenizer lacks .*im_start.*; no file states a chat template, so `chatml` is assumed"),
    ],
)
def test_a_template_that_cannot_be_used_is_the_problem_and_not_the_tokens_of_another(template, said, tmp_path):
    train_tokenizer(["user assistant What is this? A cat."], tmp_path / "tokenizer.json", TOKENS)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    problem = find_tokenizer((tmp_path,), RULES).problem
    assert re.fullmatch(f".*{said}.*" if said else "", problem)
    assert template is None or "chatml" not in problem
