import numpy as np
import pytest
import torch

from dflop.models.generic.arrays import array_of, array_shape, form_of, grid_of
from dflop.models.generic.items import parts_of

RNG = np.random.default_rng(0)


def pixels(*shape):
    return RNG.standard_normal(shape, dtype=np.float32)


MADE = {
    "grid": ("image", {"pixel_values": pixels(12, 30), "image_grid_thw": np.array([[1, 4, 3]])}, (1, 4, 3)),
    "grid of a clip": (
        "video", {"pixel_values_videos": pixels(24, 30), "video_grid_thw": np.array([[2, 4, 3]])}, (2, 4, 3),
    ),
    "sized": ("image", {"pixel_values": pixels(1, 3, 8, 12), "image_sizes": np.array([[8, 10]])}, (1, 8, 10)),
    "tiles": ("image", {"pixel_values": pixels(5, 3, 8, 8)}, (5, 8, 8)),
    "listed tiles": (
        "image", {"pixel_values": pixels(1, 5, 3, 8, 8), "pixel_attention_mask": np.ones((1, 5, 8, 8))}, (5, 8, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_an_array_has_the_shape_that_follows_from_its_grid(name):
    kind, made, grid = MADE[name]
    form = form_of(kind, made)
    assert form == name.removesuffix(" of a clip")
    assert grid_of(form, kind, made) == grid
    assert array_of(form, kind, made).shape == array_shape(form, (30,), grid)


def test_a_sized_picture_is_flat_and_without_padding():
    _, made, _ = MADE["sized"]
    np.testing.assert_array_equal(
        array_of("sized", "image", made).reshape(3, 8, 10), made["pixel_values"][0, :, :, :10]
    )


def test_padding_is_refused():
    padded = MADE["listed tiles"][1] | {"pixel_attention_mask": np.zeros((1, 5, 8, 8))}
    with pytest.raises(ValueError, match="a part of its pixels is padding"):
        array_of("listed tiles", "image", padded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_other_item_travels_with_all_that_its_processor_makes(dtype):
    """Whole numbers exactly, in types of 16 bits, too."""
    made = {
        "input_ids": np.arange(9), "input_features": pixels(1, 5, 4), "places": np.array([[70_001, -1, 300]]),
        "input_features_mask": np.array([[True, True, False, True]]), "tiles": [[2, 70_000]],
        "words": ["a"], "uneven": [[1], [2, 3]],
    }  # fmt: skip
    form = form_of("audio", made)
    grid = grid_of(form, "audio", made)
    assert (form, grid[:2]) == ("parts", (1, 3))
    array = array_of(form, "audio", made)
    assert array.shape == array_shape(form, (), grid)
    kind, found = parts_of(torch.from_numpy(array).to(dtype))
    assert kind == "audio"
    assert set(found) == {"input_features", "places", "input_features_mask", "tiles"}
    assert found["tiles"] == made["tiles"]
    assert found["places"].tolist() == made["places"].tolist()
    assert found["input_features_mask"].tolist() == made["input_features_mask"].tolist()
    torch.testing.assert_close(found["input_features"], torch.from_numpy(made["input_features"]).to(dtype))
