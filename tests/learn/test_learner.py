"""What the scheduler learns of a job whose truth is known: its ranks take what they are made to take."""

import dataclasses
import json

import numpy as np
import pytest

from dflop.cost.model import CostModel
from dflop.learn.cost_inputs import earlier_runs
from dflop.learn.decisions import JobFacts
from dflop.learn.learner import Learner
from dflop.learn.stalls import NUM_STEPS as NUM_STALLED
from dflop.learn.stalls import Stalls
from dflop.parallel.topology import seats
from dflop.records import LLM, Correction, Decision, Factors, RankFactor
from dflop.schedule.attribution import bucket_seconds
from dflop.schedule.step_scheduler import schedule_step
from dflop.simulate.step import EXPOSED_FRAC
from dflop.train.wire import RankTimes
from tests.builders import make_inline_plan, make_plan, make_table, random_batch
from tests.jobs.configs import make_config

BATCH_SIZE = 256
SPLIT = make_plan({"vision": 4, LLM: 8}, num_microbatches=16, global_batch_size=BATCH_SIZE)
INLINE = make_inline_plan(8, num_microbatches=16, global_batch_size=BATCH_SIZE)
SHAPES = random_batch(1500, encoders=("vision",), seed=5)
COST = CostModel(make_table(m, fixed_s=1e-5, per_token_s=t) for m, t in (("vision", 1e-5), (LLM, 3e-5)))
NOISE_FRAC = 0.03
STEP_S = 60.0
"""So long that what learning takes here is next to nothing, on any machine."""


class Job:
    """A job on made-up ranks.

    Args:
        folder: For the configuration.
        plan: That runs.
        slow_sizes: (module, tokens from which on, factor).
        slow_ranks: Factor per rank, from a step on.
        held_up: Seconds that pass per compute second, of ranks for which that is not one.
        exposed_s: Of messages, in every microbatch.
        levels: Factor per module.
    """

    def __init__(
        self, folder, plan=SPLIT, *overrides, slow_sizes=(), slow_ranks=None, held_up=None, levels=None,
        earlier=None, learned=None, first_step=0, plan_id="plan", usual=(), table_ids=None, exposed_s=0.0,
    ):  # fmt: skip
        self.plan = dataclasses.replace(plan, plan_id=plan_id)
        self.slow_sizes, self.slow_ranks, self.levels = slow_sizes, slow_ranks or {}, levels or {}
        self.held_up, self.exposed_s = held_up or {}, exposed_s
        tables = table_ids or {m.module: f"table of {m.module}" for m in plan.modules}
        self.learner = Learner(
            make_config(folder, *overrides),
            JobFacts("run", 1, self.plan, tables, 100, lambda rank: f"node-{rank // 4}", COST, None), SHAPES,
            first_step=first_step, earlier=earlier or {}, learned=learned, usual=usual,
        )  # fmt: skip
        self.step = first_step
        self.rng = np.random.default_rng(0)
        self.rows = []
        self.planned_with = []

    def run(self, num_steps):
        """Plan steps, run them, learn from them."""
        for _ in range(num_steps):
            batch = [SHAPES[i] for i in self.rng.choice(len(SHAPES), BATCH_SIZE, replace=False)]
            factors = self.learner.factors
            self.planned_with.append(factors)
            step_plan = schedule_step(
                run_id="run", step=self.step, plan=self.plan, batch=batch, policy="quick",
                cost=COST.with_corrections(factors.by_module()), slowness=factors.by_node(),
            )  # fmt: skip
            self.learner.prepare(self.step, step_plan, batch)
            self.rows += self.learner.observe(self.step, self.measure(step_plan, batch), self.step + 1, 1000.0)
            self.step += 1
        return self

    def measure(self, step_plan, batch):
        edges = {m.module: tuple(from_tokens for module, from_tokens, _ in self.slow_sizes if module == m.module)
                 for m in self.plan.modules}  # fmt: skip
        factors = {
            m.module: self.levels.get(m.module, 1.0)
            * np.array([1.0, *(factor for module, _, factor in self.slow_sizes if module == m.module)])
            for m in self.plan.modules
        }
        truth = bucket_seconds(self.plan, step_plan, batch, COST, edges)
        found = []
        for seat in seats(self.plan):
            spans = truth.of((seat.module, seat.stage, seat.dp_rank))
            slow, since = self.slow_ranks.get(seat.rank, (1.0, 0))
            slow = slow if self.step >= since else 1.0
            seconds = tuple(
                (k, self.exposed_s + slow * self.rng.lognormal(0, NOISE_FRAC)
                    * sum(float(s @ factors[m]) for m, s in of.items()))
                for k, of in enumerate(spans)
                if of
            )  # fmt: skip
            found.append(RankTimes(self.step, seat.rank, STEP_S, seconds, self.held_up.get(seat.rank, 1.0)))
        return found

    def rows_of(self, cls):
        return [row for row in self.rows if isinstance(row, cls)]

    def decisions(self, kind):
        return [row for row in self.rows_of(Decision) if row.kind == kind]


def factor_at(factors: Factors, module, tokens):
    found = factors.by_module()[module]
    return found.factors[int(np.searchsorted(found.edges, tokens, side="right"))]


@pytest.fixture(scope="module", params=[SPLIT, INLINE], ids=["split", "inline"])
def large_are_slow(request, tmp_path_factory):
    """Ten steps of a job whose large samples take twice as long."""
    return Job(tmp_path_factory.mktemp("job"), request.param, slow_sizes=[(LLM, 300, 2.0)]).run(10)


def test_large_samples_that_take_twice_as_long_are_planned_so_within_eight_steps(large_are_slow):
    factors = large_are_slow.planned_with[8]
    assert factor_at(factors, LLM, 800) == pytest.approx(2.0, rel=0.1)
    assert factor_at(factors, LLM, 60) == pytest.approx(1.0, rel=0.1)
    assert factor_at(factors, "vision", 100) == pytest.approx(1.0, rel=0.1)
    assert not factors.nodes


@pytest.mark.parametrize(
    "slowness", [{"slow_ranks": {6: (1.6, 0)}}, {"held_up": {6: 1.6}}], ids=["computes", "held up"]
)
def test_a_slow_rank_is_named_and_nothing_else(tmp_path, slowness):
    job = Job(tmp_path, **slowness).run(14)
    (told,) = job.decisions("slow_rank")
    assert told.verdict == "noticed"
    assert told.subject == "rank 6 (llm stage 0 replica 2 on node-1)"
    assert told.detail.startswith(told.subject + " takes 1.")
    assert told.measured == pytest.approx(1.6, rel=0.1)
    assert {(row.rank, row.host) for row in job.rows_of(RankFactor)} == {(6, "node-1")}
    assert job.rows_of(RankFactor)[-1].is_in_force
    (node,) = job.learner.factors.nodes
    assert (node.module, node.stage, node.dp_rank) == (LLM, 0, 2)
    assert node.factor == pytest.approx(1.6, rel=0.1)
    assert [f.level for f in job.learner.factors.modules] == pytest.approx([1.0, 1.0], rel=0.05)


def test_where_predictions_are_right_nothing_is_told_until_costs_change(tmp_path):
    job = Job(tmp_path).run(20)
    assert job.rows_of(Decision) == job.rows_of(RankFactor) == []
    assert job.learner.factors.by_module() == {f.module: f for f in job.planned_with[0].modules}
    job.levels = {LLM: 1.8}
    job.run(15)
    found = job.decisions("drift_cost")
    assert [(row.subject, row.verdict) for row in found] == [(LLM, "noticed")]
    assert found[0].step >= 20
    factors = job.learner.factors
    assert {f.module: f.level for f in factors.modules} == pytest.approx({"vision": 1.0, LLM: 1.8}, rel=0.04)
    assert all(f.factors == pytest.approx([f.level] * len(f.factors), rel=0.07) for f in factors.modules if f.edges)
    assert not factors.nodes
    told = job.decisions("rescale")
    assert {row.subject for row in told} == {LLM}
    assert told[-1].measured == pytest.approx(1.8, rel=0.12)


def test_batches_unlike_those_of_the_plan_are_noticed(tmp_path):
    usual = [random_batch(BATCH_SIZE, encoders=(), seed=seed) for seed in range(6)]
    found = Job(tmp_path, usual=[[*batch, SHAPES[0]] for batch in usual]).run(12).decisions("drift_shapes")
    assert found
    assert {row.verdict for row in found} == {"noticed"}


def test_sets_of_corrections_are_whole_and_a_later_run_begins_with_them(large_are_slow, tmp_path):
    job = large_are_slow
    newest = [row for row in job.rows_of(Correction) if row.module == LLM][-1]
    rows = [row for row in job.rows_of(Correction) if (row.module, row.effective_step) == (LLM, newest.effective_step)]
    assert [row.min_tokens for row in rows[1:]] == [row.max_tokens for row in rows[:-1]]
    assert (rows[0].min_tokens, rows[-1].max_tokens) == (0, 2**53)
    assert rows[-1].is_in_force
    assert rows[-1].factor == pytest.approx(2.0, rel=0.1)
    assert len({row.level for row in rows}) == 1
    assert newest.num_observations > 50
    assert newest.table_id == "table of llm"
    sets = {LLM: rows}
    at_once = Job(tmp_path, earlier=earlier_runs(sets, 14, 1000.0)).learner.factors
    assert factor_at(at_once, LLM, 800) == pytest.approx(2.0, rel=0.1)
    month_s = 28 * 86400.0
    later = earlier_runs(sets, 14, 1000.0 + month_s)[LLM]
    assert later.factors[-1] == pytest.approx(2.0**0.25, rel=0.05)
    assert later.sd[-1] > 0.4


def test_another_start_goes_on_and_another_plan_keeps_what_is_known_of_modules_alone(tmp_path):
    first = Job(tmp_path, slow_sizes=[(LLM, 300, 2.0)], slow_ranks={6: (1.6, 0)}).run(12)
    state = json.loads(json.dumps(first.learner.state()))
    again = Job(tmp_path, learned=state, first_step=12)
    assert again.learner.factors == first.learner.factors
    assert again.learner.factors.nodes
    assert json.loads(json.dumps(again.learner.state())) == state
    other = Job(tmp_path, INLINE, learned=state, plan_id="another").learner.factors
    assert not other.nodes
    assert factor_at(other, LLM, 800) == pytest.approx(2.0, rel=0.1)
    fitted_anew = {"vision": "table of vision", LLM: "another table"}
    corrected = Job(tmp_path, INLINE, learned=state, plan_id="another", table_ids=fitted_anew).learner.factors
    assert corrected.by_module()[LLM].factors == (1.0,)


def test_the_first_step_of_a_start_unknown_plans_and_a_state_that_is_none_teach_nothing(tmp_path):
    job = Job(tmp_path, levels={LLM: 3.0}, first_step=7).run(1)
    assert job.rows == []
    before = job.learner.state()
    assert job.learner.observe(8, [RankTimes(8, 0, 1.0, ((0, 5.0),))], 9, 1000.0) == []
    assert job.learner.state() == before
    for state in ({}, {"version": 0, "full": 1}, {"corrections": {LLM: 2.0}}):
        factors = Job(tmp_path, learned=state).run(1).learner.factors
        assert [found.level for found in factors.modules] == pytest.approx([1.0, 1.0], rel=0.05)


@pytest.mark.parametrize(("device", "exposed_s"), [("cuda", 0.04), ("cpu", 0.0)])
def test_exposed_messages_of_shared_weights_are_not_learned_as_computing(tmp_path, device, exposed_s):
    message_s = 0.04 / EXPOSED_FRAC
    parts = {"parameter_shards": 8, "gather_s": (message_s / 8,), "scatter_s": (message_s / 4,)}
    shared = dataclasses.replace(INLINE, modules=tuple(dataclasses.replace(m, **parts) for m in INLINE.modules))
    job = Job(tmp_path, shared, f"cluster.device={device}", exposed_s=exposed_s).run(8)
    assert [f.level for f in job.learner.factors.modules] == pytest.approx([1.0, 1.0], rel=0.05)


def test_it_can_be_taken_out_of_its_hands(tmp_path):
    job = Job(tmp_path, SPLIT, "correct.enabled=false", slow_sizes=[(LLM, 300, 2.0)], slow_ranks={6: (1.6, 0)}).run(7)
    assert job.learner.factors == Factors()
    assert job.rows == job.learner.close(7, 1000.0) == []
    assert job.learner.state() == {}


@pytest.mark.parametrize(
    "stretches",
    [
        [(1.6, 1.6, 1.6)] * NUM_STALLED, [(1, 3), (1, 1), (1, 1), (1, 4), (1, 1), (1, 1), (1, 5)],
        [(1.0, 1.09)] * NUM_STALLED, [(1, 2), (1, 2)], [(1.0, 2.0)] * NUM_STALLED + [(1.0, 1.0)] * NUM_STALLED,
    ],
    ids=["to all", "now and then", "hardly", "in few steps", "long ago"],
)  # fmt: skip
def test_what_holds_nobody_up(stretches):
    found = Stalls()
    for step, of_ranks in enumerate(stretches):
        found.observe([RankTimes(step, rank, 1.0, ((0, 0.1),), stretch) for rank, stretch in enumerate(of_ranks)])
    assert set(found.factors().values()) <= {1.0}


@pytest.mark.parametrize(
    ("stretches", "told"),
    [([(1.6, 1.5)] * 4, [0, 0, 1.5, 0]), ([(1.2, 1.3)] * 4, [0] * 4), ([(1.0, 3.0)] * 4, [0] * 4)],
    ids=["by all", "hardly", "by one rank"],
)
def test_a_busy_machine_is_told_once(stretches, told):
    found, ratios = Stalls(), []
    for step, of_ranks in enumerate(stretches):
        found.observe([RankTimes(step, rank, 1.0, ((0, 0.1),), stretch) for rank, stretch in enumerate(of_ranks)])
        ratios.append(found.newly_busy())
    assert ratios == told
