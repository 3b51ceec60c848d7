"""Whole jobs in two stages, the projector alone and then everything; beside them plain Hugging Face."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from dflop.cost.curve import ZERO, edge_part
from dflop.data.tokens import ChatTokenizer
from dflop.jobs import planning
from dflop.jobs.building import full_config
from dflop.jobs.planning import bound_family
from dflop.jobs.rundir import RunDir, dataset_ref, tokenizer_of, trainable_of
from dflop.jobs.source import DatasetSource
from dflop.jobs.steps import GlobalBatches, stage_at
from dflop.models.build import build_model
from dflop.records import LLM, CostTable
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.store.spool import SpoolWriter
from dflop.train.loop import LoopSettings, learning_rate
from dflop.train.manifest import name_of, read_latest
from dflop.train.state import OPTIMIZER, read_model, shapes_in
from tests.builders import make_table
from tests.jobs.training import TABLES, fresh, give_plan, log_of, losses_of, planned_run, run_ranks
from tests.train.parity import is_frozen
from tests.train.synthetic import loss_sum, make_inline_plan, make_plan

FIRST_STEPS, NUM_STEPS = 3, 7
FROZEN = ("vision.tower", LLM)
TOLERANCE = 1e-5

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> RunDir:
    pytest.importorskip("skimage", reason="needs the packages of dflop[demo]")
    stages = f"{{name: align, num_steps: {FIRST_STEPS}, frozen: [{', '.join(FROZEN)}], learning_rate: 0.002}}"
    return planned_run(
        tmp_path_factory.mktemp("stages"),
        f"train.num_steps={NUM_STEPS}",
        f"stages=[{stages}, {{name: everything}}]",
        "train.warmup_steps=2",
        "train.checkpoint_every=100",
        "train.keep_checkpoints=9",
    )


def plans_of(run: RunDir, name: str):
    """A plan per stage."""
    family, split = bound_family(run.config()), {"vision": (1, 1), LLM: (1, 1)}
    if name == "one split plan":
        return [make_plan(split, num_microbatches=4, of=family)] * 2
    if name == "vision pp2 | llm pp2, then inline dp2 with ZeRO-1":
        inline = make_inline_plan([{"vision": 4, LLM: 6}], dp=2, num_microbatches=2)
        modules = tuple(dataclasses.replace(m, shard_optimizer=True) for m in inline.modules)
        first = make_plan({"vision": (2, 1), LLM: (2, 1)}, num_microbatches=4, of=family)
        return [first, dataclasses.replace(inline, plan_id="other", modules=modules)]
    raise AssertionError(name)


def train(run: RunDir) -> None:
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert set(ended.codes) == {0}, "\n".join(ended.stderr)


def weights_at(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return read_model(run.checkpoints / name_of(step))


def first_weights(run: RunDir) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in whole_model(run).named_parameters()}


def whole_model(run: RunDir) -> torch.nn.Module:
    config, tokenizer = run.config(), tokenizer_of(run.config())
    family = trainable_of(config, tokenizer.vocab_size)
    return build_model(family, full_config(family, tokenizer), seed=config.model.seed, dtype=torch.float32)


def reference_losses(run: RunDir) -> list[float]:
    """One process, Hugging Face's own forward and attention, one sample after the other; stages freeze parameters."""
    torch.set_num_threads(1)
    config, built = run.config(), whole_model(run)
    plain = type(built)._from_config(copy.deepcopy(built.config), attn_implementation="sdpa", dtype=torch.float32)
    plain.load_state_dict(built.state_dict())
    family = trainable_of(config, ChatTokenizer(config.dataset.tokenizer, bound_family(config)).vocab_size)
    shapes = run.shapes()
    source, batches = DatasetSource(dataset_ref(config), family, shapes), GlobalBatches(config, shapes)
    named = {n: p for n, p in plain.named_parameters() if "audio_tower" not in n}
    t = config.train
    adam = torch.optim.AdamW(named.values(), betas=(0.9, 0.95), eps=1e-8, weight_decay=t.weight_decay)
    losses = []
    for step in range(t.num_steps):
        stage = stage_at(config, step)
        settings = LoopSettings(
            "reference", 0, stage.end_step, stage.learning_rate, t.warmup_steps, t.max_grad_norm, 1,
            first_step=stage.first_step,
        )  # fmt: skip
        for name, p in named.items():
            p.requires_grad_(not is_frozen(name, family, stage.frozen))
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        batch, loss = batches.at(step), 0.0
        num_tokens = sum(shape.num_supervised_tokens for shape in batch)
        for shape in batch:
            part = loss_sum(plain, source, shape) / num_tokens
            if part.requires_grad:
                part.backward()
            loss += float(part.detach())
        torch.nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], t.max_grad_norm)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, settings)
        adam.step()
        losses.append(loss)
    return losses


@pytest.fixture(scope="module")
def expected(planned) -> list[float]:
    return reference_losses(planned)


@pytest.mark.parametrize("name", ["one split plan", "vision pp2 | llm pp2, then inline dp2 with ZeRO-1"])
def test_each_stage_trains_what_it_does_not_freeze_and_losses_are_hugging_faces(planned, expected, name, tmp_path):
    run = fresh(planned, tmp_path)
    plans = plans_of(run, name)
    before = first_weights(run)
    family = bound_family(run.config())

    give_plan(run, plans[0])
    train(run)
    assert read_latest(run.checkpoints)["next_step"] == FIRST_STEPS
    assert sorted(losses_of(run)) == list(range(FIRST_STEPS))
    aligned = weights_at(run, FIRST_STEPS)
    changed = {n for n, w in aligned.items() if not torch.equal(w, before[n])}
    assert changed == {n for n in aligned if not is_frozen(n, family, FROZEN)}
    stored = shapes_in(FileSystemReader(run.checkpoints / name_of(FIRST_STEPS)).read_metadata())
    assert {n.split("/")[1] for n in stored if n.startswith(f"{OPTIMIZER}/")} == changed, "states of what trains alone"

    give_plan(run, plans[1])
    train(run)
    assert read_latest(run.checkpoints)["next_step"] == NUM_STEPS
    trained = weights_at(run, NUM_STEPS)
    assert not [n for n, w in trained.items() if torch.equal(w, aligned[n])], "the second stage trains everything"
    losses = losses_of(run)
    assert [losses[step] for step in range(NUM_STEPS)] == pytest.approx(expected, rel=TOLERANCE)

    train(run)  # nothing is left to do
    assert losses_of(run) == losses


def test_a_damaged_checkpoint_takes_a_run_back_to_the_stage_before(planned, expected, tmp_path):
    run = fresh(planned, tmp_path)
    text = run.config_file.read_text()
    run.config_file.write_text(text.replace("checkpoint_every: 100", "checkpoint_every: 2"))
    give_plan(run, plans_of(run, "one split plan")[0])
    train(run)
    for file in (run.checkpoints / name_of(FIRST_STEPS)).glob("__*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    # It sets out on the second stage, finds the state of the first, and leaves it to be taken up.
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert set(ended.codes) == {75}, "\n".join(ended.stderr)
    assert "step 3 belongs to an earlier stage" in log_of(run, 0).read_text()
    assert read_latest(run.checkpoints)["next_step"] == 2
    train(run)
    train(run)
    # Not bit for bit: what was learnt about costs may have packed the same samples in another way.
    losses = losses_of(run)
    assert [losses[step] for step in range(NUM_STEPS)] == pytest.approx(expected, rel=TOLERANCE)


def test_every_stage_is_planned_with_the_costs_and_the_memory_of_what_it_trains(planned, tmp_path):
    run = fresh(planned, tmp_path)
    config = run.config()
    frozen = {
        "vision": make_table(
            "vision", table_id="vision-frozen", is_frozen=True, backward_s=ZERO, activation_bytes=ZERO
        ),
        LLM: make_table(LLM, table_id="llm-frozen", is_frozen=True, backward_s=TABLES[LLM, 1, False].forward_s),
    }
    with SpoolWriter(config.store, run.run_id, "more") as spool:
        for table in frozen.values():
            spool.append(table)
    ingest(config.store)
    found = {}
    for first in (0, FIRST_STEPS, 0):
        best = planning.plan_run(run, config, "model", lambda _: None, from_step=first)[0]
        ingest(config.store)
        found[first] = best, {table.module: table for table in run.cost_tables()}
    (align, tables), (everything, trained) = found[0], found[FIRST_STEPS]
    assert tables["vision"].backward_s == edge_part(TABLES["vision", 1, False].backward_s)
    assert tables[LLM] == frozen[LLM]
    assert not any(table.is_frozen or table.source == "derived" for table in trained.values() if table.tp == 1)
    assert align.predicted_step_s < everything.predicted_step_s
    with Reader(config.store) as reader:
        kept = {t.table_id for t in reader.records(CostTable, where={"table_id": align.table_ids})}
    assert kept == set(align.table_ids), "schedulers read them from the store"
