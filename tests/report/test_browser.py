"""Pages as a browser shows them: they load nothing, complain about nothing, fit, and their scripts do what they say.

Skipped only where no browser is installed; CI installs one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dflop import files
from dflop.report.comparison_page import render_comparison
from dflop.report.html import CONTENTS, write_report
from dflop.report.worth import WorthInputs, amount, worth
from tests.browser import Browser, Page, browser_path, opened
from tests.report.detailed import detailed
from tests.report.runs import HOSTILE
from tests.report.test_comparison_page import comparison

pytestmark = [
    pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed (apt-get install chromium)"),
    pytest.mark.timeout(300),
]
PAPER = 718
"""A4 between its margins, px."""
OTHER_LOOKS = (("light", 390), ("dark", 1280), ("dark", 390), ("print", PAPER))
OVERFLOWING = """
[...document.querySelectorAll('body *')]
  .filter((e) => matchMedia('print').matches || !e.closest('.scroll, pre') || e.matches('.scroll, pre'))
  .filter((e) => e.getClientRects().length)
  .filter((e) => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((e) => `${e.tagName}.${e.getAttribute('class')}: ${e.textContent.slice(0, 60)}`)
"""
INPUTS = "Object.fromEntries([...document.querySelectorAll('#calculator input')].map((e) => [e.name, e.value]))"
OUTPUTS = """
Object.fromEntries([...document.querySelectorAll('#calculator output')]
  .map((e) => [e.name, [e.dataset.value, e.textContent]]))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, *detailed(num_steps=12, num_batches=8))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compared") / "compared.html"
    files.replace(path, render_comparison(comparison()))
    return path


@pytest.fixture(params=["report", "compared"])
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Page]:
    with opened(browser, report) as found:
        yield found
        assert found.said() == []


@pytest.mark.parametrize(
    ("look", "width"), [("light", 1280), *(pytest.param(*p, marks=pytest.mark.lane("browser")) for p in OTHER_LOOKS)]
)
def test_nothing_is_loaded_said_or_cut_off(browser: Browser, document: Path, look: str, width: int) -> None:
    with opened(browser, document, width=width, dark=look == "dark", printed=look == "print") as page:
        assert page.requests() == [document.absolute().as_uri()]
        assert page.said() == []
        assert page.eval("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.eval(OVERFLOWING) == []


def test_without_scripts_everything_is_there(browser: Browser, report: Path) -> None:
    with opened(browser, report, scripts=False) as page:
        assert page.requests() == [report.absolute().as_uri()]
        # Five processes, four microbatches, two directions, measured and predicted, under both policies.
        assert page.eval("document.querySelectorAll('.drawing rect').length") >= 5 * 4 * 2 * 2 * 2
        assert page.eval("document.querySelectorAll('h2').length") == len(CONTENTS)
        assert page.eval("getComputedStyle(document.querySelector('.buttons')).display") == "none"
        given, shown = inputs(page), page.eval(OUTPUTS)
        assert shown["saved_gpu_hours"][1] == amount(worth(given).saved_gpu_hours)
        assert page.eval(OVERFLOWING) == []


def test_a_foreign_script_does_not_run(browser: Browser, report: Path, tmp_path: Path) -> None:
    text = report.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>")
    changed = tmp_path / "changed.html"
    changed.write_text(text)
    with opened(browser, changed) as page:
        assert page.eval("document.title") != "taken"
        assert any("Content Security Policy" in line or "ContentSecurityPolicy" in line for line in page.said())


# The calculator ---------------------------------------------------------------------------------------------------


def inputs(page: Page) -> WorthInputs:
    """What stands in the fields."""
    return WorthInputs(**{name: float(text) if text else math.nan for name, text in page.eval(INPUTS).items()})


def assert_computes(page: Page) -> None:
    """The page's results are those of worth.py for what stands in its fields."""
    shown, wanted = page.eval(OUTPUTS), asdict(worth(inputs(page)))
    assert shown.keys() == wanted.keys()
    for name, (value, text) in shown.items():
        assert float(value.replace("Infinity", "inf")) == pytest.approx(wanted[name], rel=1e-12, nan_ok=True), name
        if name not in ("saved_frac", "saved_s"):
            assert text == amount(float(value.replace("Infinity", "inf"))), name


def test_the_calculator_computes_what_python_does(page: Page) -> None:
    assert_computes(page)
    for name, text in (
        ("num_gpus", "512"), ("num_steps", "250000"), ("step_s", "3.75"), ("usd_per_gpu_hour", "1.99"),
        ("speedup", "1.375"), ("speedup_low", "1.25"), ("speedup_high", "1.5"), ("once_gpu_hours", "120.5"),
        ("speedup", "0.8"), ("step_s", ""), ("num_gpus", "-4"),
    ):  # fmt: skip
        page.type(f"#calculator input[name={name}]", text)
        assert page.eval(INPUTS)[name] == text
        assert_computes(page)


# The timeline -----------------------------------------------------------------------------------------------------


def told(page: Page) -> str:
    """What the card says."""
    text: str = page.eval("document.getElementById('timeline-card').innerText")
    return text


def data(page: Page) -> dict[str, Any]:
    """What the page knows of the timeline."""
    found: dict[str, Any] = page.eval("JSON.parse(document.getElementById('timeline-data').textContent)")
    return found


def bar_of(known: dict[str, Any], lane: str, kind: str) -> int:
    """The number of the longest bar of a kind in a lane."""
    kinds, lanes = known["kinds"], known["lanes"]
    found = [i for i, b in enumerate(known["bars"]) if lanes[b[0]][1] == lane and kinds[b[1]] == kind]
    return max(found, key=lambda i: known["bars"][i][4])


def test_pointing_at_a_bar_tells_microbatch_shapes_prediction_and_measurement(page: Page) -> None:
    known = data(page)
    number = bar_of(known, "0: vision pp0 dp0", "forward")
    page.move(*page.middle(f"rect[data-bar='{number}']:not(.p)"))
    _, _, microbatch, _, duration_s, predicted_s, *_, items = known["bars"][number]
    text = told(page)
    assert f"forward of microbatch {microbatch + 1} of 4" in text
    assert f"measured {1e3 * duration_s:.1f} ms" in text
    assert f"predicted {1e3 * predicted_s:.1f} ms of compute" in text
    assert "% off" in text
    position, item = items[0], items[1]
    sample = known["samples"][position]
    assert f"{sample[0]} (row {sample[1]}): {sample[5][item][1]}, {sample[5][item][2]} vision tokens" in text
    assert page.eval("document.querySelectorAll('.drawing .chosen').length") == 1

    # A bar of the LLM tells its samples, as text.
    first = next(
        i
        for i, bar in enumerate(known["bars"])
        if known["lanes"][bar[0]][1] == "3: llm pp0 dp0" and bar[1] == 0 and 0 in bar[-1][::2]
    )
    page.click(*page.middle(f"rect[data-bar='{first}']:not(.p)"))
    assert HOSTILE in told(page)
    assert "LLM tokens" in told(page)
    assert page.eval("document.querySelectorAll('#timeline-card script').length") == 0
