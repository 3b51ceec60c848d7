"""With compiled kernels, and with the same as plain Python where there is no time to load a compiler."""

import subprocess
import sys
from typing import Any

SETUP = """
from tests.builders import LLM, make_cost, make_inline_plan, make_plan, random_batch
from dflop.schedule.step_scheduler import schedule_step
from dflop.schedule.policies import Effort

split = make_plan({"vision": 2, "audio": 1, LLM: 2}, llm_pp=2, encoder_pp=2, num_microbatches=4)
inline = make_inline_plan(2, modules=("vision", "audio", LLM), num_microbatches=4)
batch, cost = random_batch(24, seed=1), make_cost("vision", "audio")
slow = {("vision", 0, 1): 1.5, (LLM, 0, 1): 2.0}

def make(policy, plan, slowness, **kwargs):
    return schedule_step(
        run_id="run", step=0, plan=plan, batch=batch, cost=cost, policy=policy, slowness=slowness, **kwargs
    )
"""


def python(code: str) -> str:
    """What a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


QUICK = """
import sys
sys.modules['numba'] = None
""" + SETUP + """
for plan in (split, inline):
    for slowness in ({}, slow):
        found = make("quick", plan, slowness)
        print(found.policy, found.predicted_step_s, found.work)
"""  # fmt: skip


def test_a_quick_plan_is_the_same_where_the_compiler_is_hidden():
    names: dict[str, Any] = {}
    exec(SETUP, names)
    found = [names["make"]("quick", names[plan], s) for plan in ("split", "inline") for s in ({}, names["slow"])]
    assert python(QUICK).splitlines() == [f"{f.policy} {f.predicted_step_s} {f.work}" for f in found]


KERNELS = """
import sys
from dflop.schedule.step_scheduler import warm

def compiled():
    modules = [m for name, m in sys.modules.items() if name.startswith("dflop.")]
    kernels = [x for m in modules for x in vars(m).values() if hasattr(x, "signatures")]
    return {(x.__name__, s) for x in kernels for s in x.signatures}

warm()
before = compiled()
for plan in (split, inline, make_plan({LLM: 2}, num_microbatches=4)):
    batch = random_batch(24, encoders=[m.module for m in plan.encoders])
    for slowness in ({}, slow):
        make("quick", plan, slowness)
        make("balanced", plan, slowness, effort=Effort(max_simulations=50))
print(sorted({name for name, _ in compiled() - before}), len(before) > 5)
"""


def test_after_warming_nothing_is_left_to_compile():
    assert python(SETUP + KERNELS) == "[] True\n"
