"""Where a plan is tried: a model, data, machines, a seed. The same places serve several claims, each simulated once."""

from __future__ import annotations

from dataclasses import dataclass

from dflop.jobs.suite.cases import (
    AUDIO_CASES,
    CASES,
    GLOBAL_BATCH_SIZE,
    NUM_NODES,
    NUM_UNSEEN,
    Case,
    Setting,
    make_setting,
)
from dflop.jobs.suite.mixtures import AUDIO, HEAVY, MAIN
from dflop.plan.space import SearchSpace

ALL_CASES = {case.model: case for case in (*CASES, *AUDIO_CASES)}
MIXTURES = {mixture.name: mixture for mixture in (MAIN, HEAVY, AUDIO)}
SIGLIP_7B, LLAMA_8B, SIGLIP_32B, SIGLIP_72B, INTERNVIT_72B = (case.model for case in CASES)
AUDIO_MODELS = tuple(case.model for case in AUDIO_CASES)
LARGE_NODES, NUM_LARGE_UNSEEN = 16, 4
"""From so many nodes on, with global batches that are larger than elsewhere, fewer of them."""


@dataclass(frozen=True, slots=True, order=True)
class Where:
    """A setting by name: small enough for a key, and to travel between processes."""

    model: str
    mixture: str
    seed: int
    num_nodes: int = NUM_NODES
    global_batch_size: int = GLOBAL_BATCH_SIZE
    encoder_factor: float = 1.0
    microbatches: tuple[int, ...] = ()
    """Numbers of microbatches that plans may choose from; empty: all. Tests take few."""

    @property
    def case(self) -> Case:
        return ALL_CASES[self.model]

    @property
    def name(self) -> str:
        """For people."""
        parts = [f"{self.case.name}, {self.mixture}", f"{self.num_nodes} nodes, batch {self.global_batch_size}"]
        if self.encoder_factor != 1.0:
            parts.append(f"encoder x {self.encoder_factor:g}")
        return ", ".join([*parts, f"seed {self.seed}"])

    def setting(self) -> Setting:
        """With batches of its seed."""
        is_large = self.num_nodes >= LARGE_NODES and self.global_batch_size > GLOBAL_BATCH_SIZE
        return make_setting(
            self.case,
            MIXTURES[self.mixture],
            num_nodes=self.num_nodes,
            global_batch_size=self.global_batch_size,
            num_unseen=NUM_LARGE_UNSEEN if is_large else NUM_UNSEEN,
            encoder_factor=self.encoder_factor,
            space=SearchSpace(microbatches=self.microbatches),
            draw=self.seed,
        )
