"""A rank imports nothing heavy that it does not train with, not even to plan a step itself."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from dflop.jobs.fallback_plan import quick_planner
from dflop.records import LLM, Factors, ModuleFactors, to_dict
from dflop.run.batches import COMPARE, TRAIN, GlobalBatches
from dflop.train import wire
from tests.jobs.training import fresh


@pytest.fixture
def run(schedulable, tmp_path):
    return fresh(schedulable, tmp_path)


FORBIDDEN = {"numba", "llvmlite", "duckdb", "cvxpy", "prefect", "scipy", "submitit", "rich", "matplotlib"}


def planner(run, store, mode):
    config = run.config()
    return quick_planner(run, config, run.plan(), mode, "r", GlobalBatches(config, run.shapes()), store)


def test_a_quick_plan_holds_the_whole_batch_and_predicts_no_spans(run, store):
    message = planner(run, store, TRAIN)(3)
    batch = GlobalBatches(run.config(), run.shapes()).at(3)
    assert message.step_plan.sample_index == tuple(s.sample_index for s in batch)
    llm = message.step_plan.of(LLM)
    assert sorted(i for slot in llm.owner for items in slot for i in items) == list(range(len(batch)))
    assert (message.step_plan.policy, message.step_plan.step) == ("quick", 3)
    assert message.spans == {}
    # Arrival order exceeds a cap here.
    assert message.step_plan.predicted_step_s <= 1.05 * message.step_plan.arrival_step_s


def test_a_comparison_gets_the_policy_it_names_and_corrections_in_force_are_known(run, store):
    plan = planner(run, store, COMPARE)
    found = [plan(step).step_plan for step in range(4)]
    assert [step_plan.policy for step_plan in found] == ["warmup", "warmup", "arrival", "quick"]
    wire.note(store, wire.FACTORS, to_dict(Factors((ModuleFactors("vision", 2.0), ModuleFactors(LLM, 2.0)))))
    assert plan(3).step_plan.predicted_step_s == pytest.approx(2 * found[3].predicted_step_s, rel=0.2)


def test_a_plan_that_no_memory_holds_is_told_of(run, store):
    tight = dataclasses.replace(run.plan().module("vision"), max_tokens=1)
    plan = dataclasses.replace(run.plan(), modules=(tight, *run.plan().modules[1:]))
    told, config = [], run.config()
    batches = GlobalBatches(config, run.shapes())
    quick = quick_planner(run, config, plan, TRAIN, "r", batches, store, lambda *seen: told.append(seen))
    for step in range(2):
        quick(step)
    assert [(step, kind) for step, kind, _ in told] == [(0, "memory_exceeded"), (1, "memory_exceeded")]
    assert all("vision" in detail for _, _, detail in told)


CODE = """
import importlib.util, json, sys
import dflop.jobs.train
from dflop.jobs.fallback_plan import quick_planner
from dflop.run.directory import open_run
from dflop.run.batches import TRAIN, GlobalBatches
from dflop.train import wire
run = open_run(sys.argv[1])
store = wire.open_store("127.0.0.1", 0, is_server=True, timeout_s=20)
config = run.config()
plan = quick_planner(run, config, run.plan(), TRAIN, "r", GlobalBatches(config, run.shapes()), store)(0)
imported = {name.partition(".")[0] for name in sys.modules}
assert importlib.util.find_spec("numba")
print(json.dumps([plan.step_plan.policy, sorted(imported)]))
"""


def test_neither_training_nor_a_quick_plan_imports_a_compiler_or_a_database(run):
    done = subprocess.run([sys.executable, "-c", CODE, run.path], capture_output=True, text=True, check=True)
    policy, imported = json.loads(done.stdout.splitlines()[-1])
    assert policy == "quick"
    assert FORBIDDEN & set(imported) == set()
    assert {"torch", "pyarrow"} <= set(imported), "that is how imports are seen"
