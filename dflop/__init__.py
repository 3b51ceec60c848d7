"""Data-aware multimodal-LLM training on HPC clusters. See ARCHITECTURE.md for the house and its loop."""

__version__ = "0.1.0"
