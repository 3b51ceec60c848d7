"""With compiled kernels, without them, and where numba is not even installed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflop.schedule.policies import Effort, StepJob
from dflop.simulate import jit
from tests.schedule.test_step_scheduler import cases, schedule

SETUP = """
from tests.builders import LLM, make_cost, make_plan, random_batch
from dflop.schedule.step_scheduler import schedule_step
from dflop.schedule.policies import Effort

plan = make_plan({"vision": 2, "audio": 1, LLM: 2}, llm_pp=2, encoder_pp=2, num_microbatches=4)
batch, cost = random_batch(24, seed=1), make_cost("vision", "audio")

def make(policy, **kwargs):
    return schedule_step(run_id="run", step=0, plan=plan, batch=batch, cost=cost, policy=policy, **kwargs)
"""


def python(code: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@settings(max_examples=20, deadline=None)
@given(cases(), st.sampled_from(["arrival", "length_grouped", "token_lpt", "bottleneck", "quick"]))
def test_what_needs_no_search_is_the_same_uncompiled(case, policy):
    plan, batch, cost, max_concurrency = case
    fast, slow = (schedule(plan, batch, cost, max_concurrency, policy=policy, compiled=c) for c in (True, False))
    assert fast == slow


@settings(max_examples=8, deadline=None)
@given(cases())
def test_balanced_uncompiled_leaves_out_the_search_only(case):
    plan, batch, cost, _ = case
    jobs = [StepJob(plan, batch, cost, compiled=c) for c in (True, False)]
    fast, slow = (job.best(Effort(max_simulations=500))[2] for job in jobs)
    assert fast <= slow * (1 + 1e-12)
    assert slow <= jobs[1].quick(Effort())[2]


def test_numba_may_be_missing():
    code = "import sys; sys.modules['numba'] = None\n" + SETUP
    code += """
import numpy as np
from dflop.schedule.pack import token_cap
from dflop.schedule.warm import warm

warm()
for policy in ("arrival", "quick", "balanced"):
    found = make(policy)
    assert sorted(i for ranks in found.of(LLM).owner for ids in ranks for i in ids) == list(range(24))
    tokens = [batch[i].num_llm_tokens for i in range(24)]
    largest = max(sum(tokens[i] for i in ids) for ranks in found.of(LLM).owner for ids in ranks)
    assert policy == "arrival" or largest <= token_cap(np.array(tokens), 8)
    print(policy, found.policy, found.predicted_step_s, found.work)
"""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    lines = dict(zip(("arrival", "quick", "balanced"), python(code).splitlines(), strict=True))
    for policy in ("arrival", "quick"):
        found = names["make"](policy)
        assert lines[policy] == f"{policy} {found.policy} {found.predicted_step_s} {found.work}"
    assert lines["balanced"].startswith("balanced ")


KERNELS = """
import sys
from dflop.schedule.warm import warm

def compiled():
    modules = [m for name, m in sys.modules.items() if name.startswith("dflop.")]
    kernels = [x for m in modules for x in vars(m).values() if hasattr(x, "signatures")]
    return {(x.__name__, s) for x in kernels for s in x.signatures}

slow = {("vision", 0, 1): 1.5, (LLM, 0, 1): 2.0}
for policy in ("arrival", "quick", "balanced", "bottleneck"):
    for slowness in ({}, slow):
        make(policy, compiled=False, slowness=slowness)
print(len(compiled()))
warm()
before = compiled()
for slowness in ({}, slow):
    make("balanced", effort=Effort(max_simulations=50), slowness=slowness)
plan = make_plan({LLM: 2}, num_microbatches=4)
batch = random_batch(24, encoders=())
for slowness in ({}, slow):
    make("balanced", effort=Effort(max_simulations=50), slowness=slowness)
print(sorted({name for name, _ in compiled() - before}), len(before) > 10)
"""


@pytest.mark.skipif(not jit.IS_COMPILED, reason="nothing is compiled here")
def test_uncompiled_plans_touch_no_kernel_and_after_warming_nothing_is_left_to_compile():
    assert python(SETUP + KERNELS) == "0\n[] True\n"
