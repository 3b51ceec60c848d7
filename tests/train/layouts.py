"""How parity tests train Omni: layouts by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from dflop.records import LLM, Plan
from tests.train.parity import Omni, Trial
from tests.train.synthetic import ALL, halves, limited, make_inline_plan, make_plan, make_step_plan, on_host, sharing

NUM_MICROBATCHES, NUM_STEPS = 4, 2
IMAGES, MEDIA = ("image", "video"), ("image", "video", "audio")
ENDS = ({"vision": 2, "audio": 2, LLM: 1}, {LLM: 3})
MIXED = ({"vision": 2}, {"audio": 2, LLM: 4})
ONE = ({"vision": 2, "audio": 2, LLM: 4},)
SPLIT = {"vision": (1, 1), LLM: (2, 1)}


@dataclass(frozen=True)
class Layout:
    """How Omni is trained."""

    modules: dict[str, tuple[int, ...]] | tuple[dict[str, int], ...]
    """(pp, dp[, tp]) of every module of a split plan, or layers per stage of an inline one."""
    dp: int = 1
    tp: int = 1
    cp: int = 1
    """All three of an inline plan."""
    tied: bool = False
    recompute: tuple[str, ...] = ()
    half: bool = False
    """Of the layers of each of these modules' stages the first half alone runs again."""
    limited: bool = False
    """Whether microbatches differ in how many layers of the LLM run again."""
    offloaded: bool = False
    """Whether the LLM's other layers have what they save on the host."""
    frozen: tuple[str, ...] = ()
    bad: tuple[int, ...] = ()
    sharded: int = 0
    """Replicas that share out parameters, of a module that has as many; 0: none do."""
    apart: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(pp, dp[, tp]) of encoders with ranks of their own beside a chain."""
    kinds: tuple[str, ...] = ()
    """Media; those that the modules take where it is empty."""

    @cached_property
    def plan(self) -> Plan:
        if isinstance(self.modules, dict):
            plan = make_plan(self.modules, num_microbatches=NUM_MICROBATCHES)
        else:
            num, apart = NUM_MICROBATCHES, dict(self.apart)
            plan = make_inline_plan(self.modules, dp=self.dp, tp=self.tp, num_microbatches=num, apart=apart, cp=self.cp)
        modules = (
            replace(m, recompute=True, recomputed=halves(m) if self.half else ()) if m.module in self.recompute else m
            for m in sharing(plan, self.sharded).modules
        )
        modules = (limited(m) if self.limited else m for m in modules)
        return replace(plan, modules=tuple(on_host(m) if self.offloaded else m for m in modules))

    @property
    def subject(self) -> Omni:
        has_audio = any(m.module == "audio" for m in self.plan.modules)
        # As many heads of keys as tensor-parallel ranks of the LLM can share.
        tp = self.plan.module(LLM).parallel.tp
        return Omni(self.kinds or (MEDIA if has_audio else IMAGES), self.tied, tp, NUM_STEPS)

    @property
    def trial(self) -> Trial:
        plans = (make_step_plan(self.plan, batch, step, idle=True) for step, batch in enumerate(self.subject.batches))
        return Trial(self.subject, self.plan, tuple(plans), self.frozen, self.bad)


LAYOUTS = {
    "vision + audio + llm dp2": Layout({"vision": (1, 1), "audio": (1, 1), LLM: (1, 2)}),
    "vision dp2 + llm dp2 tp2, tied": Layout({"vision": (1, 2), LLM: (1, 2, 2)}, tied=True),
    "vision tp2 + llm pp2, tied": Layout({"vision": (1, 1, 2), LLM: (2, 1)}, tied=True),
    "inline tp2": Layout(({"vision": 2, LLM: 4},), tp=2),
    "inline pp3, rows pass through": Layout(({"vision": 2}, {"audio": 2}, {LLM: 4})),
    "inline pp2 dp2, mixed stages": Layout(MIXED, dp=2),
    "vision + llm pp2, vision frozen": Layout(SPLIT, frozen=("vision",)),
    "inline pp2, mixed stage, projectors alone train": Layout(
        MIXED, recompute=(LLM,), frozen=("vision.tower", "audio.tower", LLM)
    ),
    "inline pp2 dp2, sharded, tied ends, a tower frozen": Layout(
        ENDS, dp=2, tied=True, sharded=ALL, frozen=("audio.tower",)
    ),
    "inline dp2, sharded, half recomputed, half on the host": Layout(
        ONE, dp=2, sharded=ALL, recompute=("vision", LLM), half=True, offloaded=True
    ),
    "inline tp2 dp2, sharded": Layout(({"vision": 2, LLM: 4},), tp=2, dp=2, sharded=ALL),
    "vision with llm dp2, audio apart": Layout(({"vision": 2, LLM: 4},), dp=2, apart=(("audio", (1, 1)),)),
    "inline dp4, sharded in twos": Layout(ONE, dp=4, sharded=2, tied=True),
    "vision dp2 + llm pp2, sharded, recomputed": Layout({"vision": (1, 2), LLM: (2, 1)}, sharded=ALL, recompute=(LLM,)),
    "inline tp2 dp2, sharded, limited": Layout(({"vision": 2, LLM: 4},), tp=2, dp=2, sharded=ALL, limited=True),
    "inline pp2, mixed stage, limited": Layout(MIXED, recompute=("vision",), limited=True),
}
OTHERS = {
    "inline dp2, sharded, limited": Layout(ONE, dp=2, sharded=ALL, limited=True),
    "inline dp4, sharded in twos, limited": Layout(ONE, dp=4, sharded=2, limited=True),
    "inline pp2 dp2, sharded, tied ends, limited": Layout(ENDS, dp=2, sharded=ALL, tied=True, limited=True),
    "vision + llm pp2, llm frozen, limited": Layout(SPLIT, frozen=(LLM,), limited=True),
    "inline tp2, limited": Layout(({"vision": 2, LLM: 4},), tp=2, limited=True),
    "vision + llm": Layout({"vision": (1, 1), LLM: (1, 1)}),
    "vision dp2 + llm pp2": Layout({"vision": (1, 2), LLM: (2, 1)}),
    "vision + llm dp2": Layout({"vision": (1, 1), LLM: (1, 2)}),
    "vision dp3 + llm": Layout({"vision": (1, 3), LLM: (1, 1)}),
    "vision + llm pp3": Layout({"vision": (1, 1), LLM: (3, 1)}),
    "vision tp2 + llm dp2": Layout({"vision": (1, 1, 2), LLM: (1, 2)}),
    "vision + audio + llm pp2, tied": Layout(
        {"vision": (1, 1), "audio": (1, 1), LLM: (2, 1)}, tied=True, kinds=("image", "audio")
    ),
    "inline dp2": Layout(ONE, dp=2),
    "inline cp3": Layout(ONE, cp=3),
    "inline pp2, mixed stage": Layout(MIXED),
    "inline pp2 dp2, tied": Layout(ENDS, dp=2, tied=True),
    "inline pp2, mixed stage, recomputed": Layout(MIXED, recompute=("vision", "audio", LLM)),
    "inline pp2, mixed stage, half recomputed": Layout(MIXED, recompute=("vision", "audio", LLM), half=True),
    "vision + llm pp2, llm frozen and recomputed": Layout(SPLIT, recompute=(LLM,), frozen=(LLM,)),
    "inline pp2, mixed stage, encoders frozen": Layout(MIXED, recompute=(LLM,), frozen=("vision", "audio")),
    "inline pp2, mixed stage, llm and audio frozen": Layout(MIXED, recompute=("vision",), frozen=("audio", LLM)),
    "vision + llm pp2, tower frozen and recomputed": Layout(SPLIT, recompute=("vision",), frozen=("vision.tower",)),
    "vision dp4 + llm tp2 dp2, sharded, tied": Layout({"vision": (1, 4), LLM: (1, 2, 2)}, sharded=2, tied=True),
    "inline pp2 tp2 dp2, sharded, tied ends": Layout(ENDS, dp=2, tp=2, sharded=ALL, tied=True, kinds=IMAGES),
    "inline tp2 dp4, sharded in twos": Layout(({"vision": 2, LLM: 4},), tp=2, dp=4, sharded=2),
    "inline pp2 dp4, sharded in twos, mixed stages": Layout(MIXED, dp=4, sharded=2),
    "inline tp2, on the host": Layout(({"vision": 2, LLM: 4},), tp=2, offloaded=True),
    "vision + llm pp2, on the host": Layout({"vision": (1, 1), LLM: (2, 1)}, offloaded=True),
    "inline pp2, mixed stage, llm frozen and on the host": Layout(MIXED, frozen=(LLM,), offloaded=True),
    "vision with llm pp2 dp2, sharded, audio dp2 apart": Layout(
        ({"vision": 2, LLM: 1}, {LLM: 3}), dp=2, sharded=ALL, apart=(("audio", (1, 2)),), recompute=(LLM,)
    ),
    "audio with llm tp2, vision dp2 apart and frozen": Layout(
        ({"audio": 2, LLM: 4},), tp=2, apart=(("vision", (1, 2)),), frozen=("vision",)
    ),
    "inline dp4, sharded": Layout(ONE, dp=4, sharded=ALL),
    "inline dp2, sharded, vision frozen": Layout(ONE, dp=2, sharded=ALL, frozen=("vision",)),
    "inline dp2, sharded, llm frozen": Layout(ONE, dp=2, sharded=ALL, frozen=(LLM,)),
    "inline pp2 dp2, sharded, projectors alone train": Layout(
        MIXED, dp=2, sharded=ALL, frozen=("vision.tower", "audio.tower", LLM)
    ),
    "inline pp2 dp2, sharded, mixed stages": Layout(MIXED, dp=2, sharded=ALL),
    "vision dp2 + llm dp2, sharded, llm frozen and recomputed": Layout(
        {"vision": (1, 2), LLM: (1, 2)}, sharded=ALL, recompute=(LLM,), frozen=(LLM,)
    ),
    "vision dp2 + llm dp2, sharded": Layout({"vision": (1, 2), LLM: (1, 2)}, sharded=ALL),
}
"""Of a lane."""
