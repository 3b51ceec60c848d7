"""Whether a run that trains on a few samples again and again learns them: a trust check of a configuration.

What learns nothing on eight samples learns nothing on millions: a learning rate of another model, labels that are all
masked, weights that were not loaded, modules frozen by mistake.
"""

from __future__ import annotations

from dflop.errors import TrainError
from dflop.report.summary import RunSummary
from dflop.run.directory import RunDir
from dflop.views.run_results import load_summary


def overfit_overrides(name: str, num_samples: int) -> tuple[str, ...]:
    """What makes of a configuration, whose name this is, one that overfits so many samples under the same plan."""
    return (
        f"name={name}-overfit", f"train.overfit_samples={num_samples}", "validation.num_samples=0",
        "validation.sources=[]", "compare.num_batches=0",
    )  # fmt: skip


def check_overfit(run: RunDir) -> str:
    """What became of the loss, in a sentence.

    Raises:
        TrainError: it did not fall.
    """
    return verdict(load_summary(run), run.config().train.overfit_samples, str(run.config_file))


def verdict(summary: RunSummary, num_samples: int, where: str) -> str:
    """The same of a summary, with the configuration's place for errors.

    Raises:
        TrainError: the loss did not fall, or there is none.
    """
    first, last = summary.ends_of_loss or (0.0, 0.0)
    found = f"loss {first:.4f} to {last:.4f} in {len(summary.steps)} steps on {num_samples} samples"
    if not last < first:
        raise TrainError(
            f"overfit: {found}, it does not fall", where=where,
            hint="look at train.learning_rate, train.num_steps, model.weights and model.frozen, then the chat template",
        )  # fmt: skip
    return f"overfit: {found}, it falls"
