"""Building and cutting: nothing is lost, nothing is held twice. What pieces compute is in `test_modules.py`."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflop.errors import ConfigError
from dflop.models import attention
from dflop.models.build import cut_stage, cut_stages
from dflop.models.ways import Way, apply_way
from dflop.records import LLM
from tests.models.tiny_families import CASES
from tests.train.synthetic import family, tiny_model

EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.mark.parametrize(("split", "tied"), [([4], True), ([1, 3], False), ([1, 2, 1], True)], ids=str)
def test_every_parameter_is_in_one_stage_under_its_global_name(split, tied):
    """But for a tied embedding, which both ends of the pipeline have."""
    model = tiny_model(tied=tied)
    bounds = [(sum(split[:i]), sum(split[: i + 1])) for i in range(len(split))]
    # Every stage is cut from its own copy of the model, as ranks do.
    encoders = [cut_stage(copy.deepcopy(model), family(), module, (0, 2)) for module in ("vision", "audio")]
    llm = [cut_stage(copy.deepcopy(model), family(), LLM, layers) for layers in bounds]
    holders = Counter(name for stage in (*encoders, *llm) for name in stage.names)
    assert set(holders) == {name for name, _ in model.named_parameters()}
    is_shared = tied and len(split) > 1
    assert {name for name, count in holders.items() if count > 1} == ({EMBEDDING} if is_shared else set())
    assert llm[0].tied == llm[-1].tied == (EMBEDDING if tied else "")
    assert not is_shared or [EMBEDDING in stage.names for stage in llm] == [True, False, True]
    for stage in (*encoders, *llm):
        for name, p in stage.names.items():
            assert torch.equal(p, model.get_parameter(name)), name
        assert {id(p) for p in stage.parameters()} == {id(p) for p in stage.names.values()}
        assert stage.param_bytes == sum(p.numel() * 4 for p in stage.parameters())


@pytest.mark.parametrize(("module", "layers"), [("vision", (0, 3)), ("audio", (1, 1)), (LLM, (-1, 2)), (LLM, (3, 5))])
def test_layers_that_a_module_does_not_have_are_refused(module, layers):
    with pytest.raises(ConfigError, match=rf"layers \[{layers[0]}, {layers[1]}\) of `{module}`, which has"):
        cut_stage(tiny_model(), family(), module, layers)


def test_an_encoder_is_not_cut():
    with pytest.raises(ConfigError, match=r"layers \[1, 2\) of `vision`: an encoder's 2 stay on one stage"):
        cut_stage(tiny_model(), family(), "vision", (1, 2))


def attentions(stages):
    """Names under which transformers looks up the attention of each stage's modules."""
    configs = [[getattr(m, "config", None) for m in stage.modules()] for stage in stages]
    return [{c._attn_implementation for c in found if hasattr(c, "_attn_implementation")} for found in configs]


@pytest.mark.parametrize("name", ["Omni", *CASES])
def test_a_stage_has_the_same_attention_alone_and_next_to_others(name):
    """A job holds several modules on a rank, a probe measures one: both must run the same program."""
    build, of = (tiny_model, family()) if name == "Omni" else (CASES[name].build, CASES[name].family)
    parts = [(spec.module, (0, spec.num_layers)) for spec in of.specs()]
    model = build()
    alone = [cut_stage(copy.deepcopy(model), of, *part) for part in parts]
    for order in (parts, parts[::-1]):
        together = cut_stages(copy.deepcopy(model), of, order)
        for stage in (*alone, *together):
            attention.use(stage, attention.SDPA)
        assert attentions(together) == attentions(alone if order is parts else alone[::-1])


@pytest.mark.parametrize(("module", "layers"), [("vision", (0, 2)), (LLM, (1, 3))])
def test_cutting_frees_the_rest_of_the_model(module, layers):
    model = tiny_model()
    other = "model.audio_tower" if module == LLM else "model.language_model"
    rest = [weakref.ref(model.get_submodule(other))]
    if layers == (1, 3):
        rest += [weakref.ref(model.lm_head), weakref.ref(model.model.language_model.embed_tokens)]
        rest += [weakref.ref(model.model.language_model.layers[i]) for i in (0, 3)]
    stage = cut_stage(model, family(), module, layers)
    del model
    gc.collect()
    assert [r() for r in rest] == [None] * len(rest)
    assert stage.names


class ByMask(TorchDispatchMode):
    """Counts operations whose result has a size that only the device knows: on a GPU the host waits for each."""

    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        indices = args[1] if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_) else ()
        masks = [index for index in indices if index is not None and index.dtype == torch.bool]
        self.num_calls += bool(masks) or func.overloadpacket == torch.ops.aten.nonzero
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", [False, True])
def test_deep_features_are_added_without_an_index_by_mask_and_as_hugging_face_does(recompute):
    case = CASES["Qwen3-VL"]
    tokens, rows, num_calls, results = torch.arange(12), torch.tensor([2, 3, 4, 7]), [], []
    everywhere = torch.ones(1, len(tokens), dtype=torch.bool)
    for by_mask in (False, True):
        stage = cut_stage(case.build(), case.family, LLM, (0, 3))
        apply_way(stage, Way(recompute=recompute))
        features = torch.randn(len(rows), stage.row_width, generator=torch.Generator().manual_seed(1))
        features.requires_grad_()
        if by_mask:
            add = partial(type(stage.decoder)._deepstack_process, stage.decoder)
            stage.decoder._deepstack_process = lambda hidden, _, deep, add=add: add(hidden, everywhere, deep)
        with ByMask() as mode:
            hidden = stage.embed(tokens, [features], [rows])
            boundaries = torch.tensor([0, 12], dtype=torch.int32)
            loss = stage(hidden, stage.positions(tokens, []), boundaries).square().sum()
            loss.backward()
        num_calls.append(mode.num_calls)
        results.append([loss, features.grad, *(p.grad for p in stage.parameters())])
    assert num_calls[0] == 0 < num_calls[1]
    assert len(results[0]) > 20
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
