"""Data-aware multimodal-LLM training on HPC clusters. See ARCHITECTURE.md for the house and its loop.

`dflop.api` has what notebooks want: plan, compare, estimate and profile as functions that return values.
"""

__version__ = "0.1.0"
