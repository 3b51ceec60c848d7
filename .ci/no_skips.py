"""Fails when a test that must run was skipped.

Allowed reasons: no GPU here, no folder with outside data, a control that only shows on one version of duckdb (which
`make test-duckdb2` runs).
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

ALLOWED = ("no CUDA device", "shared data", "shows a fault of duckdb 2.0.0")

skipped = [
    (f"{case.get('classname')}::{case.get('name')}", str(skip.get("message")))
    for report in sys.argv[1:]
    for case in ET.parse(report).iter("testcase")
    for skip in case.findall("skipped")
]
wrong = [(name, why) for name, why in skipped if not any(a in why for a in ALLOWED)]
for name, why in wrong:
    print(f"skipped, but must run here: {name}: {why}", file=sys.stderr)
print(f"{len(skipped)} tests skipped, {len(wrong)} of them wrongly")
sys.exit(bool(wrong))
