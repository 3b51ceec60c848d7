"""How well a profile predicts what it did not see."""

from tests.bench.profile.cases import VOCAB_SIZE, make_shapes, tiny_llava, tiny_omni

__all__ = ["VOCAB_SIZE", "make_shapes", "tiny_llava", "tiny_omni"]
