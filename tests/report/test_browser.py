"""Pages as a browser shows them: they load nothing, complain about nothing, fit, and nothing runs in them.

Skipped only where no browser is installed; CI installs one.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dflop.report.html_page import render_page
from dflop.report.run_page import render_report
from tests.browser import Browser, browser_path, opened
from tests.report.detailed import detailed
from tests.report.test_html_page import comparison

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("browser"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_report(detailed(num_steps=12, num_batches=8)))
    return path


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compared") / "compared.html"
    path.write_text(render_page(comparison()))
    return path


@pytest.fixture(params=["report", "compared"])
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.mark.parametrize(
    ("look", "width"), [("light", 1280), *(pytest.param(*p, marks=pytest.mark.lane("browser")) for p in OTHER_LOOKS)]
)
def test_nothing_is_loaded_said_or_cut_off(browser: Browser, document: Path, look: str, width: int) -> None:
    with opened(browser, document, width=width, dark=look == "dark", printed=look == "print") as page:
        assert page.requests() == [document.absolute().as_uri()]
        assert page.said() == []
        assert page.eval("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.eval(OVERFLOWING) == []


def test_a_bar_that_is_pointed_at_tells_what_it_did_and_folded_rows_are_printed(browser: Browser, report: Path) -> None:
    with opened(browser, report, printed=True) as page:
        # Five processes, four microbatches, two directions and an update, under both policies; one has no work once.
        assert (
            page.eval("document.querySelectorAll('#timeline ~ figure path > title').length") == 5 * (4 * 2 + 1) * 2 - 2
        )
        assert page.eval("document.querySelector('#timeline ~ figure path > title').textContent").startswith(
            "0: vision"
        )
        assert page.eval("[...document.querySelectorAll('details')].every((e) => e.lastElementChild.offsetHeight > 0)")
    with opened(browser, report) as page:
        assert page.eval("document.querySelectorAll('details').length") >= 2


def test_a_foreign_script_does_not_run(browser: Browser, report: Path, tmp_path: Path) -> None:
    text = report.read_text().replace("</main>", "<script>document.title = 'taken'</script></main>")
    changed = tmp_path / "changed.html"
    changed.write_text(text)
    with opened(browser, changed) as page:
        assert page.eval("document.title") != "taken"
        assert any("Content Security Policy" in line or "ContentSecurityPolicy" in line for line in page.said())


def test_a_phone_shows_every_cell_of_a_table(browser: Browser, report: Path) -> None:
    beyond = "[...document.querySelectorAll('td')].filter((e) => e.getBoundingClientRect().right > innerWidth).length"
    with opened(browser, report, width=390) as page:
        assert page.eval("document.querySelectorAll('td').length") > 50
        assert page.eval(beyond) == 0
