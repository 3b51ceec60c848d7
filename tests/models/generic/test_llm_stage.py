from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models import loss_size
from dflop.models.build import cut_stage
from dflop.models.generic import stage_rules
from dflop.models.generic.arrays import PARTS
from dflop.models.generic.exact import small_model
from dflop.models.generic.items import form_of_item
from dflop.models.generic.llm_stage import LlmStage, MediaPosition
from dflop.models.generic.reach import Reach, read_reaches
from dflop.models.generic.specs import places_of
from dflop.models.generic.structure import read_structure
from dflop.models.hf_inputs import hf_inputs
from dflop.records import LLM
from tests.bench.model_configs import config_of as default_config
from tests.models.generic.configs import config_of
from tests.models.generic.small import Small


class Inner(nn.Module):
    def forward(self, **_):
        raise AssertionError("it stands aside")


class Headed(nn.Module):
    """A model with a head, and what a class may do behind it."""

    base_model_prefix = "model"

    def __init__(self, behind):
        super().__init__()
        self.model, self.lm_head, self.behind = Inner(), nn.Linear(4, 9), behind

    def forward(self, **given):
        return SimpleNamespace(logits=self.behind(self.lm_head(self.model(**given).last_hidden_state)))


def cap(logits):
    return torch.tanh(logits / 2) * 2


def test_what_a_class_does_behind_its_head_is_read_from_its_forward():
    plain, scaled, capped = (
        stage_rules.final_of(Headed(behind), "lm_head") for behind in (lambda x: x, lambda x: x / 8, cap)
    )
    assert (plain.scale, plain.capped) == (1.0, None)
    assert scaled.scale == pytest.approx(1 / 8)
    assert scaled.capped is None
    logits = torch.randn(3, 9)
    torch.testing.assert_close(capped.capped(logits), cap(logits))


def test_capped_logits_have_the_loss_and_gradients_of_all_tokens_at_once(monkeypatch):
    monkeypatch.setattr(loss_size, "CHUNK_TOKENS", 3)
    subject = Small("smolvlm")
    stage = cut_stage(subject.build(), subject.family, LLM, (2, 4))
    stage._final = stage_rules.Final(1.0, cap)
    hidden, where = torch.randn(9, 64, requires_grad=True), torch.tensor([0, 1, 2, 4, 5, 7, 8])
    targets = torch.arange(20, 27)
    loss = stage.loss(hidden, where, targets, 5)
    want = nn.functional.cross_entropy(cap(stage.head(hidden[where])), targets, reduction="sum") / 5
    torch.testing.assert_close(loss, want)
    for got, expected in zip(*(torch.autograd.grad(x, [hidden, stage.head.weight]) for x in (loss, want)), strict=True):
        torch.testing.assert_close(got, expected)
    assert stage.loss(hidden, where[:0], targets[:0], 5).item() == 0.0
    stage.head_loss = None  # as tensor parallelism replaces it
    with pytest.raises(ConfigError, match="all of the vocabulary"):
        stage.loss(hidden, where, targets, 5)


def test_windows_reach_over_images_as_the_class_has_it():
    """Gemma 3's windows end inside a large image, to its front."""
    from dflop.models.generic import classes

    model = classes.build(config_of("gemma3"), device="cpu", attention="eager")
    found = read_reaches(model.model, "language_model", "token_type_ids")
    assert found == (*[Reach(window=8, images="near")] * 3, Reach(images="near"))
    tokens = torch.arange(6)
    block = torch.zeros(6, 6, dtype=torch.bool)
    block[1:, 1:] = True
    near, everywhere = (Reach(window=2, images=how).sees(tokens, tokens, block) for how in ("near", "all"))
    assert near[3].tolist() == [False, False, True, True, True, True]
    assert everywhere[3].tolist() == [False, True, True, True, True, True]
    assert Reach(chunk=2).sees(tokens, tokens)[3].tolist() == [False, False, True, True, False, False]


def test_pictures_that_are_as_one_to_a_class_are_one_block():
    """Those of Molmo 2 see each other; Gemma 3's do not, as the test above has it."""
    config = default_config("molmo2")
    model, _ = small_model(config, structure := read_structure(config))
    assert set(read_reaches(model.model, "language_model", "mm_token_type_ids")) == {
        Reach(images="near", is_joined=True)
    }
    stage, pad = LlmStage(model, places_of(structure), (0, 1)), model.config.image_token_id
    pictures = [MediaPosition("image", (1, 1, 2), 0.0, 2)] * 2
    positions = stage.positions(torch.tensor([9, pad, pad, 9, pad, pad, 9]), pictures)
    assert positions[-1].tolist() == [0, 1, 1, 0, 1, 1, 0]


def test_items_whose_companions_do_not_follow_from_sizes_travel_with_them():
    class Model:
        def get_image_features(self, pixel_values, image_sizes, aspect_ratios):
            raise NotImplementedError

    made = dict.fromkeys(("pixel_values", "image_sizes", "aspect_ratios"), torch.zeros(1, 3, 4, 4))
    assert form_of_item(Model(), "image", made) == PARTS
    with pytest.raises(ConfigError, match="takes aspect_ratios, which the processor does not make"):
        form_of_item(Model(), "image", {"pixel_values": made["pixel_values"], "image_sizes": torch.ones(1, 2)})
    with pytest.raises(ConfigError, match="Model has no `get_audio_features`"):
        form_of_item(Model(), "audio", {})
    Model.get_rope_index = None
    with pytest.raises(ConfigError, match="rope positions of Model need grids of patches"):
        form_of_item(Model(), "image", made)


def test_a_part_of_no_module_is_refused():
    subject = Small("smolvlm")
    model = subject.build()
    of = subject.family.decoder, subject.family.towers.values()
    assert not stage_rules.untrained(model, *of)
    model.model.extra = nn.Linear(2, 2)
    assert stage_rules.untrained(model, *of) == "`model.extra.weight` is part of no module"
    with pytest.raises(ConfigError, match=r"`model\.extra\.weight` is part of no module"):
        cut_stage(model, subject.family, LLM, (0, 4))


def test_a_loss_of_routers_that_cannot_be_read_is_refused_where_the_config_asks_for_it(monkeypatch):
    subject = Small("qwen3_vl_moe")
    model = subject.build()
    of = subject.family.decoder, subject.family.towers.values()
    model.config.text_config.output_router_logits = True
    assert not stage_rules.untrained(model, *of)
    monkeypatch.setattr(type(model.model.language_model.layers[0].mlp.gate), "forward", lambda self, hidden: hidden)
    assert "probabilities of Qwen3VLMoeTextTopKRouter cannot be read" in stage_rules.untrained(model, *of)
    model.config.text_config.router_aux_loss_coef = 0.0
    assert not stage_rules.untrained(model, *of)


def test_media_in_a_question_to_a_model_without_a_family_are_refused():
    family, item = Small("smolvlm").family, SimpleNamespace(module="vision", kind="image")
    family.name = "smolvlm"
    with pytest.raises(ConfigError, match="a `smolvlm` answers to text alone here"):
        hf_inputs(family, torch.arange(4), [item], [torch.zeros(1)], [torch.arange(1)])
