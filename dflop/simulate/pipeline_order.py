"""The 1F1B order of one stage as data: the simulator times this object and the engine runs it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal["F", "B"]


class Action(NamedTuple):
    """Forward (`F`) or backward (`B`) of one microbatch."""

    phase: Phase
    microbatch: int


def one_f_one_b(num_microbatches: int, num_stages_after: int) -> tuple[Action, ...]:
    """Actions of a stage with `num_stages_after` stages between it and the loss.

    Warm-up runs `min(num_microbatches, num_stages_after)` forwards, the steady state alternates one forward and one
    backward, and the rest are backwards. At most `min(num_microbatches, num_stages_after + 1)` microbatches are in
    flight, which is what bounds activation memory.
    """
    warm = min(num_microbatches, num_stages_after)
    actions = [Action("F", k) for k in range(warm)]
    for k in range(warm, num_microbatches):
        actions += [Action("F", k), Action("B", k - warm)]
    actions += [Action("B", k) for k in range(num_microbatches - warm, num_microbatches)]
    return tuple(actions)
