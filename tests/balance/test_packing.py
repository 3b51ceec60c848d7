"""Packed samples of models with rope positions of images, windows and states: one row is its samples one at a time."""

import pytest
import torch

from dflop.balance.packing import IGNORED, SAMPLES, Packing, PackingCollator, num_predicted
from dflop.errors import ConfigError
from tests.balance.ranks import gradients
from tests.balance.tiny import make_model, sample

MEDIA = [([3, 1], []), ([], []), ([], [2]), ([2], [1, 3])]


def collate(samples):
    """As a processor's collator makes a batch of one, padded to a multiple of 8."""
    (found,) = samples
    missing = -found["input_ids"].shape[1] % 8
    tokens = {"input_ids": 0, "labels": IGNORED, "mm_token_type_ids": 0}
    padded = {
        name: torch.nn.functional.pad(value, (0, missing), value=tokens[name]) if name in tokens else value
        for name, value in found.items()
    }
    mask = (torch.arange(padded["input_ids"].shape[1]) < found["input_ids"].shape[1]).long()
    return {**padded, "attention_mask": mask[None]}


def of_one_at_a_time(kind, samples):
    model = make_model(kind)
    total = sum(int(num_predicted(s)) for s in samples)
    for s in samples:
        given = {**s, "attention_mask": torch.ones_like(s["input_ids"])}
        (model(**given, use_cache=False).loss * int(num_predicted(s)) / total).backward()
    return gradients(model)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "windows"])
def test_a_packed_row_has_the_gradients_of_its_samples_one_at_a_time(kind):
    model = make_model(kind)
    has_videos = kind not in ("llava", "windows")
    media = MEDIA if kind != "windows" else [([], [])] * 4
    samples = [
        sample(kind, model, n, images, videos if has_videos else [], num_text=8 + 7 * n)
        for n, (images, videos) in enumerate(media)
    ]
    packing, batch = Packing(model), PackingCollator(collate)(samples)
    assert (
        sum(batch[SAMPLES]["lengths"]) == batch["input_ids"].shape[1] == sum(s["input_ids"].shape[1] for s in samples)
    )
    with packing.of(batch):
        model(**batch).loss.backward()
    expected, found = of_one_at_a_time(kind, samples), gradients(model)
    largest = max(float(g.norm()) for g in expected.values())
    for name, exact in expected.items():
        assert float((found[name] - exact).norm()) <= 1e-5 * float(exact.norm()) + 1e-9 * largest, name


def test_outside_of_it_the_model_is_as_it_was():
    model, plain = make_model("qwen3_5"), make_model("qwen3_5")
    packing, one = Packing(model), sample("qwen3_5", model, 0, [1], [])
    with packing.of(PackingCollator(collate)([one, one])):
        pass
    with torch.no_grad():
        assert torch.equal(model(**one).logits, plain(**one).logits)


def test_what_cannot_be_packed_is_refused():
    one = sample("qwen3_vl", make_model("qwen3_vl"), 0, [1], [])
    with pytest.raises(ConfigError, match="the collator makes `names`, a list"):
        PackingCollator(lambda samples: {**samples[0], "names": ["a"]})([one])
    without = {name: value for name, value in one.items() if name != "labels"}
    with pytest.raises(ConfigError, match="some samples have `labels` and some have not"):
        PackingCollator(lambda samples: samples[0])([one, without])
