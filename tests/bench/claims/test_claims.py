"""Every claim end to end on tiny cases, and the texts of each from made-up numbers."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from dflop.jobs.suite.contest import BATCHES, DEFAULT, OURS, TUNED
from dflop.records import LLM
from tests.bench.claims import __main__ as command
from tests.bench.claims import (
    ablation,
    audio,
    balance,
    blind,
    correction,
    idle,
    initialisation,
    overlap,
    scaling,
    throughput,
)
from tests.bench.claims.contests import (
    DEFAULT_CHARGED,
    FIXED,
    FIXED_CHARGED,
    OUR_PLAN,
    PADDED,
    PADDED_CHARGED,
    TUNED_CHARGED,
    Outcome,
    run_arrival_plan,
    run_contest,
)
from tests.bench.claims.page import tables
from tests.bench.claims.where import AUDIO_MODELS, INTERNVIT_72B, SIGLIP_7B, Where
from tests.bench.schedule.overhead import Waits

SEEDS = (0, 1)
EVERYBODY = (
    TUNED, DEFAULT, BATCHES, OUR_PLAN, OURS, TUNED_CHARGED, DEFAULT_CHARGED, PADDED, PADDED_CHARGED, FIXED,
    FIXED_CHARGED,
)  # fmt: skip
TINY = Where(SIGLIP_7B, "main", 0, num_nodes=1, global_batch_size=32, microbatches=(4, 8, 16))


@pytest.fixture(scope="module")
def tiny():
    return run_contest(TINY)


def made(where, share=0.2, over_memory=0, **step_s):
    """An outcome in which everybody takes 2 s but ours, 1 s, unless told otherwise."""
    seconds = dict.fromkeys(EVERYBODY, 2.0) | {OURS: 1.0, BATCHES: 1.25} | step_s
    idle_frac = {name: 0.3 for name in seconds} | {OURS: 0.1}
    return Outcome(
        where, share, {name: (s, s) for name, s in seconds.items()}, idle_frac,
        dict.fromkeys(seconds, 0) | {TUNED: over_memory}, {OURS: "inline tp2", TUNED: "inline tp4"},
        bound_s=0.8, bound_of_ours_s=0.9, planning_cpu_s=10.0, scheduling_cpu_s=(0.1, 0.2),
    )  # fmt: skip


def world(kind, rate, delay, seed, **changes):
    found = correction.Corrected(kind, rate, delay, seed, gain=rate, best_gain=2 * rate, overhead=1e-4, on_frac=0.5)
    return dataclasses.replace(found, **changes)


def stand_in(task, **changes):
    """A result of a task without its work."""
    if task.run is run_contest:
        return made(*task.args, share=task.args[0].encoder_factor / (task.args[0].encoder_factor + 5.4))
    if task.run is run_arrival_plan:
        return 1.9, 1.9
    if task.run is correction.run_correction:
        return world(*task.args)
    assert task.run is initialisation.run_forecast
    where, kind = task.args
    return initialisation.Forecast(kind, where, 24, 100.0, 45.0, ("llm tp 1",), ("vision tp 1 (no group fits)",))


def claim_of(module, *more, full=False, change=lambda task, result: result):
    """The claim of a module on stand-ins."""
    found = {task: change(task, stand_in(task)) for task in module.tasks(SEEDS, full)}
    return module.claim(found, SEEDS, full, *more)


def job(seed, wait_frac, schedule_frac=0.0):
    ranks = (
        Waits(seed, 0, "vision", 30, 60.0, wait_frac, schedule_frac, 1.5),
        Waits(seed, 1, LLM, 30, 60.0, 0, 0, 1.0),
    )
    return overlap.Job(seed, ranks, {"balanced": 30}, {})


# A contest, for real.


def test_everybody_runs_the_same_batches(tiny):
    assert set(EVERYBODY) <= set(tiny.step_s)
    assert {len(s) for s in tiny.step_s.values()} == {8}
    assert tiny.gain(TUNED) >= 1.0
    assert tiny.bound_s < tiny.mean_s(OURS) < tiny.mean_s(FIXED)
    assert tiny.mean_s(TUNED) < tiny.mean_s(FIXED)
    assert math.isnan(tiny.gain("nobody")), "without a plan there is no gain"
    assert all(tiny.num_over_memory[name] == 0 for name in (TUNED_CHARGED, PADDED_CHARGED, FIXED_CHARGED))
    assert json.loads(json.dumps(dataclasses.asdict(tiny)))["where"]["seed"] == 0


def test_another_seed_is_other_data(tiny):
    first, second = (dataclasses.replace(TINY, seed=seed).setting() for seed in (0, 1))
    assert first.unseen[0] != second.unseen[0]
    assert first.problem.batches[0] != second.problem.batches[0]
    assert not {first.problem.batches[0], first.unseen[0]} & {second.problem.batches[0], second.unseen[0]}
    assert first.unseen == TINY.setting().unseen


def test_padding_is_to_the_longest_of_its_company(tiny):
    judge = blind.Blind(TINY.setting())
    plan = judge.plans[0]
    seconds = {padding: judge.step(plan, 0, padding)[0] for padding in blind.PADDINGS}
    assert seconds[""] < seconds["microbatch"] <= seconds["batch"]


def test_padded_items():
    setting = TINY.setting()
    judge = blind.Blind(setting)
    items = setting.problem.batch_items[0]
    plan = judge.plans[0]
    assignment = blind.StepJob(plan, setting.problem.batches[0], setting.problem.cost).assign("arrival", blind.QUICK)
    dp = plan.module(LLM).parallel.dp
    bucket = assignment.slot * dp + assignment.rank
    tokens = items[LLM].num_tokens
    found = blind.padded(items, assignment, dp, "microbatch")
    wanted = [tokens[bucket == b].max() for b in bucket]
    assert found[LLM].num_tokens.tolist() == wanted
    assert found[LLM].sum_sq_tokens.tolist() == [w**2 for w in wanted]
    assert found["vision"] is items["vision"], "encoders do not pad"
    assert set(blind.padded(items, assignment, dp, "batch")[LLM].num_tokens.tolist()) == {tokens.max()}
    assert blind.padded(items, assignment, dp, "")[LLM] is items[LLM]


def test_a_charged_layout_holds_every_batch_and_is_no_faster(tiny):
    judge = blind.Blind(TINY.setting())
    for padding in blind.PADDINGS:
        tuned = judge.tune(padding)
        assert tuned.charged is not None
        assert judge.holds(tuned.charged.plan, padding)
        assert judge.mean_step_s(tuned.uncharged.plan, padding) <= judge.mean_step_s(tuned.charged.plan, padding)
    overflowing = [p for p in judge.plans if not judge.holds(p, "batch")]
    assert overflowing, "fixed lengths overflow some layout that holds the average batch"


def test_sounds_alone_are_a_setting_of_the_modules_they_use():
    for model in AUDIO_MODELS:
        problem = Where(model, "audio", 0, num_nodes=1, global_batch_size=16).setting().problem
        assert [s.module for s in problem.specs] == ["audio", LLM]
        items = [item for batch in problem.batches for sample in batch for item in sample.items]
        assert {item.kind for item in items} == {"audio"}
        assert all(item.width_px == 0 and item.duration_s >= 1.0 for item in items)


def test_the_planner_alone_plans_for_arrival_order(tiny):
    steps = run_arrival_plan(TINY)
    assert len(steps) == len(tiny.step_s[TUNED])
    assert np.mean(steps) <= 1.05 * tiny.mean_s(OUR_PLAN), "a plan made for arrival order is no worse in it"


# Claims, on made-up outcomes.


def test_throughput_names_what_gives_which():
    claim = claim_of(throughput)
    assert claim.readings[0].values == (2.0, 2.0)
    assert claim.verdict == "in part"
    assert "2.50x" in claim.worse
    assert "perfect balance" in claim.worse
    assert any("over uniform tuned: 2.00x to 2.00x by model and data; 3 of 3 within" in note for note in claim.notes)
    weak = claim_of(throughput, change=lambda _, o: made(o.where, over_memory=2, **{TUNED: 9.0, FIXED: 9.0}))
    assert weak.verdict == "reached"
    assert weak.worse == ""
    assert any("3 beyond it" in note for note in weak.notes)
    assert f"{TUNED} 12 of 12" in weak.notes[-1]


def test_a_baseline_that_no_memory_holds_is_said_to_be_none():
    def without(_, o):
        return dataclasses.replace(o, step_s={k: v for k, v in o.step_s.items() if k != TUNED_CHARGED})

    claim = claim_of(throughput, change=without)
    assert f"over {TUNED_CHARGED}: no such layout holds" in claim.notes
    assert "in 6 of 6 settings no uniform layout holds every batch" in claim.notes[-1]
    assert any(
        row["gain_over_uniform_tuned_charged"] != row["gain_over_uniform_tuned_charged"] for row in claim.details
    )


def test_a_setting_where_nothing_fits_is_left_out():
    claim = claim_of(throughput, change=lambda task, o: None if o.where.seed == 1 else o)
    assert len(claim.readings[0].values) == 1


def test_idle_says_when_idle_time_misleads():
    claim = claim_of(idle)
    assert claim.readings[0].values == pytest.approx((1 - 0.1 / 0.6, 1 - 0.1 / 0.6))
    assert claim.verdict == "not reached"
    assert "2.00x as fast, by a layout that spends 36% fewer GPU-seconds" in claim.worse
    lazy = made(TINY, **{BATCHES: 3.0})
    lazy = dataclasses.replace(lazy, idle_frac={**lazy.idle_frac, BATCHES: 0.01})
    misled, pairs, worst = idle.misleading_pairs([lazy])
    assert misled > 0
    assert pairs > misled
    assert f"{BATCHES} idles 1% and takes 3.00x as long as {OURS}" in worst


def test_scaling_compares_the_ends():
    def grown(task, o):
        return made(o.where, **{TUNED: 1.5 + 0.1 * math.log2(o.where.num_nodes)})

    assert claim_of(scaling, change=grown).verdict == "reached"
    shrunk = claim_of(scaling, change=lambda _, o: made(o.where, **{TUNED: 2.0 - 0.05 * o.where.num_nodes}))
    assert shrunk.verdict == "not reached"
    assert "there is no more to gain" in shrunk.worse
    assert {(row["sweep"], row["num_nodes"]) for row in shrunk.details} == {
        (sweep, n) for sweep in scaling.SWEEPS for n in scaling.QUICK_NODES
    }


def test_balance_looks_for_the_peak():
    def peaked(at):
        return lambda _, o: made(o.where, o.encoder_share, **{TUNED: 3.0 if o.where.encoder_factor == at else 2.0})

    assert claim_of(balance, change=peaked(5.4)).verdict == "reached"
    elsewhere = claim_of(balance, change=peaked(1.0))
    assert elsewhere.verdict == "not reached"
    assert (
        "the largest gain is at 16%, at an end of the range; our plan there is inline (2 of 2 seeds)" in elsewhere.worse
    )


def test_ablation_says_which_part_counts():
    assert ablation.dominant(1.5, 1.2) == "planner"
    assert ablation.dominant(1.2, 1.5) == "scheduler"
    assert ablation.dominant(1.2, 1.24) == "equal"
    claim = claim_of(ablation)
    assert claim.readings[0].values == pytest.approx((2.0 / 1.9, 2.0 / 1.9))
    assert claim.readings[3].values == pytest.approx((1.6, 1.6))
    tight = claim_of(ablation, change=lambda t, o: made(o.where, over_memory=2) if t.run is run_contest else (4.0, 4.0))
    assert "the tuned layout takes more memory than there is in 8 of 8 of these batches" in tight.worse
    assert "leave room for batches that it has not seen" in tight.worse
    assert any(note.endswith("scheduler (paper: equal)") for note in claim.notes)
    assert claim.verdict == "in part"
    assert "tuning has taken what a planner would gain" in claim.worse


def test_ablation_leaves_out_a_planner_that_has_no_plan_and_says_so():
    def without(task, result):
        return None if task.run is run_arrival_plan and task.args[0].model == INTERNVIT_72B else result

    claim = claim_of(ablation, change=without)
    assert claim.readings[0].values == pytest.approx((2.0 / 1.9, 2.0 / 1.9)), "of the other model"
    assert claim.readings[5].values == pytest.approx((1.25, 1.25)), "over the scheduler alone where that is all"
    assert not any("paper: equal" in note for note in claim.notes)
    assert any("no plan for arrival order holds its batches in memory with 2 of the seeds" in n for n in claim.notes)
    assert json.dumps(claim.to_json(), allow_nan=False)
    assert (
        claim_of(ablation, change=lambda task, r: None if task.run is run_arrival_plan else r).readings[0].values == ()
    )


def test_audio_says_over_what():
    claim = claim_of(audio)
    assert claim.verdict == "reached"
    assert claim.notes[0].startswith("2x and more over: uniform tuned, uniform tuned, charged, ")
    assert claim_of(audio, change=lambda _, o: made(o.where, **{TUNED: 1.5})).verdict == "not reached"


def test_correction_pays_or_says_why_not():
    claim = claim_of(correction)
    assert claim.verdict == "reached"
    assert "pays (0.1% of a step or more, mean over seeds) in 2 of 2 cells by size, from a rate of 3% on" in claim.notes
    shut = claim_of(correction, change=lambda t, w: dataclasses.replace(w, gain=0.0, on_frac=0.0))
    assert shut.verdict == "in part"
    assert "cannot tell such a gain from noise" in shut.worse
    idle_world = claim_of(correction, change=lambda t, w: dataclasses.replace(w, gain=0.0, best_gain=0.0))
    assert "hardly change the slowest microbatch" in idle_world.worse


def test_initialisation_is_held_against_epoch_and_training():
    claim = claim_of(initialisation)
    epoch_s = initialisation.EPOCH_SAMPLES / 512 * 1.0
    assert claim.readings[0].values == pytest.approx((110 / epoch_s, 110 / epoch_s))
    assert claim.readings[2].values == pytest.approx((110 / initialisation.paper_training_s(),) * 2)
    assert claim.verdict == "in part"
    assert "8 of 8 forecasts are beyond their budget, by at most 2.22x" in claim.notes[0]
    assert "vision tp 1 (no group fits)" in claim.notes[1]


def test_overlap_tells_late_plans_from_late_data():
    assert claim_of(overlap, [job(0, 0.001), job(1, 0.002)]).verdict == "reached"
    late = claim_of(overlap, [job(0, 0.1, schedule_frac=0.01)])
    assert late.verdict == "in part"
    assert "decoding" in late.worse
    assert "too short for the scheduler" in claim_of(overlap, [job(0, 0.1, schedule_frac=0.09)]).worse
    assert "no training was run" in claim_of(overlap, []).worse


# Small pieces of work, for real.


def test_a_world_of_slow_sizes_is_learnt_and_random_slowness_is_left_alone():
    slow = correction.run_correction(correction.BY_SIZE, 0.1, 2.0, seed=0, num_steps=24)
    assert 0 < slow.gain <= slow.best_gain + 0.02
    assert 0 < slow.on_frac < 1
    assert slow.net_gain == slow.gain - slow.overhead
    chance = correction.run_correction(correction.AT_RANDOM, 0.03, 0.5, seed=0, num_steps=12)
    assert abs(chance.gain) < 0.02


def test_forecasts_keep_to_their_budget_and_leave_out_what_does_not_fit():
    where = dataclasses.replace(TINY, global_batch_size=64)
    default, example = (initialisation.run_forecast(where, k) for k in (initialisation.DEFAULT, initialisation.EXAMPLE))
    assert default.budget_s == 45 / 2 + 5
    assert example.budget_s == 4 * 600 / 2 + 5
    assert 0 < default.probing_s <= 1.3 * default.budget_s
    assert default.probing_s < example.probing_s <= 1.3 * example.budget_s
    assert default.num_probes < example.num_probes
    assert default.probed == ("vision tp 1", "llm tp 1")


@pytest.mark.slow
def test_a_real_training_tells_its_waits():
    found = overlap.run_job(0, num_steps=6)
    assert [(w.rank, w.num_steps) for w in found.ranks] == [(0, 5), (1, 5)]
    assert all(0 <= w.data_wait_frac < 1 and w.first_wait_s > 0 for w in found.ranks)
    assert sum(found.policies.values()) == 6


def test_the_command_prints_and_writes(monkeypatch, tmp_path, capsys):
    path = tmp_path / "claims.json"
    monkeypatch.setattr(command, "run_all", lambda tasks, say, pieces: {task: stand_in(task) for task in tasks})
    monkeypatch.setattr(overlap, "measure", lambda seeds, full, say: [job(seed, 0.001) for seed in seeds])
    monkeypatch.setattr("sys.argv", ["claims", "--seeds", "2", "--json", str(path)])
    command.main()
    content = json.loads(path.read_text())
    assert [c["name"] for c in content["claims"]] == list(command.PARTS)
    assert content["num_seeds"] == 2
    assert not content["full"]
    assert "claims-ablation" in tables(content)
    printed = capsys.readouterr().out
    assert all(f"{c['name']}: {c['verdict']}" in printed for c in content["claims"])
    monkeypatch.setattr("sys.argv", ["claims", "--seeds", "0"])
    with pytest.raises(SystemExit):
        command.main()


def test_page_and_print_of_all_claims():
    modules = (throughput, idle, scaling, balance, ablation, audio, correction, initialisation)
    claims = [claim_of(module) for module in modules] + [claim_of(overlap, [job(0, 0.001)])]
    content = json.loads(json.dumps({"claims": [c.to_json() for c in claims]}))
    found = tables(content)
    assert list(found) == ["claims", "claims-notes", *(f"claims-{n}" for n in (
        "throughput", "scaling", "balance", "ablation", "correction", "initialisation",
    ))]  # fmt: skip
    rows = found["claims"].splitlines()
    assert len(rows) == 2 + len(claims)
    assert len({row.replace("\\|", "").count("|") for row in rows}) == 1
    for claim, row in zip(claims, rows[2:], strict=True):
        assert claim.verdict in row
        assert claim.expectations[0].reading.text in row
        assert all(f"- *{claim.name}*: {note}" in found["claims-notes"] for note in claim.notes)
    assert "2.00x ±0.00x" in found["claims-throughput"]
    assert " | 0 of 4 | " in found["claims-throughput"], "batches beyond memory"
    assert command.told(claims[0]).startswith("throughput: in part\n")
