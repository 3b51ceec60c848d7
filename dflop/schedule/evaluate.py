"""Seconds of one step of one global batch on one plan, for any assignment: the judge of every candidate.

Loads of all buckets are added up at once, the cost model turns them into seconds once per kind of stage (stages with
the same layers cost the same), and the compiled simulator says when the last stage is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from dflop.cost.model import CostModel, Floats, StageKind, stage_kind
from dflop.records import LLM, ModulePlan, Plan
from dflop.schedule.assignment import Assignment
from dflop.schedule.items import Ints, ModuleItems, StageMix, stage_mix, stage_slowness
from dflop.schedule.piece_loads import PieceLoads, piece_loads, tile_loads
from dflop.simulate.kernel import Bools, StepShape, StepWork, run_step, step_shape
from dflop.simulate.step import Node, meeting_ranks, on_shared_cores, slowest, step_nodes, together


class StepEvaluator:
    """One global batch on one plan.

    Args:
        plan: Lists the LLM last.
        items: Of every module of the plan.
        cost: Extrapolating.
        max_concurrency: Processes that can compute at once; None: all of them.
        slowness: What multiplies the seconds of the nodes of `step_nodes`; 1.0 where absent.
    """

    def __init__(
        self,
        plan: Plan,
        items: Mapping[str, ModuleItems],
        cost: CostModel,
        max_concurrency: int | None = None,
        slowness: Mapping[Node, float] | None = None,
    ) -> None:
        self.plan, self.items, self.cost = plan, items, cost
        self.slowness = {pipe.module: stage_slowness(pipe, slowness) for pipe in plan.pipes}
        self._mixes: dict[tuple[str, StageKind], StageMix | None] = {}
        self.shape: StepShape = step_shape(plan)
        contended = max_concurrency is not None and max_concurrency < plan.num_processes
        self.max_concurrency = max_concurrency if contended else None
        self._p2p = _latency_and_rate(cost)
        self._judged: dict[bytes, tuple[float, StepWork]] = {}

    def loads(self, assignment: Assignment) -> dict[str, Floats]:
        """Per module `[3, microbatches, dp]`: items, tokens, sum of squared tokens."""
        found: dict[str, Floats] = {}
        for m in self.plan.modules:
            items, dp = self.items[m.module], m.parallel.dp
            cell, num_cells = assignment.cells(items, dp), self.plan.num_microbatches * dp
            rows = [np.bincount(cell, part, num_cells) for part in items.loads]
            found[m.module] = np.array(rows, dtype=np.float64).reshape(3, self.plan.num_microbatches, dp)
        return found

    def work(self, assignment: Assignment) -> StepWork:
        """What the simulator needs."""
        loads, shape = self.loads(assignment), self.shape
        seconds = np.zeros((2, shape.num_nodes, shape.num_microbatches))
        delays = np.zeros_like(seconds)
        is_active = np.zeros((shape.num_nodes, shape.num_microbatches), dtype=np.bool_)
        for p, pipe in enumerate(self.plan.pipes):
            parts = self.plan.grid_of(pipe.module)
            active = loads[pipe.module][1].T > 0
            travel = self._delays(assignment, pipe, loads[pipe.module][1].T)
            of_parts = [(part, self.part_seconds(part, loads[part.module], assignment)) for part in parts]
            for stage in range(pipe.parallel.pp):
                first = shape.pipe_start[p] + stage * pipe.parallel.dp
                nodes = slice(first, first + pipe.parallel.dp)
                is_active[nodes] = active
                delays[0, nodes], delays[1, nodes] = travel[:, 0 if stage else 1]
                if stage == pipe.parallel.pp - 1:
                    delays[0, nodes] = travel[0, 2]
                taken = np.zeros((2, shape.num_microbatches, pipe.parallel.dp))
                for part, of_stages in of_parts:
                    alone = of_stages[stage] * self.slowness[pipe.module][stage]
                    for phase, of_phase in enumerate(together(self.plan, part.module, stage, *alone)):
                        taken[phase] += of_phase
                seconds[:, nodes] = slowest(taken, meeting_ranks(self.plan, pipe.module)).swapaxes(1, 2)
        samples = {m.module: self.items[m.module].sample_of for m in self.plan.encoders}
        feeds = feeding(self.plan, shape, assignment, samples)
        return StepWork(is_active, seconds[0], seconds[1], delays[0], delays[1], feeds)

    def part_seconds(self, part: ModulePlan, load: Floats, assignment: Assignment) -> list[Floats]:
        """Per stage of a module `[2, microbatches, dp]` seconds of forward and backward on nodes that are not slow."""
        kinds = [stage_kind(part, stage) for stage in range(part.parallel.pp)]
        by_size = self.cost.is_by_size(part.module)
        pieces = self._pieces(part, load, assignment) if part.parallel.cp > 1 else None
        known: dict[StageKind, Floats] = {}
        alike: dict[Hashable, dict[StageKind, int]] = {}  # a stage of each kind, by what all of an array call share
        for stage, kind in enumerate(kinds):
            shared = kind.edge, kind.mode, kind.num_layers > 0, bool(kind.limits)
            alike.setdefault(kind if by_size else shared, {}).setdefault(kind, stage)
        for stages in alike.values():
            num_rerun = np.array([part.num_rerun(stage, load[1]) for stage in stages.values()])
            of_kinds = self._seconds(part, list(stages), load, num_rerun, pieces, assignment)
            known |= zip(stages, np.stack(of_kinds, axis=1), strict=True)
        return [known[kind] for kind in kinds]

    def step_s(self, assignment: Assignment) -> float:
        """Simulated seconds of forward and backward; `Plan.sync_s` comes on top."""
        return self._judge(assignment)[0]

    def _judge(self, assignment: Assignment) -> tuple[float, StepWork]:
        """(simulated seconds, what was simulated); remembered: candidates repeat."""
        key = b"".join(of.tobytes() for of in (assignment.slot, assignment.rank, *assignment.item_rank.values()))
        if key not in self._judged:
            work = self.work(assignment)
            self._judged[key] = float(self._run(work)[1].max(initial=0.0)), work
        return self._judged[key]

    def spans(self, assignment: Assignment) -> tuple[Floats, Floats]:
        """(start_s, end_s) of all work, each `[nodes, microbatches, 2]`: forward, backward. Nothing to do takes 0 s."""
        return self._run(self.work(assignment))

    def _run(self, work: StepWork) -> tuple[Floats, Floats]:
        found = run_step(self.shape, work)
        if self.max_concurrency is None:
            return found
        tps = np.array([self.plan.module(module).parallel.group_size for module, _, _ in step_nodes(self.plan)])
        return on_shared_cores(*found, tps[:, np.newaxis, np.newaxis], self.max_concurrency)

    def noisy_step_s(self, assignment: Assignment, sigma_frac: float, num_draws: int) -> float:
        """Mean simulated seconds when every stage's microbatch takes lognormally more or less than predicted.

        Args:
            assignment: What runs.
            sigma_frac: Standard deviation of the logarithm.
            num_draws: At least 1; the draws are the same for every assignment of the same shape.
        """
        (_, work), rng = self._judge(assignment), np.random.default_rng(0)
        total_s = 0.0
        for _ in range(num_draws):
            factor = np.exp(rng.normal(0.0, sigma_frac, work.forward_s.shape))
            noisy = dataclasses.replace(work, forward_s=work.forward_s * factor, backward_s=work.backward_s * factor)
            total_s += float(self._run(noisy)[1].max(initial=0.0))
        return total_s / num_draws

    def _seconds(
        self,
        part: ModulePlan,
        kinds: Sequence[StageKind],
        load: Floats,
        num_rerun: Ints,
        pieces: PieceLoads | None,
        assignment: Assignment,
    ) -> tuple[Floats, Floats]:
        """`[kinds, microbatches, dp]` each: under limits `num_rerun` layers are recomputed; several kinds are alike."""
        kind = kinds[0]
        if not kind.num_layers:
            return np.zeros((len(kinds), *load.shape[1:])), np.zeros((len(kinds), *load.shape[1:]))
        key, items = (part.module, kind), self.items[part.module]
        if key not in self._mixes:
            self._mixes[key] = stage_mix(part, kind, items, self.cost)
        mix, factor, shape = self._mixes[key], None, load.shape[1:]
        if mix:
            factor = mix.factors(assignment.cells(items, part.parallel.dp), load[0].size).reshape(shape)
        num_layers: Any = np.array([kind.num_layers for kind in kinds]).reshape(-1, 1, 1)
        if pieces is None:
            costs = kind._replace(num_layers=num_layers).costs(num_rerun)
            return self.cost.module_seconds(part.module, load, **costs, factor=factor)
        # All ranks of a group wait for who has most.
        loads, received = pieces
        exchanges_s = self.cost.exchange_seconds(
            part.module, received.reshape(shape), loads[1].max(axis=-1).reshape(shape),
            kind._replace(num_layers=num_layers).costs(num_rerun)["mode"], num_layers=num_layers,
        )  # fmt: skip
        seconds = self.cost.module_seconds(
            part.module, loads.reshape(3, *shape, kind.mode.cp),
            **kind.of_one_rank()._replace(num_layers=num_layers[..., np.newaxis]).costs(np.expand_dims(num_rerun, -1)),
            factor=None if factor is None else factor[..., np.newaxis],
        )  # fmt: skip
        forward_s, backward_s = (of.max(axis=-1) + more for of, more in zip(seconds, exchanges_s, strict=True))
        return forward_s, backward_s

    def _pieces(self, part: ModulePlan, load: Floats, assignment: Assignment) -> PieceLoads:
        """What ranks that share samples have of each microbatch."""
        items, cp = self.items[part.module], part.parallel.cp
        cell, num_cells = assignment.cells(items, part.parallel.dp), load[0].size
        if part.module == LLM:
            return piece_loads(items, cell, num_cells, cp, part.cost_growth, part.max_tokens)
        return tile_loads(items, cell, num_cells, cp, part.cost_growth, part.max_tokens, part.merge_tokens)

    def _delays(self, assignment: Assignment, pipe: ModulePlan, tokens: Floats) -> Floats:
        """`[2, 3, dp, microbatches]`: (forward, backward) x (between stages, into the first stage, out of the last).

        Between stages travel hidden states of all tokens; across the edge between encoder and LLM only the rows that
        items become, which are counted where they are made and where they go. Gradients go the other way.
        """
        latency_s, s_per_byte = self._p2p
        hidden_bytes = self.cost.hidden_bytes(pipe.module, pipe.parallel.tp) / pipe.parallel.cp
        inside = _travel_s(latency_s, s_per_byte, tokens * hidden_bytes)
        found = np.zeros((2, 3, *tokens.shape))
        found[0, :2], found[1, 0] = inside, inside
        if not self.plan.apart:
            return found
        rows = self._rows(assignment, pipe)
        crossing = _travel_s(latency_s, s_per_byte, rows.T * self.cost.hidden_bytes(LLM))
        if pipe.module == LLM:
            found[1, 1] = crossing
        else:
            found[0, 2] = crossing
        return found

    def _rows(self, assignment: Assignment, pipe: ModulePlan) -> Floats:
        """`[microbatches, dp]` rows that a pipe's ranks exchange with the other side of the edge."""
        num_slots, dp = self.plan.num_microbatches, pipe.parallel.dp
        total = np.zeros(num_slots * dp)
        for encoder in self.plan.apart if pipe.module == LLM else (pipe,):
            items = self.items[encoder.module]
            slot, rank = assignment.places(items)
            if pipe.module == LLM:
                rank = assignment.rank[items.sample_of]
            total += np.bincount(slot * dp + rank, np.array(items.rows, dtype=float), num_slots * dp)
        return total.reshape(num_slots, dp)


def feeding(plan: Plan, shape: StepShape, assignment: Assignment, sample_of: Mapping[str, Ints]) -> Bools:
    """`StepWork.feeds` of an assignment, from the sample of every item per encoder."""
    feeds = np.zeros(int(shape.link_start[-1]), dtype=np.bool_)
    num_ranks = plan.module(LLM).parallel.dp
    for p, encoder in enumerate(plan.apart):
        sample = sample_of[encoder.module]
        slot, rank = assignment.slot[sample], assignment.item_rank[encoder.module]
        feeds[shape.link_start[p] + (slot * encoder.parallel.dp + rank) * num_ranks + assignment.rank[sample]] = True
    return feeds


def _latency_and_rate(cost: CostModel) -> tuple[float, float]:
    """(seconds, seconds per byte) of a message between stages, between nodes where such links are known."""
    small_s, large_s = cost.p2p_seconds(1.0, 2), cost.p2p_seconds(1e6, 2)
    rate = (large_s - small_s) / (1e6 - 1.0)
    return max(small_s - rate, 0.0), rate


def _travel_s(latency_s: float, s_per_byte: float, num_bytes: Floats) -> Floats:
    return np.where(num_bytes > 0, latency_s + s_per_byte * num_bytes, 0.0)


def bucket_tokens(items: ModuleItems, assignment: Assignment, num_slots: int, dp: int) -> Ints:
    """`[microbatches, dp]` tokens of a module."""
    total = np.bincount(assignment.cells(items, dp), items.num_tokens, num_slots * dp)
    return total.astype(np.int64).reshape(num_slots, dp)
