"""Simulated steps of a plan as a picture: a lane per stage, data-blind above balanced. PNG, SVG, PDF."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dflop import units
from dflop.records import Plan
from dflop.report.gantt import BACKWARD, FORWARD, MAX_LANES, UPDATE, Bar, Lane, StepPicture, gantt
from dflop.report.plots import Picture
from dflop.report.tables import POLICY_NAMES, layout_text, stage_name
from dflop.simulate.step import step_nodes

MAX_TITLE_CHARS = 105

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """When everything of one simulated step runs."""

    policy: str
    start_s: Floats
    """`[nodes, microbatches, 2]`, nodes as by `step_nodes`: forward, backward."""
    end_s: Floats

    @property
    def pipeline_s(self) -> float:
        """When the last operation ends."""
        return float(self.end_s.max(initial=0.0))

    @property
    def busy_s(self) -> Floats:
        """`[nodes]`."""
        busy: Floats = (self.end_s - self.start_s).sum(axis=(1, 2))
        return busy


def save_plan_steps(plan: Plan, steps: Sequence[SimulatedStep], source: str, path: Path) -> None:
    """Draws simulated steps of the same global batch as a file, see `plan_steps`.

    Raises:
        ConfigError: the suffix of the path is none that can be drawn.
        OSError: the file cannot be written.
    """
    picture = plan_steps(plan, steps)
    lines = [*textwrap.wrap(picture.label, MAX_TITLE_CHARS), *textwrap.wrap(f"costs {source}", MAX_TITLE_CHARS)]
    picture.save(path, "\n".join(lines))


def plan_steps(plan: Plan, steps: Sequence[SimulatedStep]) -> Picture:
    """Simulated steps of the same global batch below one another, each with the plan's `sync_s` at its end."""
    title = f"{layout_text(plan)}, {plan.num_microbatches} microbatches: one global batch, simulated"
    return gantt("plan", title, [step_picture(plan, step) for step in steps])


def step_picture(plan: Plan, step: SimulatedStep) -> StepPicture:
    """A simulated step with the lanes that are worth seeing."""
    pipeline_s, end_s = step.pipeline_s, step.pipeline_s + plan.sync_s
    gpus = np.array([plan.module(module).parallel.group_size for module, _, _ in step_nodes(plan)])
    idle = 1.0 - float(step.busy_s @ gpus + plan.sync_s * gpus.sum()) / (end_s * float(gpus.sum()))
    shown = lanes_shown(plan, step)
    sync = [Bar(UPDATE, pipeline_s, plan.sync_s)] * (plan.sync_s > 0)
    num_stages = sum(pipe.parallel.pp for pipe in plan.pipes)
    return StepPicture(
        title=f"{POLICY_NAMES.get(step.policy, step.policy)}: {units.seconds(end_s)}, {units.percent(idle)} idle over "
        "all ranks, simulated",
        lanes=tuple(Lane(name, (*_bars(step, node), *sync)) for name, node in shown),
        busy_until_s=pipeline_s,
        end_s=end_s,
        left_out=f"first {len(shown)} of {num_stages} stages" if len(shown) < num_stages else "",
    )


def lanes_shown(plan: Plan, step: SimulatedStep, most: int = MAX_LANES) -> list[tuple[str, int]]:
    """(name, node): per stage data-parallel rank 0, and the rank of its module that ends last if it is another.

    The latter are left out where all of them are more than `most`; then stages beyond that number, too.
    """
    nodes, end_s = step_nodes(plan), step.end_s.max(axis=(1, 2), initial=0.0)
    first: list[tuple[str, int]] = []
    both: list[tuple[str, int]] = []
    for pipe in plan.pipes:
        own = [i for i, (module, _, _) in enumerate(nodes) if module == pipe.module]
        last = int(np.argmax([max(end_s[i] for i in own if nodes[i][2] == r) for r in range(pipe.parallel.dp)]))
        for i in own:
            _, stage, rank = nodes[i]
            name = stage_name(plan, pipe.module, stage)
            if rank == 0:
                first.append((f"{name} dp0", i))
            if rank in (0, last):
                both.append((f"{name} dp{rank}" + " (ends last)" * (rank == last and pipe.parallel.dp > 1), i))
    return both if len(both) <= most else first[:most]


def _bars(step: SimulatedStep, node: int) -> Iterator[Bar]:
    for phase, kind in enumerate((FORWARD, BACKWARD)):
        start_s, end_s = step.start_s[node, :, phase], step.end_s[node, :, phase]
        for k in np.flatnonzero(end_s > start_s).tolist():
            yield Bar(kind, float(start_s[k]), float(end_s[k] - start_s[k]), k)
