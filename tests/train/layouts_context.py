"""How parity tests train Omni where context-parallel ranks share samples: layouts by name, and samples to cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dflop.records import LLM, Plan, SampleShape
from tests.train.layouts import ENDS, IMAGES, MEDIA, MIXED, NUM_MICROBATCHES, ONE, Layout
from tests.train.parity import Omni, Trial
from tests.train.synthetic import ALL, assign

GROWTH = 0.01


@dataclass(frozen=True)
class Giants(Omni):
    """Every batch begins with a sample of two tokens, after it the first with media has 200 more at its end."""

    @cached_property
    def batches(self) -> list[list[SampleShape]]:
        found = []
        for batch in Omni.batches.func(self):
            short, *others = sorted(batch, key=lambda shape: bool(shape.items))
            giant = others.pop(next(n for n, shape in enumerate(others) if shape.items))
            num_tokens = giant.num_llm_tokens + 200
            found.append([
                replace(short, num_text_tokens=2, num_llm_tokens=2, num_supervised_tokens=1),
                replace(giant, num_text_tokens=giant.num_text_tokens + 200, num_llm_tokens=num_tokens),
                *others,
            ])  # fmt: skip
        return found


@dataclass(frozen=True)
class Shared(Layout):
    """A layout whose context-parallel ranks cut giants."""

    growth: float = GROWTH

    @cached_property
    def plan(self) -> Plan:
        plan = Layout.plan.func(self)
        return replace(plan, modules=tuple(replace(m, cost_growth=self.growth) for m in plan.modules))

    @property
    def subject(self) -> Giants:
        kinds = MEDIA if any(m.module == "audio" for m in self.plan.modules) else IMAGES
        return Giants(self.kinds or kinds, self.tied, self.tp)

    @property
    def trial(self) -> Trial:
        """Of the last microbatch the first step has two tokens, the others nothing."""
        plans = []
        for step, batch in enumerate(self.subject.batches):
            rng, last = np.random.default_rng([3, step]), NUM_MICROBATCHES - 1
            slots = [last if step == 0 else 0, 1, *rng.integers(0, last, len(batch) - 2).tolist()]
            replica = lambda dp, rng=rng: int(rng.integers(dp))  # noqa: E731  # bound to its step
            plans.append(assign(self.plan, batch, step, slots=slots, replica=replica, shuffled=rng.permutation))
        return Trial(self.subject, self.plan, tuple(plans), self.frozen, self.bad)


VISION = ({"vision": 2, LLM: 4},)
HEART = {
    "cp2": Shared(ONE, cp=2),
    "cp4, half recomputed, half on the host": Shared(ONE, cp=4, recompute=("vision", LLM), half=True, offloaded=True),
    "pp2 dp2 cp2, mixed stages, sharded in twos, projectors alone train": Shared(
        MIXED, dp=2, cp=2, sharded=2, recompute=(LLM,), frozen=("vision.tower", "audio.tower", LLM)
    ),
    "dp2 cp2, sharded in twos, limited": Shared(ONE, dp=2, cp=2, sharded=2, limited=True),
    "tp2 cp2, recomputed": Shared(VISION, tp=2, cp=2, recompute=(LLM,)),
    "pp2 cp2, tied ends, rows from the stage before": Shared(ENDS, cp=2, tied=True, bad=(1, 4)),
}
GRID = {
    f"cp{cp} tp{tp} pp{len(stages)} dp{dp}, sharded {sharded}{', recomputed' * recompute}": Shared(
        stages, dp=dp, tp=tp, cp=cp, sharded=sharded, recompute=(LLM,) * recompute, kinds=IMAGES,
        offloaded=recompute and tp > 1 and cp > 2, half=recompute and cp > 2,
    )
    for cp, tp, stages, (dp, sharded), recompute in itertools.product(
        (1, 2, 4), (1, 2), (VISION, ({"vision": 2, LLM: 2}, {LLM: 2})), ((1, 0), (1, ALL), (2, 2)), (False, True)
    )
    if cp * tp * len(stages) * dp <= 8 and cp * dp > 1
}  # fmt: skip
OTHERS = {
    "cp4, sharded, half recomputed, half on the host": Shared(
        ONE, cp=4, sharded=ALL, recompute=("vision", LLM), half=True, offloaded=True
    ),
    "cp4, cut evenly": Shared(ONE, cp=4, growth=0.0),
    "cp3 pp2, frozen llm": Shared(MIXED, cp=3, frozen=(LLM,)),
    "cp2, encoders frozen": Shared(ONE, cp=2, frozen=("vision", "audio")),
    "pp3 cp2, rows pass through": Shared(({"vision": 2}, {"audio": 2}, {LLM: 4}), cp=2, sharded=ALL),
    "cp2 dp2, sharded, llm frozen": Shared(ONE, cp=2, dp=2, sharded=ALL, frozen=(LLM,)),
}
