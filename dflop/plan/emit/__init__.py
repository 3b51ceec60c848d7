"""Plans as files that other programs read."""
