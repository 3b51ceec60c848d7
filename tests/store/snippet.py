"""Runs the Python code in its first argument, for tests that kill it: a module, so that it can be forked."""

import sys

exec(sys.argv.pop(1), {"__name__": "__main__"})
