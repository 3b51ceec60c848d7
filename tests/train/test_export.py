"""Out and in again: a model trained by several processes is Hugging Face's own model afterwards, weights and loss."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dflop.errors import ConfigError
from dflop.models.weights import WeightFolder, build_empty, hf_types, write_folder
from dflop.parallel.part import even_part
from dflop.records import LLM
from dflop.train.checkpoint import Checkpointer
from dflop.train.checkpoint_state import read_model
from dflop.train.manifest import read_latest
from tests.models.tiny_families import CASES
from tests.train import synthetic
from tests.train.parity import Omni
from tests.train.rank import Rank
from tests.train.ranks import run_ranks
from tests.train.synthetic import make_inline_plan, make_plan, make_step_plan, sharing_optimizer

NUM_STEPS, TOLERANCE, SHARD_BYTES = 2, 1e-5, 60_000
PLAIN, TIED = (Omni(kv_heads=2, num_steps=1, batch_size=8, tied=tied) for tied in (False, True))
DP2_PP2 = make_plan({"vision": (1, 1), "audio": (1, 1), LLM: (2, 2)}, num_microbatches=2)
TP2_PP2 = make_inline_plan([{"vision": 2, "audio": 2, LLM: 1}, {LLM: 3}], dp=1, tp=2, num_microbatches=2)
ONE = make_inline_plan([{"vision": 2, "audio": 2, LLM: 4}], dp=1, num_microbatches=2)


def config_of(subject):
    return synthetic.hf_config(tied=subject.tied, kv_heads=subject.kv_heads)


def first_step(it, subject):
    """Loss of the first global batch; gradients are reduced."""
    batch = subject.batches[0]
    step_plan = make_step_plan(it.plan, batch, 0, text_only_slot=False)
    return it.reduce(it.step(subject.source(batch), batch, step_plan))[1]


def train_and_save(rank, folder):
    it = Rank(rank, sharing_optimizer(DP2_PP2, "vision", "audio", LLM), TIED.family, TIED.build(), weight_decay=0.1)
    for _ in range(NUM_STEPS):
        first_step(it, TIED)
        it.optimizer.step(0.01)
        it.reducer.zero()
    checkpointer = Checkpointer(folder / "checkpoints", it.stages, it.optimizer, it.groups, it.parts, keep=1)
    checkpointer.save(NUM_STEPS, {})
    checkpointer.wait()
    return first_step(it, TIED)


def start(rank, folder, subject, plan):
    """Loss of the first step by weights of a folder, what the rank holds, and gradients."""
    model = build_empty(subject.family, config_of(subject), torch.float32)
    weights = WeightFolder(folder / "out", model)
    assert all(p.is_meta for p in model.parameters())
    it = Rank(rank, plan, subject.family, model, weights=weights)
    for stage in it.stages:
        assert {id(p) for p in stage.parameters()} == {id(p) for p in stage.names.values()}
    held = {n: (it.parts.get(n), p.detach()) for n, p in it.names.items()}
    loss = first_step(it, subject)
    return loss, held, {n: p.grad.clone() for n, p in it.names.items() if p.grad is not None}


def plain_step(model, subject):
    """(loss, gradients) of the same batch by Hugging Face's own forward; what nothing depends on has no gradient."""
    batch, loss = subject.batches[0], 0.0
    tokens = sum(s.num_supervised_tokens for s in batch)
    for position in range(len(batch)):
        part = subject.loss_sum(model, batch, position) / tokens
        part.backward()
        loss += float(part.detach())
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def loaded(family, folder):
    """By `from_pretrained`, with nothing missing and nothing left over."""
    made, about = hf_types(family, family.hf_config)[1].from_pretrained(
        folder, dtype="auto", attn_implementation="sdpa", output_loading_info=True
    )
    assert {what: found for what, found in about.items() if found} == {}
    return made.train()


def test_a_trained_model_leaves_and_comes_back_as_it_was(tmp_path):
    losses = run_ranks(train_and_save, DP2_PP2.num_processes, tmp_path)
    weights = read_model(tmp_path / "checkpoints" / read_latest(tmp_path / "checkpoints")["name"])
    trained_away = dict(TIED.build().named_parameters())
    assert sum(not torch.equal(weights[n], p) for n, p in trained_away.items() if p.requires_grad) > 10
    write_folder(TIED.family, config_of(TIED), weights, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    model = loaded(TIED.family, tmp_path / "out")
    assert_same(model.named_parameters(), weights)
    assert losses[0] == pytest.approx(plain_step(model, TIED)[0], rel=TOLERANCE)
    ((loss, held, _),) = run_ranks(start, 1, tmp_path, TIED, ONE)
    assert loss == pytest.approx(losses[0], rel=TOLERANCE)
    assert_same(((name, value) for name, (_, value) in held.items()), weights)


def assert_same(found, weights):
    found = dict(found)
    assert set(found) == set(weights)
    for name, value in found.items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_family_leaves_under_the_names_of_hugging_face_and_is_read_again(case, tmp_path):
    weights = {n: p.detach() for n, p in case.build().named_parameters()}
    write_folder(case.family, case.full_config, weights, tmp_path, max_shard_bytes=SHARD_BYTES)
    assert_same(loaded(case.family, tmp_path).named_parameters(), weights)
    read = WeightFolder(tmp_path, build_empty(case.family, case.full_config, torch.float32)).read
    assert_same(((name, read(name)) for name in weights), weights)


@pytest.mark.parametrize(
    "subject", [PLAIN, pytest.param(TIED, marks=pytest.mark.lane("layouts"))], ids=["plain", "tied"]
)
def test_ranks_that_share_matrices_read_their_parts(subject, tmp_path):
    """Of the first step the loss and every gradient, so that what hooks on the parameters do is there, too."""
    weights = {n: p.detach() for n, p in subject.build().named_parameters()}
    write_folder(subject.family, config_of(subject), weights, tmp_path / "out", max_shard_bytes=SHARD_BYTES)
    ranks = run_ranks(start, TP2_PP2.num_processes, tmp_path, subject, TP2_PP2)
    expected, gradients = plain_step(loaded(subject.family, tmp_path / "out"), subject)
    for loss, held, found in ranks:
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        for name, (part, value) in held.items():
            assert torch.equal(value, part.of(weights[name]) if part else weights[name]), name
            if name in gradients:
                want = part.of(gradients[name]) if part else gradients[name]
                error = float((found[name] - want).abs().max())
                assert error <= TOLERANCE * max(float(want.abs().max()), 1e-2), name
    assert {name for _, held, _ in ranks for name in held} == set(weights)
    assert any(part for _, held, _ in ranks for part, _ in held.values())


def test_parts_of_fused_matrices_are_read_and_types_converted(tmp_path):
    case = CASES["Qwen2.5-VL"]
    weights = {n: p.detach() for n, p in case.build().named_parameters()}
    write_folder(case.family, case.full_config, weights, tmp_path, max_shard_bytes=10**9)
    model = build_empty(case.family, case.full_config, torch.bfloat16)
    folder = WeightFolder(tmp_path, model)
    fused = [name for name in weights if ".attn.qkv." in name]
    assert len(fused) == 3 * 2  # layers, weight and bias
    for name in fused:
        part = even_part(weights[name].shape, 0, 3, 1, 2)
        assert torch.equal(folder.read(name, part.axis, part.ranges), part.of(weights[name]))
    plan = make_inline_plan([{"vision": 3, LLM: 4}], dp=1, num_microbatches=1)
    it = Rank(0, plan, case.family, model, is_alone=True, weights=folder)
    assert_same(it.names, {name: whole.bfloat16() for name, whole in weights.items()})
    assert {p.dtype for p in it.names.values()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def small():
    """(family, configuration, weights) of a tiny tied model."""
    return TIED.family, config_of(TIED), {n: p.detach() for n, p in TIED.build().named_parameters()}


def test_types_are_kept_and_tied_weights_written_once(small, tmp_path):
    family, config, weights = small
    half = {n: w.bfloat16() for n, w in weights.items()}
    write_folder(family, config, half, tmp_path / "out", max_shard_bytes=10**9)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert len(list(file.keys())) == len(half)
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118, safetensors' file is no dict
    model = loaded(TIED.family, tmp_path / "out")
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.fixture
def folder(small, tmp_path):
    family, config, weights = small
    write_folder(family, config, weights, tmp_path / "out", max_shard_bytes=10**9)
    return tmp_path / "out"


def change(folder, edit):
    """Edit the tensors of a folder of one file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(small, folder):
    family, config, _ = small
    with pytest.raises(ConfigError) as caught:
        WeightFolder(folder, build_empty(family, config, torch.float32))
    return str(caught.value)


def test_weights_of_another_model_are_refused_by_name(small, folder, tmp_path):
    names = sorted(load_file(folder / "model.safetensors"))
    change(folder, lambda t: t.pop(names[0]))
    ours = next(name for name in small[2] if name.endswith(names[0]))
    assert f"1 missing from it, e.g. `{ours}`" in refusal(small, folder)
    change(folder, lambda t: t.update({names[0]: torch.zeros(3)}))
    assert f"1 of another shape, e.g. `{ours}`" in refusal(small, folder)
    change(folder, lambda t: t.update({"model.layers.7.mlp.up_proj.weight": torch.zeros(3)}))
    assert "1 unknown to the model, e.g. `model.layers.7.mlp.up_proj.weight`" in refusal(small, folder)
    shutil.rmtree(folder)
    assert "cannot read weights" in refusal(small, folder)


def test_other_names_of_a_tied_weight_and_parts_of_the_whole_that_are_not_ours_are_passed_over(small, folder):
    """A tied weight may have both names, and the head's alone."""
    family, config, weights = small

    def as_published(tensors):
        renamed = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
        embedding = renamed["thinker.model.embed_tokens.weight"]
        tensors.clear()
        tensors.update(renamed, **{"thinker.lm_head.weight": embedding.clone(), "talker.proj.weight": torch.zeros(2)})

    for edit in (as_published, lambda tensors: tensors.pop("thinker.model.embed_tokens.weight")):
        change(folder, edit)
        read = WeightFolder(folder, build_empty(family, config, torch.float32)).read
        assert_same(((name, read(name)) for name in weights), weights)
