"""LLaMA-Factory with balanced batches: `torchrun ... -m dflop.sampler.plugins.llama_factory train.yaml [--costs FILE]`.

In place of `llamafactory-cli train train.yaml`. It has hooks for callbacks and none for the trainer, so the class that
a stage makes its trainer of is replaced where the stage looks it up, before LLaMA-Factory's own `run_exp`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from typing import Any

from dflop.sampler.hf import BalancedTrainerMixin

TRAINERS = {
    "llamafactory.train.sft.workflow": "CustomSeq2SeqTrainer",
    "llamafactory.train.pt.workflow": "CustomTrainer",
}


def install(**given: Any) -> None:
    """From now on stages `sft` and `pt` balance.

    Args:
        given: For `BalancedTrainerMixin`, e.g. `costs="costs.npz"`.
    """
    for module, name in TRAINERS.items():
        workflow = importlib.import_module(module)
        balanced = type(name, (BalancedTrainerMixin, getattr(workflow, name)), {})
        setattr(workflow, name, functools.partial(balanced, **given))


def main() -> None:
    """Trains as LLaMA-Factory does with the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", help="file that SampleCosts.save wrote; without one the lengths of the samples")
    options, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    install(costs=options.costs)
    importlib.import_module("llamafactory.train.tuner").run_exp()


if __name__ == "__main__":
    main()
