"""What fuzzing found, in a sentence of a page."""

from typing import Any


def tables(content: dict[str, Any]) -> dict[str, str]:
    """Text by name, from the JSON that `python -m tests.fuzz --json FILE` writes."""
    of = content["targets"]
    num_examples, elapsed_s = (sum(target[key] for target in of) for key in ("num_examples", "elapsed_s"))
    crashes = ", ".join(f"`{target['target']}` {len(target['crashes'])}" for target in of if target["crashes"])
    text = (
        f"{len(of)} targets, {num_examples:,} examples in {elapsed_s / 60:.0f} minutes. Crashes: {crashes or 'none'}."
    )
    return {"fuzz": text}
