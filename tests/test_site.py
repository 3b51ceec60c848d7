"""What `docs/site.py` makes itself; that its links lead somewhere is checked whenever it is built."""

import re
from pathlib import Path

import pytest

from docs.site import WORKER_PACKAGE, commands, search_from_disk
from tests.browser import Browser, browser_path, opened

PAGE = f"""<!doctype html><script src="{WORKER_PACKAGE}"></script>
<script>
  const worker = new Worker("assets/javascripts/workers/search.1.min.js")
  window.found = new Promise((done) => {{ worker.onmessage = (event) => done(event.data) }})
  worker.postMessage("gradient")
</script>"""


def test_every_command_is_in_a_table_that_leads_to_it() -> None:
    text = "\n\n".join(commands())
    linked = re.findall(r"^\| \[`(dflop [\w -]+)`\]\(#([\w-]+)\) \| \w.+ \|$", text, re.MULTILINE)
    headings = re.findall(r"^##+ (.+)$", text, re.MULTILINE)
    assert [name for name, _ in linked] == headings
    assert [anchor for _, anchor in linked] == [name.replace(" ", "-") for name in headings]
    assert {"dflop plan", "dflop store ingest"} <= set(headings)
    assert "docs.site" not in text


@pytest.mark.lane("browser")
@pytest.mark.skipif(browser_path() is None, reason="no Chromium is installed (apt-get install chromium)")
def test_search_works_in_pages_on_disk_and_loads_nothing(tmp_path: Path) -> None:
    html = tmp_path / "html"
    (html / "assets/javascripts/workers").mkdir(parents=True)
    (html / "assets/javascripts/workers/search.1.min.js").write_text("onmessage = (e) => postMessage(`${e.data}: 33`)")
    (html / "index.html").write_text(PAGE)
    search_from_disk(html)
    browser = Browser(tmp_path / "browser")
    try:
        with opened(browser, html / "index.html") as page:
            assert page.eval("window.found") == "gradient: 33"
            assert page.said() == []
            assert {url.partition(":")[0] for url in page.requests()} == {"file", "blob"}
    finally:
        browser.close()
