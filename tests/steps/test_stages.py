"""Whole jobs in two stages, the projector alone and then everything.

That each stage trains as in Hugging Face, its optimizer and its learning rate begin anew: `tests/train/`.
"""

import dataclasses

import pytest
import torch

from dflop.cost.curve import ZERO, edge_part
from dflop.jobs.weights import full_config
from dflop.records import LLM, CostTable, Plan
from dflop.run.directory import RunDir, family_of, tokenizer_of
from dflop.steps import planning
from dflop.steps.planning import bound_family
from dflop.store.ingest import ingest
from dflop.store.reader import Reader
from dflop.train.blocks import read_index
from dflop.train.checkpoint_state import OPTIMIZER, read_model
from dflop.train.manifest import name_of, read_latest
from tests.builders import make_table
from tests.jobs.training import TABLES, fresh, give_plan, log_of, losses_of, run_ranks, set_config, train
from tests.models.whole_model import build_model
from tests.store.asking import fill
from tests.train.parity import is_frozen
from tests.train.synthetic import make_inline_plan, make_plan

FIRST_STEPS, NUM_STEPS = 3, 7
FROZEN = ("vision.tower", LLM)
TOLERANCE = 1e-5

pytestmark = [pytest.mark.lane("jobs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def staged(planned, tmp_path_factory) -> RunDir:
    stages = f"{{name: align, num_steps: {FIRST_STEPS}, frozen: [{', '.join(FROZEN)}], learning_rate: 0.002}}"
    run = fresh(planned, tmp_path_factory.mktemp("stages"))
    set_config(
        run, f"train.num_steps={NUM_STEPS}", f"stages=[{stages}, {{name: everything}}]", "train.warmup_steps=2",
        "train.checkpoint_every=100", "train.keep_checkpoints=9",
    )  # fmt: skip
    return run


def split_plan(run: RunDir, num_each: int = 1) -> Plan:
    """So many processes for either module: replicas of the encoder, stages of the LLM."""
    family = bound_family(run.config())
    return make_plan({"vision": (1, num_each), LLM: (num_each, 1)}, num_microbatches=4, of=family)


def replicas() -> Plan:
    """Inline, sharing out the optimizer."""
    inline = make_inline_plan([{"vision": 4, LLM: 6}], dp=2, num_microbatches=2)
    modules = tuple(dataclasses.replace(m, shard_optimizer=True) for m in inline.modules)
    return dataclasses.replace(inline, plan_id="other", modules=modules)


def weights_at(run: RunDir, step: int) -> dict[str, torch.Tensor]:
    return read_model(run.checkpoints / name_of(step))


def first_weights(run: RunDir) -> dict[str, torch.Tensor]:
    config, tokenizer = run.config(), tokenizer_of(run.config())
    family = family_of(config, tokenizer.vocab_size)
    model = build_model(family, full_config(family, tokenizer), seed=config.model.seed, dtype=torch.float32)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.fixture(scope="module")
def expected(staged, tmp_path_factory) -> dict[int, float]:
    """Losses of the plain split plan, a job per stage."""
    run = fresh(staged, tmp_path_factory.mktemp("split"))
    give_plan(run, split_plan(run))
    train(run)
    train(run)
    return losses_of(run)


def test_each_stage_trains_what_it_does_not_freeze_under_a_plan_of_its_own(staged, expected, tmp_path):
    run = fresh(staged, tmp_path)
    before = first_weights(run)
    family = bound_family(run.config())

    give_plan(run, split_plan(run, num_each=2))
    train(run)
    assert read_latest(run.checkpoints)["next_step"] == FIRST_STEPS
    assert sorted(losses_of(run)) == list(range(FIRST_STEPS))
    aligned = weights_at(run, FIRST_STEPS)
    changed = {n for n, w in aligned.items() if not torch.equal(w, before[n])}
    assert changed == {n for n in aligned if not is_frozen(n, family, FROZEN)}
    stored = read_index(run.checkpoints / name_of(FIRST_STEPS))
    assert {n.split("/")[1] for n in stored if n.startswith(f"{OPTIMIZER}/")} == changed, "states of what trains alone"

    give_plan(run, replicas())
    train(run)
    assert read_latest(run.checkpoints)["next_step"] == NUM_STEPS
    trained = weights_at(run, NUM_STEPS)
    assert not [n for n, w in trained.items() if torch.equal(w, aligned[n])], "the second stage trains everything"
    losses = losses_of(run)
    assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert sorted(losses) == list(range(NUM_STEPS))

    train(run)  # nothing is left to do
    assert losses_of(run) == losses


def test_a_damaged_checkpoint_takes_a_run_back_to_the_stage_before(staged, expected, tmp_path):
    run = fresh(staged, tmp_path)
    set_config(run, "train.checkpoint_every=2")
    give_plan(run, split_plan(run))
    train(run)
    for file in (run.checkpoints / name_of(FIRST_STEPS)).glob("__*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    # It sets out on the second stage, finds the state of the first, and leaves it to be taken up.
    ended = run_ranks(run, "dflop.jobs.train", str(run.path), "train")
    assert set(ended.codes) == {75}, "\n".join(ended.stderr)
    assert "step 2 belongs to an earlier stage" in log_of(run, 0).read_text()
    assert read_latest(run.checkpoints)["next_step"] == 2
    train(run)
    train(run)
    # Not bit for bit: what was learnt about costs may have packed the same samples in another way.
    assert losses_of(run) == pytest.approx(expected, rel=TOLERANCE)


def test_every_stage_is_planned_with_the_costs_and_the_memory_of_what_it_trains(staged, tmp_path):
    run = fresh(staged, tmp_path)
    config = run.config()
    frozen = {
        "vision": make_table("vision", table_id="vision-frozen", trains="none", backward_s=ZERO, activation_bytes=ZERO),
        LLM: make_table(LLM, table_id="llm-frozen", trains="none", backward_s=TABLES[LLM, 1, False].forward_s),
    }
    fill(config.store, *frozen.values(), run_id=run.run_id, producer="more")
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
