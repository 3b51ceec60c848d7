"""Planners to compare with, each re-expressed on our cost tables and our memory model. None of them runs by itself."""
