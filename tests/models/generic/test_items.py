"""Items of several kinds in one group get the rows that their class gives each of them alone."""

import pytest
import torch

from dflop.models.generic import exact, items
from dflop.models.generic.structure import read_structure
from tests.bench.model_configs import config_of

SIZES = torch.tensor([(1, 4, 6), (2, 4, 4), (1, 4, 4), (4, 4, 6)])


@pytest.mark.parametrize(("kind", "num_calls"), [("qwen2_vl", 1), ("glm46v", 2), ("ernie4_5_vl_moe", 2)])
def test_clips_among_pictures_have_the_rows_of_their_own_function(kind, num_calls, monkeypatch):
    model, _ = exact.small_model(config := config_of(kind), read_structure(config))
    shell, vision = model.model, config.vision_config
    volume = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
    data = torch.randn(int(SIZES.prod(1).sum()), volume, generator=torch.Generator().manual_seed(0))
    want = [
        items._of_kind(shell, "video" if size[0] > 1 else "image", patches, size[None])
        for patches, size in zip(data.split(SIZES.prod(1).tolist()), SIZES, strict=True)
    ]
    calls, real = [], items._of_kind
    monkeypatch.setattr(items, "_of_kind", lambda *args: calls.append(args[1]) or real(*args))
    torch.testing.assert_close(items.features(shell, data, SIZES), torch.cat(want), rtol=1e-4, atol=1e-5)
    assert calls == ["image", "video"][:num_calls]
