"""A scheduler that cannot live."""

raise SystemExit(3)
