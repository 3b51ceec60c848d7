"""Documents say what the results say."""

import pytest

from tests.bench.figures import RESULTS, ROOT
from tests.bench.pages import SHOWN, documents, filled, generated


@pytest.mark.parametrize("path", documents(ROOT), ids=lambda p: str(p.relative_to(ROOT)))
def test_documents_say_what_was_measured(path):
    text = path.read_text()
    assert filled(text, generated(SHOWN, RESULTS), path) == text, "run python -m tests.bench.pages"
