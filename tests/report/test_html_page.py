"""Pages as such: what may run in them, what their JSON may hold, and how they come to lie on disk."""

from __future__ import annotations

import json
import math
import re

from dflop.report.html_page import TEMPLATES, content_policy, json_block, source_of
from dflop.resources import path as resource_path

FOLDER = resource_path("sql").parent / "dflop" / "report" / "templates"
HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 \u2029"


def test_json_cannot_leave_its_block_and_says_what_it_was_given() -> None:
    text = json_block({HOSTILE: [HOSTILE, 1, 2.5, None, True]})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {HOSTILE: [HOSTILE, 1, 2.5, None, True]}


def test_json_knows_no_nan() -> None:
    assert json.loads(json_block([math.nan, (math.inf, -math.inf), {"a": math.nan}])) == [
        None, [None, None], {"a": None},
    ]  # fmt: skip


def test_the_policy_names_hashes_and_without_scripts_allows_none() -> None:
    policy = content_policy("a {}", "")
    assert re.fullmatch(
        r"default-src 'none'; style-src 'sha256-[A-Za-z0-9+/]{43}='; base-uri 'none'; form-action 'none'", policy
    )
    assert "; script-src 'sha256-" in content_policy("a {}", "b()")
    assert content_policy("a {}", "b()") != content_policy("a {}", "c()")


def test_sources_are_small_load_nothing_and_write_no_markup() -> None:
    writes = r"\b(src|srcset)=|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write"
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert len(text.splitlines()) <= 200, path
        assert not re.search(writes, text), path
        assert not re.search(r"\b(eval|fetch|XMLHttpRequest|WebSocket|import)\s*\(", text), path
        if path.suffix in (".js", ".css"):
            assert "</" not in text, "it stands inside an element"
            assert source_of(path.name) == text
    assert (resource_path("sql").parent / TEMPLATES.replace(".", "/") / "templates").samefile(FOLDER)
