"""Stages of models whose items only their processors can make, held against transformers; in a process of its own."""

from types import SimpleNamespace

import pytest
import transformers

from dflop.models.generic.media_processor import MediaProcessor
from dflop.models.generic.processed_items import small_processor
from dflop.models.generic.stage_rules import adds_rows

MADE = [
    ("minicpmv4_6", "image"), ("minicpmv4_6", "video"), ("molmo2", "image"), ("muse_glimmer", "image"),
    ("unlimited_ocr", "image"), ("deepseek_ocr2", "image"), ("smolvlm", "video"),
    ("gemma4_unified", "video"), ("gemma4_unified", "audio"),
]  # fmt: skip
"""Patches in one row, pooled by indices, two deep, pictures of two towers, clips that a class takes as
pictures, and raw patches and samples of a sound; these are no image, whose tokens see each other."""


@pytest.mark.parametrize(("kind", "medium"), MADE)
def test_items_that_processors_make_train_as_transformers_does(kind, medium, ask_media):
    said = ask_media({"exact": kind, "medium": medium})
    assert (said["problem"], said["is_exact"]) == ("", True)


def test_a_medium_whose_rows_no_function_returns_is_named(ask_media):
    """Mllama's decoder attends to pictures; its class has no function for their rows."""
    said = ask_media({"exact": "mllama", "medium": "image"})
    assert said["problem"] == "MllamaForConditionalGeneration has no `get_image_features` to compare rows of"


def test_rows_that_replace_embeddings_where_a_class_adds_them_are_found(ask_media):
    broken = "dflop.models.generic.llm_stage.adds_rows"
    said = ask_media({"exact": "molmo2", "medium": "image", "broken": broken})
    assert not said["is_exact"]
    assert said["error"] > 0.01


def test_only_molmo_adds_rows_to_embeddings():
    kinds = transformers.Molmo2Model, transformers.LlavaModel, transformers.Qwen3VLModel
    assert [adds_rows(cls.__new__(cls)) for cls in kinds] == [True, False, False]


def test_sizes_of_a_processor_shrink_as_those_of_its_model():
    """A length of another tower stays, and so does what is no multiple of a side, but for that of tiles."""

    def config(side, fine):
        return transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(image_size=side),
            text_config=transformers.LlamaConfig(num_hidden_layers=1), high_res=transformers.CLIPVisionConfig(
                image_size=fine
            ),
        )  # fmt: skip

    sizes = {"size": {"height": 336, "width": 672}, "pad_size": 1024, "patch_size": 14, "min_pixels": 336}
    pictures = SimpleNamespace(**sizes, image_grid_pinpoints=[[336, 1008]], crop_size=500, tile_size=640)
    processor = SimpleNamespace(image_processor=pictures)
    small = small_processor(MediaProcessor(processor), config(336, 1024), config(56, 64)).processor.image_processor
    assert small.size == {"height": 56, "width": 112}
    assert (small.pad_size, small.patch_size, small.min_pixels, small.crop_size) == (64, 14, 336, 500)
    assert small.tile_size == 64
    assert small.image_grid_pinpoints == [[56, 168]]
    assert pictures.pad_size == 1024
