"""Every family's cut modules compute what its Hugging Face model does, and give the rows its media rules promise."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dflop.errors import ConfigError
from dflop.models.build import cut_stage
from dflop.models.generic.llm_stage import MediaPosition
from dflop.records import LLM
from tests.models.tiny_families import CASES, Case, Sample

each_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def encoder_of(case: Case):
    (module,) = case.family.towers
    (spec, _) = case.family.specs()
    return cut_stage(case.build(), case.family, module, (0, spec.num_layers))


def llm_of(case: Case, bounds=((0, 2), (2, 4))):
    return [cut_stage(case.build(), case.family, LLM, layers) for layers in bounds]


def encode(case: Case, stage, items, arrays):
    sizes = torch.tensor([case.family.item_size(item) for item in items])
    return stage(torch.cat(arrays, dim=stage.tower.data_axis), sizes)


def packed_loss(case: Case, samples: list[Sample], encoder, llm) -> torch.Tensor:
    """Summed loss of all samples, run as one microbatch of encoder and LLM stages."""
    items, arrays = [i for s in samples for i in s.items], [a for s in samples for a in s.arrays]
    lengths = [len(s.input_ids) for s in samples]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    where = torch.cat([start + p for start, s in zip(starts, samples, strict=False) for p in s.item_positions])
    rows = encode(case, encoder, items, arrays)
    assert rows.shape == (sum(i.num_rows for i in items), llm[0].row_width)
    media = [[MediaPosition.of(i) for i in s.items] for s in samples]
    position_ids = torch.cat([llm[-1].positions(s.input_ids, m) for s, m in zip(samples, media, strict=True)], dim=1)
    hidden = llm[0].embed(torch.cat([s.input_ids for s in samples]), [rows], [where])
    for stage in llm:
        hidden = stage(hidden, position_ids, starts.int())
    targets = torch.cat([torch.cat([s.labels[1:], torch.tensor([-100])]) for s in samples])
    (supervised,) = torch.nonzero(targets != -100, as_tuple=True)
    return llm[-1].loss(hidden, supervised, targets[supervised])


@each_family
def test_a_packed_microbatch_has_the_loss_and_gradients_of_single_samples_in_hugging_face(case):
    samples = [case.sample(n) for n in range(len(case.samples))]
    plain, encoder, llm = case.plain(), encoder_of(case), llm_of(case)
    expected = torch.tensor(0.0)
    for sample in samples:
        logits = plain(**case.hf_inputs(sample), use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], sample.labels[1:], ignore_index=-100, reduction="sum")
        loss.backward()
        expected += loss.detach()
    loss = packed_loss(case, samples, encoder, llm)
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
    loss.backward()
    found: Counter[str] = Counter()
    gradients: dict[str, torch.Tensor] = {}
    for stage in (encoder, *llm):
        for name, p in stage.names.items():
            found[name] += 1
            gradients[name] = gradients.get(name, 0) + (torch.zeros_like(p) if p.grad is None else p.grad)
    assert set(found) == {name for name, _ in plain.named_parameters()}
    assert {name for name, count in found.items() if count > 1} == ({llm[0].tied} - {""})
    num_used = 0
    for name, p in plain.named_parameters():
        reference = torch.zeros_like(p) if p.grad is None else p.grad
        num_used += bool(reference.any())
        error = (gradients[name] - reference).abs().max()
        # Without rope, attention does not depend on a key's bias: all of its gradient is rounding.
        least = 1e-7 if name.endswith("k_proj.bias") else 0.0
        assert error <= max(1e-4 * float(reference.abs().max()), least), (name, float(error))
    assert num_used > 0.6 * len(found), "of some towers the projector takes what the first layers make"


def drawn_media(kind: str, rng: np.random.Generator):
    width, height = (int(x) for x in rng.integers(1, (60, 400)[int(rng.integers(2))], 2))
    if kind == "audio":
        return kind, 0, 0, 0, float(rng.uniform(0.05, 1.4))
    num_frames = int(rng.integers(2, 12)) if kind == "video" else 1
    return kind, width, height, num_frames, num_frames / 3 if kind == "video" else 0.0


@each_family
def test_an_encoder_gives_the_rows_that_the_media_rules_promise(case):
    rng, stage, family = np.random.default_rng(1), encoder_of(case), case.family
    items = []
    while len(items) < 40:
        media = drawn_media(str(rng.choice(list(family.media_tokens))), rng)
        level, num_images = int(rng.integers(family.max_level + 1)), int(rng.integers(1, 3))
        try:
            items.append(case.item(media, num_images=num_images, level=level)[0])
        except ValueError:
            continue  # a size the family's processor refuses, too
    arrays = [case.array(item, [7, n]) for n, item in enumerate(items)]
    with torch.no_grad():
        alone = [encode(case, stage, [item], [array]) for item, array in zip(items, arrays, strict=True)]
        packed = encode(case, stage, items, arrays)
    assert [len(rows) for rows in alone] == [item.num_rows for item in items]
    assert len({item.num_rows for item in items}) >= (2 if case.name == "internvl" else 5)
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_a_limit_on_tiles_is_the_list_of_resolutions_without_the_larger_ones():
    case = CASES["LLaVA-OneVision"]
    few = [p for p in case.hf_config["image_grid_pinpoints"] if p[0] * p[1] <= 2 * 42**2]
    plain = Case(case.name, {**case.hf_config, "image_grid_pinpoints": few}, case.media, [])
    limited = Case(case.name, case.hf_config, {**case.media, "max_tiles": 2}, [])
    for size in ((200, 90), (90, 200), (300, 300), (9, 70)):
        item, _ = limited.item(("image", *size, 1, 0.0))
        array = case.array(item, 3)
        with torch.no_grad():
            rows = encode(limited, encoder_of(limited), [item], [array])
            expected = plain.plain().get_image_features(array[None], torch.tensor([size[::-1]])).pooler_output
        torch.testing.assert_close(rows, torch.cat(list(expected)), atol=1e-5, rtol=1e-5)


def test_deep_features_need_their_layers_on_the_first_stage():
    case = CASES["Qwen3-VL"]
    with pytest.raises(ConfigError, match="after the first 2 decoder layers, the first stage has 1"):
        llm_of(case, ((0, 1),))
    whole, cut = (
        packed_loss(case, [case.sample(0)], encoder_of(case), llm_of(case, bounds))
        for bounds in (((0, 4),), ((0, 3), (3, 4)))
    )
    torch.testing.assert_close(whole, cut, rtol=1e-6, atol=0)
