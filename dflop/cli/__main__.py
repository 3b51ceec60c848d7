"""`python -m dflop.cli`."""

from __future__ import annotations

from dflop.cli import main

if __name__ == "__main__":
    main()
