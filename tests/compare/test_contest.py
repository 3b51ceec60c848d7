"""Plans side by side on a small cluster: the bound, paired comparison, rows and page of `dflop compare`."""

import dataclasses

import pytest

from dflop import units
from dflop.compare.contest import (
    COMPILED,
    CONTEXT,
    EXPERT,
    EXPERTS,
    GROUPED,
    IF_COMPILED,
    OURS,
    SEQUENCE,
    SHARDED,
    TUNED,
    contest,
    entry_text,
    rivals,
)
from dflop.compare.trainers import COLUMNS, NAMES, comparison_rows, data_page
from dflop.compare.unseen_batches import bound_s, judge
from dflop.cost.devices import A100
from dflop.plan.drafts import draft as plan_of
from dflop.plan.grid_choice import GridChoice
from dflop.plan.partition import even_chain
from dflop.plan.space import SearchSpace
from dflop.records import LLM, ParallelSpec
from dflop.report.tables import layout_text
from dflop.report.worth import gpu_hours
from dflop.schedule.policies import Effort
from tests.bench.cases import CASES, make_setting
from tests.bench.mixtures import MAIN
from tests.jobs.configs import make_config

SMALL = SearchSpace(microbatches=(4, 8, 16), recompute=(False, True))
QUICK = Effort(num_profiles=4, num_ops=200_000, max_simulations=50)
LLAVA = CASES[0]


@pytest.fixture(scope="module")
def setting():
    return make_setting(LLAVA, MAIN, num_nodes=1, global_batch_size=32, num_unseen=3, space=SMALL)


@pytest.fixture(scope="module")
def found(setting):
    return contest(setting, lambda line: None, effort=QUICK, policies=("token_kk",))


def over_baseline(found):
    return found.speedup(OURS, found.baseline).mean


def chain(setting, tp, pp, num_microbatches):
    problem = setting.problem
    parallel = ParallelSpec(tp, pp, setting.num_gpus // (tp * pp))
    grid = GridChoice.of(parallel, even_chain(problem.specs, pp), shard_optimizer=True)
    return plan_of(problem, num_microbatches, [grid], 0.0)


@pytest.mark.parametrize(("tp", "pp", "num_microbatches"), [(1, 1, 4), (1, 4, 16), (2, 2, 8), (4, 1, 8)])
def test_no_inline_plan_is_faster_than_the_bound(setting, tp, pp, num_microbatches):
    plan = chain(setting, tp, pp, num_microbatches)
    for policy in ("arrival", "token_lpt", "balanced"):
        steps = judge(plan, setting.unseen, setting.problem.cost, setting.problem.cluster, policy, effort=QUICK)
        for step_s, batch in zip(steps.step_s, setting.unseen, strict=True):
            assert step_s > bound_s(setting.problem, batch)


def test_idle_time_is_what_remains_of_all_gpus_those_without_a_seat_too(setting):
    plan, problem, batch = chain(setting, 1, 1, 4), setting.problem, setting.unseen[0]
    steps = judge(plan, [batch], problem.cost, problem.cluster, "balanced", effort=QUICK)
    busy_s = (1 - steps.idle_frac[0]) * steps.step_s[0]
    # All work at tp 1, which costs least, and the fixed part of 4 microbatches on top.
    assert bound_s(problem, batch) < busy_s < 1.1 * bound_s(problem, batch)
    degrees = {s.module: ParallelSpec(1, 1, 1 + (s.module == LLM)) for s in problem.specs}
    grids = [GridChoice.of(degrees[s.module], {s.module: (s.num_layers,)}) for s in problem.specs]
    split = plan_of(problem, 4, grids, 0.0)
    steps = judge(split, [batch], problem.cost, problem.cluster, "balanced", effort=QUICK)
    assert steps.step_s[0] > bound_s(problem, batch) * 8 / 3, "three of eight GPUs compute"
    assert steps.mean_idle_frac > 5 / 8


def test_a_contest_measures_all_by_one_plan(found):
    gain = {name: found.speedup(name, TUNED).mean for name in found.steps}
    assert gain[TUNED] == 1.0
    # Experts recompute MLPs alone, or share samples among neighbouring ranks, which the engine cannot.
    beyond = {EXPERT, SEQUENCE, CONTEXT}
    assert gain[OURS] >= max(gain[name] for name in found.steps if name not in {*beyond, *COMPILED, IF_COMPILED})
    assert gain[IF_COMPILED] >= gain[SHARDED], "at the same price"
    assert gain[IF_COMPILED] > gain[OURS]
    assert found.best_expert == CONTEXT
    assert found.over_experts.mean == pytest.approx(gain[OURS] / gain[CONTEXT])
    shared = found.entries[SEQUENCE]
    assert entry_text(shared) == f"{layout_text(shared.plan)} {shared.sharing}".strip()
    assert shared.grouped.num_processes == shared.plan.num_processes == 8
    assert found.over_bound > 1
    assert found.bound_over(TUNED) == pytest.approx(gain[OURS] * found.over_bound)
    assert set(found.steps) >= {TUNED, OURS, *EXPERTS[:-2], GROUPED}
    assert {len(s.step_s) for s in found.steps.values()} == {3}


def test_where_no_uniform_plan_fits_the_others_are_still_compared(found, tmp_path):
    steps = {name: s for name, s in found.steps.items() if name not in (TUNED, GROUPED, "uniform default")}
    alone = dataclasses.replace(found, steps=steps)
    assert alone.baseline == alone.best_expert == CONTEXT
    page = data_page(alone, make_config(tmp_path), "dflop compare run.yaml", 5000, 3.5)
    assert f"dflop's plan is {found.over_experts.mean:.3f}x" in page.verdict
    assert f"as fast as the best expert baseline ({NAMES[CONTEXT]}" in page.verdict
    assert page.verdict.endswith("no uniform plan in arrival order fits in memory.")
    assert comparison_rows(alone, 5000, 0.0)[-3][list(COLUMNS).index("speedup")] == found.over_experts.mean
    steps = {OURS: found.steps[OURS]}
    lonely = data_page(dataclasses.replace(alone, steps=steps), make_config(tmp_path), "dflop", 5000, 3.5)
    assert lonely.verdict == "Simulated: no baseline fits in memory, so no gain is claimed."
    assert not lonely.sections[0].drawings


def test_a_baseline_that_exceeds_memory_is_named_so_and_is_nobodys_measure(found, tmp_path):
    over = dataclasses.replace(
        found.steps[TUNED], num_over_cap=1, step_s=tuple(s / 2 for s in found.steps[TUNED].step_s)
    )
    tried = dataclasses.replace(found, steps={**found.steps, TUNED: over})
    assert found.baseline in {TUNED, "uniform default"}
    assert tried.baseline == "uniform default"
    page = data_page(tried, make_config(tmp_path), "dflop compare run.yaml", 5000, 3.5)
    (table,) = page.sections[0].tables
    assert {row[0]: row[6] for row in table.rows}[f"{NAMES[TUNED]} (exceeds memory)"] != "1.000x"
    assert {row[0]: row[6] for row in table.rows}[NAMES["uniform default"]] == "1.000x"
    measure = f"a uniform plan in arrival order that fits ({NAMES['uniform default']})"
    assert measure in page.verdict
    assert any(f"Speedups are over {measure}." in note for note in page.sections[1].notes)


def test_the_page_of_ones_own_data_says_what_its_rows_say(found, tmp_path):
    page = data_page(found, make_config(tmp_path), "dflop compare run.yaml", 5000, 3.5)
    (table,) = page.sections[0].tables
    assert [row[0] for row in table.rows] == [row[0] for row in comparison_rows(found, 5000, 3.5)]
    last = ["dflop's plan, token_kk", "dflop", NAMES[IF_COMPILED], "perfect balance, no bubble"]
    assert [row[0] for row in table.rows[-4:]] == last
    ours = found.speedup(OURS, found.baseline)
    told = units.speedup(ours.mean, ours.low, ours.high)
    assert told in page.verdict
    assert (told.split()[0], f"{ours.low:.3f}-{ours.high:.3f}") == table.rows[-3][6:8]


def test_a_step_means_tokens_and_flops_of_all_gpus(found):
    setting, steps = found.setting, found.steps[OURS]
    speed = setting.workload.throughput(steps.mean_s, found.ours)
    tokens = sum(shape.num_llm_tokens for batch in setting.unseen for shape in batch) / len(setting.unseen)
    assert speed.tokens_per_s_per_gpu == pytest.approx(tokens / steps.mean_s / setting.num_gpus)
    assert 0.05 < speed.mfu_frac <= speed.hfu_frac < A100.matmul_frac
    rows = {row[0]: row for row in comparison_rows(found, 5000, 0.0)}
    assert rows["dflop"][4:6] == (pytest.approx(speed.tokens_per_s_per_gpu), pytest.approx(speed.mfu_frac))


def test_a_sample_that_nothing_holds_is_in_all_rows_and_all_are_planned_without_it(found):
    huge = dataclasses.replace(found.setting.unseen[0][0], sample_index=-1, num_llm_tokens=10**7)
    problem = dataclasses.replace(found.setting.problem, worst_samples=(huge,))
    assert rivals(problem, found.ours, lambda line: None)[TUNED] == found.entries[TUNED]
    judged = dataclasses.replace(found, setting=dataclasses.replace(found.setting, problem=problem))
    rows = comparison_rows(judged, 5000, 0.0)
    assert all(str(row[0]).endswith(" (exceeds memory)") for row in rows[:-1])


def test_hours_are_of_all_gpus_over_all_steps():
    assert gpu_hours(3.0, num_steps=3600, num_gpus=64) == 192.0
