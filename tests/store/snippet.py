"""Runs the Python code in its first argument, for tests that kill it: a module, so that it can be forked."""

from __future__ import annotations

import sys

exec(sys.argv.pop(1), {"__name__": "__main__"})
