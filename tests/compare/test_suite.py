"""The suites: mixtures by the families' rules, the bound, paired comparison, tables, on small clusters."""

import dataclasses
import json

import pytest

from dflop import units
from dflop.compare.suite import run_suite as suite_run
from dflop.compare.suite import sweeps
from dflop.compare.suite.cases import CASES, make_setting, suite_family
from dflop.compare.suite.contest import CONTEXT, EXPERT, EXPERTS, OURS, SEQUENCE, TUNED, contest, make_contestants
from dflop.compare.suite.mixtures import MAIN, MIXTURES, draw_batches
from dflop.compare.suite.run_suite import SuiteResult
from dflop.compare.suite.suite_figures import save_picture
from dflop.compare.suite.suite_page import suite_page
from dflop.compare.suite.unseen_batches import bound_of_plan_s, bound_s, geometric_mean, judge
from dflop.compare.trainers import COLUMNS, NAMES, comparison_rows, data_page
from dflop.cost.devices import A100
from dflop.data.shapes import header_of
from dflop.errors import ConfigError
from dflop.plan.baselines.layers import even_chain
from dflop.plan.drafts import draft as plan_of
from dflop.plan.grid_choice import GridChoice
from dflop.plan.space import SearchSpace
from dflop.records import LLM, ParallelSpec
from dflop.report.tables import layout_text
from dflop.report.worth import gpu_hours
from dflop.schedule.policies import Effort
from tests.jobs.configs import make_config

SMALL = SearchSpace(microbatches=(4, 8, 16), recompute=(False, True))
QUICK = Effort(num_profiles=4, num_ops=200_000, max_simulations=50)
LLAVA, INTERN = CASES[0], CASES[-1]


@pytest.fixture(scope="module")
def setting():
    return make_setting(LLAVA, MAIN, num_nodes=1, global_batch_size=32, num_unseen=3, space=SMALL)


@pytest.fixture(scope="module")
def found(setting):
    return contest(setting, lambda line: None, effort=QUICK, policies=("token_kk",))


def draw(family, mixture, **kwargs):
    return draw_batches(family, mixture, max_llm_tokens=16_384, **kwargs)


def over_baseline(found):
    return found.speedup(OURS, found.baseline).mean


def chain(setting, tp, pp, num_microbatches):
    problem = setting.problem
    parallel = ParallelSpec(tp, pp, setting.num_gpus // (tp * pp))
    grid = GridChoice.of(parallel, even_chain(problem.specs, pp), shard_optimizer=True)
    return plan_of(problem, num_microbatches, [grid], 0.0)


@pytest.mark.parametrize("case", [LLAVA, INTERN], ids=lambda c: c.model)
@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
def test_equal_seeds_draw_equal_samples_whose_items_are_placed_by_the_rules_of_the_family(case, mixture):
    family = suite_family(case, mixture)
    first, again, other = (draw(family, mixture, global_batch_size=100, num_batches=2, seed=s) for s in (3, 3, 1))
    assert first == again
    assert first[0] != first[1]
    assert {s.num_text_tokens for s in first[0]} != {s.num_text_tokens for s in other[0]}
    assert draw(family, mixture, global_batch_size=100, num_batches=1, seed=3)[0] == first[0]
    for sample in first[0]:
        assert sample.num_llm_tokens == sample.num_text_tokens + sum(i.num_rows for i in sample.items) <= 16_384
        assert 0 < sample.num_supervised_tokens <= sample.num_text_tokens
        placed = [
            [family.place(header_of(i), len(sample.items), level) for i in sample.items]
            for level in range(family.max_level + 1)
        ]
        assert [(i.num_tokens, i.num_rows) for i in sample.items] in [
            [(p.num_tokens, p.num_rows) for p in level] for level in placed
        ]


@pytest.mark.parametrize(("tp", "pp", "num_microbatches"), [(1, 1, 4), (1, 4, 16), (2, 2, 8), (4, 1, 8)])
def test_no_inline_plan_is_faster_than_the_bound(setting, tp, pp, num_microbatches):
    plan = chain(setting, tp, pp, num_microbatches)
    for policy in ("arrival", "token_lpt", "balanced"):
        steps = judge(plan, setting.unseen, setting.problem.cost, setting.problem.cluster, policy, effort=QUICK)
        for step_s, batch in zip(steps.step_s, setting.unseen, strict=True):
            assert step_s > bound_of_plan_s(setting.problem, plan, batch) >= bound_s(setting.problem, batch)


def test_idle_time_is_what_remains_of_all_gpus_those_without_a_seat_too(setting):
    plan, problem, batch = chain(setting, 1, 1, 4), setting.problem, setting.unseen[0]
    steps = judge(plan, [batch], problem.cost, problem.cluster, "balanced", effort=QUICK)
    busy_s = (1 - steps.idle_frac[0]) * steps.step_s[0]
    # All work at tp 1, and the fixed part of 4 microbatches on top.
    assert bound_of_plan_s(problem, plan, batch) < busy_s < 1.1 * bound_of_plan_s(problem, plan, batch)
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
    assert gain[OURS] >= max(gain[name] for name in found.steps if name not in beyond)
    assert found.best_expert == SEQUENCE
    assert found.over_experts.mean == pytest.approx(gain[OURS] / gain[SEQUENCE])
    shared = found.plans.experts[SEQUENCE]
    assert found.plans.layout(SEQUENCE) == f"{layout_text(shared.plan)} {shared.sharing}".strip()
    assert shared.grouped.num_processes == shared.plan.num_processes == 8
    assert found.over_bound >= found.over_bound_of_ours > 1
    assert found.bound_over(TUNED) == pytest.approx(gain[OURS] * found.over_bound)
    assert set(found.steps) >= {TUNED, OURS, *EXPERTS, "length-grouped"}
    assert {len(s.step_s) for s in found.steps.values()} == {3}


def test_a_suite_writes_numbers_with_machine_versions_and_cost_tables(found, tmp_path, monkeypatch):
    monkeypatch.setitem(sweeps.SUITES, "noise", lambda say: [sweeps.Point("noise", 0.0, "0 %", found)])
    file, picture = tmp_path / "noise.json", tmp_path / "noise.svg"
    result = suite_run.run_suite("noise", lambda line: None, [picture], file)
    content = json.loads(file.read_text())
    assert content["simulated"] is True
    assert content["costs"] == [A100.source]
    assert len(content["cost_tables"][LLAVA.name]) == len(found.setting.problem.cost.tables)
    assert set(content["versions"]) >= {"dflop", "numpy"}
    assert content["cases"][0]["label"] == "0 %"
    assert picture.exists()
    assert {len(row) for row in result.rows} == {len(result.columns)}
    assert dict(zip(result.columns, result.rows[0], strict=True))["dflop"] == units.ratio(over_baseline(found))
    assert suite_page(result).title == "dflop where costs deviate from their predictions"
    with pytest.raises(ConfigError, match="unknown suite `papers`"):
        suite_run.run_suite("papers", lambda line: None)
    with pytest.raises(ConfigError, match="cannot draw"):
        suite_run.run_suite("paper", lambda line: None, [tmp_path / "x.bmp"])


def test_the_paper_suite_has_rows_a_plot_and_a_page(found, tmp_path):
    result = SuiteResult("paper", (sweeps.Point("", 0.0, "", found),))
    assert {len(row) for row in result.rows} == {len(result.columns)}
    assert [row[0] for row in result.rows] == [LLAVA.name, "geometric mean"]
    save_picture(result.points, tmp_path / "paper.svg")
    alone = dataclasses.replace(found, steps={name: s for name, s in found.steps.items() if name not in EXPERTS})
    without = suite_page(SuiteResult("paper", (sweeps.Point("", 0.0, "", alone),))).verdict
    assert f"On data `main` dflop is {over_baseline(found):.2f}x as fast as the best uniform plan" in without
    verdict = suite_page(result).verdict
    assert f"dflop is {found.over_experts.mean:.2f}x as fast as the best expert baseline" in verdict
    assert f"{over_baseline(found):.2f}x as fast as the best uniform plan in arrival order that fits" in verdict


def test_where_no_uniform_plan_fits_the_others_are_still_compared(found, tmp_path):
    steps = {name: s for name, s in found.steps.items() if name not in (TUNED, "length-grouped", "uniform default")}
    alone = dataclasses.replace(found, steps=steps, plans=dataclasses.replace(found.plans, tuned=None))
    result = SuiteResult("paper", (sweeps.Point("", 0.0, "", alone), sweeps.Point("", 0.0, "", found)))
    first, second, mean = (dict(zip(result.columns, row, strict=True)) for row in result.rows)
    assert first["baseline"] == f"{SEQUENCE}, {units.seconds(found.steps[SEQUENCE].mean_s)}"
    assert (first["tuned"], first["dflop"]) == ("-", first["over experts"])
    assert first["over experts"] == second["over experts"] == mean["over experts"] != "-"
    assert first["tokens/s/GPU dflop"] == second["tokens/s/GPU dflop"]
    both = [alone.over_experts.mean, over_baseline(found)]
    assert mean["dflop"] == units.ratio(geometric_mean(both)), "each over its own baseline"
    assert f"No uniform plan of {LLAVA.name} fits on data `main`, ours does." in suite_page(result).verdict
    save_picture(result.points, tmp_path / "paper.svg")
    page = data_page(alone, make_config(tmp_path), "dflop compare run.yaml", 5000, 3.5)
    assert f"dflop's plan is {found.over_experts.mean:.3f}x" in page.verdict
    assert f"as fast as the best expert baseline ({NAMES[SEQUENCE]}" in page.verdict
    assert page.verdict.endswith("no uniform plan in arrival order fits in memory.")
    assert comparison_rows(alone, 5000, 0.0)[-2][list(COLUMNS).index("speedup")] == found.over_experts.mean
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
    result = SuiteResult("paper", (sweeps.Point("", 0.0, "", tried),))
    row = dict(zip(result.columns, result.rows[0], strict=True))
    assert row["baseline"].startswith("uniform default, ")
    assert (row["default"], row["dflop"]) == ("1.00x", units.ratio(over_baseline(tried)))
    assert row["tuned"] == f"{units.ratio(tried.speedup(TUNED, tried.baseline).mean)}!"
    assert f"{over_baseline(tried):.2f}x as fast as the best uniform plan" in suite_page(result).verdict
    assert result.numbers[0]["baseline"] == "uniform default"
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
    assert [row[0] for row in table.rows[-3:]] == ["dflop's plan, token_kk", "dflop", "perfect balance, no bubble"]
    ours = found.speedup(OURS, found.baseline)
    told = units.speedup(ours.mean, ours.low, ours.high)
    assert told in page.verdict
    assert (told.split()[0], f"{ours.low:.3f}-{ours.high:.3f}") == table.rows[-2][6:8]


def test_a_step_means_tokens_and_flops_of_all_gpus(found):
    setting, steps = found.setting, found.steps[OURS]
    speed = setting.workload.throughput(steps.mean_s, found.plans.ours)
    tokens = sum(shape.num_llm_tokens for batch in setting.unseen for shape in batch) / len(setting.unseen)
    assert speed.tokens_per_s_per_gpu == pytest.approx(tokens / steps.mean_s / setting.num_gpus)
    assert 0.05 < speed.mfu_frac <= speed.hfu_frac < A100.matmul_frac
    rows = {row[0]: row for row in comparison_rows(found, 5000, 0.0)}
    assert rows["dflop"][4:6] == (pytest.approx(speed.tokens_per_s_per_gpu), pytest.approx(speed.mfu_frac))


def test_a_sample_that_nothing_holds_is_in_all_rows_and_all_are_planned_without_it(found):
    huge = dataclasses.replace(found.setting.unseen[0][0], sample_index=-1, num_llm_tokens=10**7)
    problem = dataclasses.replace(found.setting.problem, worst_samples=(huge,))
    assert make_contestants(problem, lambda line: None).tuned == found.plans.tuned
    judged = dataclasses.replace(found, setting=dataclasses.replace(found.setting, problem=problem))
    rows = comparison_rows(judged, 5000, 0.0)
    assert all(str(row[0]).endswith(" (exceeds memory)") for row in rows[:-1])


def test_hours_are_of_all_gpus_over_all_steps():
    assert gpu_hours(3.0, num_steps=3600, num_gpus=64) == 192.0
