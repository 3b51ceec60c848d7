import dataclasses
import re

import pytest

from dflop.plan.infeasible import explain, find_draft
from dflop.plan.space import Problem
from tests.builders import make_sample
from tests.plan.problems import make_problem

M = 10**6
BARE = {"recompute": (False,), "shard_optimizer": False, "shard_parameters": (False,)}


def changed(problem: Problem, *, cluster: dict[str, object] | None = None, **space: object) -> Problem:
    return dataclasses.replace(
        problem,
        cluster=dataclasses.replace(problem.cluster, **(cluster or {})),  # type: ignore[arg-type]  # keywords of a test
        space=dataclasses.replace(problem.space, **space),  # type: ignore[arg-type]  # keywords of a test
    )


def amounts(text: str) -> list[float]:
    """Every `12.3 MiB` of a message, in bytes."""
    return [float(number) * 2**20 for number in re.findall(r"([\d.]+) MiB", text)]


@pytest.mark.parametrize(("share_ranks", "grid"), [(False, "(vision|llm)"), (True, r"vision\+llm")])
def test_the_error_names_the_module_the_amount_and_memory_that_would_do(share_ranks, grid):
    problem = make_problem("vision", memory_bytes=55 * M, share_ranks=(share_ranks,), **BARE)
    assert find_draft(problem) is None
    error = explain(problem)
    assert error.exit_code == 3
    assert re.match(r"module `(vision|llm)` needs ", error.what)
    more, need, usable, limit = amounts(error.what)
    assert more == pytest.approx(need - usable, abs=0.11 * 2**20)
    assert limit == pytest.approx(55 * M, rel=1e-3)
    assert re.search(f"least memory: {grid}, tp 1", error.where)
    enough = int(error.hint.split("memory_per_process_bytes ")[-1])
    plan = find_draft(changed(problem, cluster={"memory_per_process_bytes": enough}))
    assert plan is not None
    assert max(max(m.stage_memory_bytes) for m in plan.modules) == pytest.approx(need, abs=0.06 * 2**20)
    assert find_draft(changed(problem, cluster={"memory_per_process_bytes": int(enough / 1.02)})) is None


def test_every_fix_that_is_offered_helps_and_no_other_is_offered():
    problem = make_problem("vision", memory_bytes=215 * M, share_ranks=(False,), microbatches=(2,), **BARE)
    assert find_draft(problem) is None
    hint = explain(problem).hint
    fixes = {
        "recomputation": changed(problem, recompute=(False, True)),
        "ZeRO-1": changed(problem, shard_optimizer=True),
        "FSDP2": changed(problem, shard_parameters=(False, True)),
        "plan.share_ranks: [true]": changed(problem, share_ranks=(True,)),
    }
    offered = {name: name in hint for name in fixes}
    assert offered == {name: find_draft(p) is not None for name, p in fixes.items()}
    assert sum(offered.values()) >= 3
    (num_microbatches,) = re.findall(r"(\d+) microbatches", hint) or [None]
    counts = [m for m in range(3, 17) if find_draft(changed(problem, microbatches=(m,)))]
    assert (num_microbatches is None) == (not counts)
    assert num_microbatches is None or int(num_microbatches) == counts[0]


def test_samples_shared_by_more_ranks_are_offered_with_the_key():
    """Where the space leaves them out and nothing else."""
    batch = [make_sample(i, 1500) for i in range(2)]
    problem = make_problem(batches=[batch], memory_bytes=150 * M, share_ranks=(True,), cps=(1,), shard_optimizer=True)
    problem = dataclasses.replace(problem, global_batch_size=2)
    sizes = [n * M for n in range(40, 400, 10)]
    by_cp = {
        cp: [
            find_draft(changed(problem, cluster={"memory_per_process_bytes": n}, cps=(cp,))) is not None for n in sizes
        ]
        for cp in (1, 2, 4)
    }
    between = sizes[by_cp[2].index(True)]
    tight = changed(problem, cluster={"memory_per_process_bytes": between})
    assert find_draft(tight) is None
    assert "plan.context_parallel: [2]" in explain(tight).hint
    assert "plan.context_parallel" not in explain(changed(tight, whole_samples="layers carry a state")).hint
    assert (
        "plan.context_parallel"
        not in explain(changed(tight, cps=(1, 2, 4), cluster={"memory_per_process_bytes": 30 * M})).hint
    )


def test_the_fewest_processes_more_and_on_slurm_nodes():
    problem = make_problem(
        "vision", num_processes=2, memory_bytes=230 * M, share_ranks=(False,), microbatches=(2,), **BARE
    )
    assert find_draft(problem) is None
    (needed,) = re.findall(r"num_processes_per_node (\d+)", explain(problem).hint)
    assert find_draft(changed(problem, cluster={"num_processes_per_node": int(needed)})) is not None
    assert find_draft(changed(problem, cluster={"num_processes_per_node": int(needed) - 1})) is None
    assert "more node" in explain(changed(problem, cluster={"backend": "slurm"})).hint


def test_too_few_processes_for_ranks_of_their_own():
    error = explain(make_problem("vision", "audio", num_processes=2, share_ranks=(False,)))
    assert error.what.startswith("no layout of vision, audio, llm is possible on 2 process(es)")
    assert "plan.share_ranks: [true]" in error.hint
    assert "1 more process (num_processes_per_node 3)" in error.hint
