"""Pictures of simulated steps: what runs is drawn when it runs."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba as rgba

from dflop import units
from dflop.records import Plan
from dflop.report.gantt import COLOURS, IDLE_ALPHA, MAX_LANES, UPDATE
from dflop.report.plan_picture import SimulatedStep, lanes_shown, save_plan_steps
from dflop.report.plots import BLUE, INK, ORANGE
from dflop.schedule.policies import QUICK, StepJob
from dflop.simulate.step import step_nodes
from tests.builders import make_cost, make_inline_plan, make_plan, random_batch

SYNC_S = 0.04
PLANS = {
    "split": replace(make_plan({"vision": 2, "audio": 1, "llm": 3}, llm_pp=2), sync_s=SYNC_S),
    "inline": replace(make_inline_plan(2, pp=3, modules=("vision", "audio", "llm")), sync_s=SYNC_S),
}


def pictures(plan: Plan) -> list[SimulatedStep]:
    job = StepJob(plan, random_batch(16), make_cost("vision", "audio"))
    return [SimulatedStep(p, *job.judge.spans(job.assign(p, QUICK))) for p in ("arrival", "balanced")]


def bars(axes, colour):
    """Per lane (start, end) of bars of one colour, in the axis' unit."""
    found: dict[int, list[tuple[float, float]]] = {}
    for collection in axes.collections:
        if len(collection.get_facecolor()) and np.allclose(collection.get_facecolor()[0], colour, atol=1e-3):
            for path in collection.get_paths():
                box = path.get_extents()
                found.setdefault(round((box.y0 + box.y1) / 2), []).append((box.x0, box.x1))
    return found


@pytest.mark.parametrize("layout", PLANS)
def test_all_work_of_a_lane_is_drawn_when_it_ran(layout, drawn, tmp_path) -> None:
    plan, steps = PLANS[layout], pictures(PLANS[layout])
    save_plan_steps(plan, steps, "analytic, A100-80G SXM", tmp_path / "step.png")
    (figure,) = drawn
    for axes, step in zip(figure.axes, steps, strict=True):
        check_work(plan, step, axes, 1e-3 if "(ms)" in figure.axes[-1].get_xlabel() else 1.0)


def check_work(plan: Plan, step: SimulatedStep, axes: Axes, unit_s: float) -> None:
    """Bars lie when the work ran, and lanes reach to the end of the step."""
    shown = lanes_shown(plan, step)
    forward, backward = bars(axes, rgba(BLUE)), bars(axes, rgba(ORANGE))
    idle = bars(axes, rgba(INK, IDLE_ALPHA))
    sync = bars(axes, rgba(COLOURS[UPDATE]))
    assert len(idle) == len(shown) > 0
    for y, (_, node) in enumerate(shown):
        for found, phase in ((forward, 0), (backward, 1)):
            expected = sorted(zip(step.start_s[node, :, phase], step.end_s[node, :, phase], strict=True))
            expected = [(a, b) for a, b in expected if b > a]
            assert np.array(sorted(found[y])) * unit_s == pytest.approx(np.array(expected))
        assert np.array(idle[y]) * unit_s == pytest.approx(np.array([(0.0, step.pipeline_s)]))
        behind = [(step.pipeline_s, step.pipeline_s + SYNC_S)]
        assert np.array(sync[y]) * unit_s == pytest.approx(np.array(behind))
    assert axes.get_xlim()[1] * unit_s >= step.pipeline_s + SYNC_S
    assert axes.lines[-1].get_xdata()[0] * unit_s == pytest.approx(step.pipeline_s + plan.sync_s)
    assert units.seconds(step.pipeline_s + plan.sync_s) in {t.get_text() for t in axes.texts}


@pytest.mark.parametrize("layout", PLANS)
def test_every_stage_has_a_lane_of_its_first_rank_and_of_the_one_that_ends_last(layout) -> None:
    plan, nodes = PLANS[layout], step_nodes(PLANS[layout])
    for step in pictures(plan):
        shown = lanes_shown(plan, step)
        assert {nodes[node][:2] for _, node in shown} == {node[:2] for node in nodes}
        assert {i for i, node in enumerate(nodes) if node[2] == 0} <= {node for _, node in shown}
        for module in {node[0] for node in nodes}:
            end_s = max(step.end_s[i].max() for i, node in enumerate(nodes) if node[0] == module)
            own = [(name, node) for name, node in shown if nodes[node][0] == module]
            assert max(step.end_s[node].max() for _, node in own) == end_s
            marked = {nodes[node][2] for name, node in own if name.endswith(" (ends last)")}
            assert len(marked) == (plan.module(module).parallel.dp > 1)


def test_no_more_lanes_than_can_be_read(drawn, tmp_path) -> None:
    plan = make_inline_plan(2, pp=12, modules=("vision", "audio", "llm"))
    step = pictures(plan)[0]
    assert len(lanes_shown(plan, step)) <= MAX_LANES
    few = lanes_shown(plan, step, 12)
    assert len(few) == 12
    assert {step_nodes(plan)[node][2] for _, node in few} == {0}
