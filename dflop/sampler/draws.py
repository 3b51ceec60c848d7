"""One iteration over a sampler: microbatches in order, how many of them the loop has, and its state for a loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from dflop.sampler.rank_plans import BatchPlan, refused


@dataclass(slots=True)
class Progress:
    """How far an iteration is: what was drawn from it, and what of that the loop has.

    A loader with workers draws ahead of the loop: as many batches as its workers hold before it hands out the first,
    and from then on it asks once per batch handed out, at the end of the epoch in vain. So the number of times that it
    asked tells how many the loop has.
    """

    begun: int
    """The step whose microbatches are being drawn."""
    end: int
    """The step after the last."""
    num_prefetched: int
    """Batches that a loader draws before it hands out the first."""
    num_left: int = 0
    """Microbatches of the step that were not drawn."""
    num_drawn: int = 0
    num_asked: int = 0
    step_ends: list[int] = field(default_factory=list)
    """Per step begun: microbatches drawn once it is complete."""

    @property
    def num_handed_out(self) -> int:
        """Microbatches that the loop has."""
        return min(self.num_drawn, max(0, self.num_asked - self.num_prefetched))

    @property
    def is_over(self) -> bool:
        """Whether the loop has all there is."""
        return self.begun >= self.end - 1 and not self.num_left and self.num_handed_out == self.num_drawn

    @property
    def step(self) -> int:
        """First step of which the loop does not have all microbatches."""
        return self.begun + 1 - sum(self.num_handed_out < end for end in self.step_ends)


@dataclass(frozen=True, slots=True)
class Start:
    """Where an iteration begins, as known when its first microbatch is drawn."""

    rank: int
    step: int
    end: int
    """The step after the last."""
    plans: Callable[[int, int], Iterator[BatchPlan]]
    """Plans of the steps from one to another."""
    num_skipped: int = 0
    """Microbatches that are drawn and thrown away before the first, by a trainer that skips what was trained."""


class Draws(Iterator[list[int]]):
    """Microbatches of one rank to the end of the epoch.

    Args:
        begin: Called when the first microbatch is drawn: trainers make iterators before they set the epoch.
        follow: Is given what will tell how far this iteration is.
        num_prefetched: Batches that the loader draws before it hands out the first.
    """

    def __init__(self, begin: Callable[[], Start], follow: Callable[[Progress], None], num_prefetched: int) -> None:
        self._begin, self._follow, self._num_prefetched = begin, follow, num_prefetched
        self._start: Start | None = None
        self._left: list[list[int]] = []
        self._num_in_step = self._num_skipped = 0

    def __next__(self) -> list[int]:
        start = self._begun()
        if self._num_skipped < start.num_skipped:
            self._num_skipped += 1
            return []
        self._progress.num_asked += 1
        if not self._left:
            self._next_step()
        self._progress.num_drawn += 1
        self._progress.num_left -= 1
        return self._left.pop(0)

    def _begun(self) -> Start:
        """Where this iteration began; it begins now if it did not."""
        if self._start is None:
            start = self._begin()
            self._goto(start, start.step)
            return start
        return self._start

    def _goto(self, start: Start, step: int) -> None:
        """Stand before the first microbatch of a step."""
        self._start, self._left = start, []
        self._plans = start.plans(step, start.end)
        self._progress = Progress(step - 1, start.end, self._num_prefetched)
        self._follow(self._progress)

    def _next_step(self) -> None:
        assert self._start is not None
        plan = next(self._plans)
        self._left = plan.rank(self._start.rank)
        self._num_in_step = len(self._left)
        self._progress.begun, self._progress.num_left = plan.step, len(self._left)
        self._progress.step_ends.append(self._progress.num_drawn + len(self._left))

    def state_dict(self) -> dict[str, int]:
        """Where the next draw will be, for loaders that keep it with every batch, as torchdata's do."""
        end = self._begun().end
        if not self._left:
            return {"step": self._progress.begun + 1, "end": end, "microbatch": 0, "num_microbatches": 0}
        begun = self._num_in_step - len(self._left)
        return {"step": self._progress.begun, "end": end, "microbatch": begun, "num_microbatches": self._num_in_step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where the state was taken.

        Raises:
            ConfigError: it is of another epoch, or within a step that has another number of microbatches now.
        """
        start = self._begin()
        if not start.step <= state["step"] <= start.end:
            raise refused(
                f"the state is of step {state['step']}, this iteration is of steps {start.step} to {start.end - 1}",
                "load the state into the sampler first",
            )
        # An epoch that was over has nothing left.
        self._goto(dataclasses.replace(start, end=state["end"]), state["step"])
        if skip := state["microbatch"]:
            self._next_step()
            if state["num_microbatches"] != self._num_in_step:
                raise refused(
                    f"the state is within a step of {state['num_microbatches']} microbatches per rank, which now has "
                    f"{self._num_in_step}",
                    "resume from the end of a step: with other ranks or microbatches only that is exact",
                )
            self._left = self._left[skip:]
            self._progress.num_left, self._progress.step_ends = len(self._left), [len(self._left)]
