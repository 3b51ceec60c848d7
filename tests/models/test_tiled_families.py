"""What families that cut images into tiles refuse alike; what they accept is in the tests of each."""

from __future__ import annotations

import pytest

from dflop.models import load_rules
from tests.models.placing import place_frames, place_image


@pytest.mark.parametrize("name", ["internvl", "llava_onevision"])
def test_what_cannot_be_placed_is_refused(name):
    rules = load_rules(name, {}, {})
    for width, height in [(0, 10), (10, 0), (-1, 5)]:
        with pytest.raises(ValueError, match=f"size {width}x{height} is empty"):
            place_image(rules, width, height)
    with pytest.raises(ValueError, match="no frames"):
        place_frames(rules, 0)
    with pytest.raises(ValueError, match="takes no audio"):
        rules.place("audio", width_px=0, height_px=0, num_frames=0, duration_s=1.0)
