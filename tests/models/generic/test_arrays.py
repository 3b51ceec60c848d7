import numpy as np
import pytest

from dflop.errors import ConfigError
from dflop.models.generic.arrays import array_of, array_shape, form_of, grid_of

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
    assert grid_of(kind, made) == grid
    assert array_of(kind, made).shape == array_shape(form, 30, grid)


def test_a_sized_picture_is_flat_and_without_padding():
    _, made, _ = MADE["sized"]
    np.testing.assert_array_equal(array_of("image", made).reshape(3, 8, 10), made["pixel_values"][0, :, :, :10])


def test_padding_and_unknown_forms_are_refused():
    padded = MADE["listed tiles"][1] | {"pixel_attention_mask": np.zeros((1, 5, 8, 8))}
    with pytest.raises(ValueError, match="a part of its pixels is padding"):
        array_of("image", padded)
    with pytest.raises(ConfigError, match=r"items of kind audio come in a form that is not known: x \(3,\)"):
        form_of("audio", {"x": np.zeros(3)})
