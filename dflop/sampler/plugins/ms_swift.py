"""ms-swift with balanced batches: `swift sft ... --external_plugins balanced.py`, a file that imports this one.

Its trainers are looked up by name in a table that plug-ins may write to; `DFLOP_COSTS` names a file of saved costs.
"""

from __future__ import annotations

import os
from typing import Any

from swift.trainers import Seq2SeqTrainer
from swift.trainers.trainer_factory import TrainerFactory

from dflop.sampler.hf import BalancedTrainerMixin


class BalancedSeq2SeqTrainer(BalancedTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]  # ms-swift is not installed
    """What `swift sft` and `swift pt` train with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, costs=os.environ.get("DFLOP_COSTS"), **kwargs)


TrainerFactory.TRAINER_MAPPING["causal_lm"] = "dflop.sampler.plugins.ms_swift.BalancedSeq2SeqTrainer"
