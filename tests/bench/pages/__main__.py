"""Puts what was measured into the documents: `python -m tests.bench.pages [--check]`.

A document has `<!-- table NAME -->` and, some lines below, `<!-- end -->`; what is between them is made from the newest
result of the machine that `shown.py` names, with a line that says which. With --check nothing is written, and it ends
with 1 where a document says something else.
"""

from __future__ import annotations

import argparse
import sys

from tests.bench.campaign import RESULTS
from tests.bench.figures import ROOT
from tests.bench.pages.fill import documents, filled, generated
from tests.bench.pages.results import PagesError
from tests.bench.pages.shown import SHOWN


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.bench.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, say which documents differ")
    args = parser.parse_args()
    differing = []
    try:
        blocks = generated(SHOWN, RESULTS)
        for path in documents(ROOT):
            text = path.read_text(encoding="utf-8")
            new = filled(text, blocks, path)
            if new != text:
                differing.append(str(path.relative_to(ROOT)))
                if not args.check:
                    path.write_text(new, encoding="utf-8")
    except PagesError as error:
        sys.exit(str(error))
    if differing and args.check:
        sys.exit(f"{', '.join(differing)}: not what was measured; run python -m tests.bench.pages")
    print(f"written: {', '.join(differing)}" if differing else "all documents say what was measured", file=sys.stderr)


if __name__ == "__main__":
    main()
