"""The paper's claims, one by one: `python -m tests.bench.claims [--full] [--part NAME ...] [--seeds N] [--json FILE]`.

Most figures are simulated, on costs of a data sheet and generated samples; `overlap` also trains on this machine. What
two claims need is simulated once, as many pieces at a time as there are cores; the training runs alone, at the end.
Without `--full` fewer models, nodes and steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.claims import (
    ablation,
    audio,
    balance,
    correction,
    idle,
    initialisation,
    overlap,
    scaling,
    throughput,
)
from tests.bench.claims.record import Claim
from tests.bench.claims.tasks import Say, revisions, run_all
from tests.bench.figures import json_text, machine

PARTS: dict[str, Any] = {
    "throughput": throughput, "idle": idle, "scaling": scaling, "balance": balance, "ablation": ablation,
    "audio": audio, "correction": correction, "initialisation": initialisation, "overlap": overlap,
}  # fmt: skip
"""Modules with `tasks(seeds, full)` and `claim(found, seeds, full)`, in the order in which claims are told."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seeds", type=_positive, default=3, help="how many")
    parser.add_argument("--full", action="store_true", help="all models, nodes and steps: half an hour or more")
    parser.add_argument("--json", type=Path, help="write claims, figures and details there, too")
    parser.add_argument("--sizes", type=Path, help="not used: batches of the paper's composition are generated")
    parser.add_argument("--media", type=Path, help="not used: the training makes its own small dataset")
    args = parser.parse_args()
    started = time.perf_counter()
    # Half an hour of work is not lost with what comes after it.
    pieces = args.json.with_suffix(".pieces") if args.json else None
    claims = tested(args.part, tuple(range(args.seeds)), args.full, _say, pieces)
    for claim in claims:
        print(told(claim))
    if args.json:
        kept = content(claims, args, time.perf_counter() - started)
        args.json.write_text(json_text({**kept, "pieces_made_by": revisions(pieces)}))
    if pieces:
        pieces.unlink(missing_ok=True)


def tested(parts: Sequence[str], seeds: Sequence[int], full: bool, say: Say, pieces: Path | None) -> list[Claim]:
    """Claims of the parts, in their order."""
    modules = [PARTS[name] for name in parts]
    found = run_all((task for module in modules for task in module.tasks(seeds, full)), say, pieces)
    claims = []
    for module in modules:
        more = [overlap.measure(seeds, full, say)] if module is overlap else []
        claims.append(module.claim(found, seeds, full, *more))
    return claims


def told(claim: Claim) -> str:
    """A claim for people."""
    lines = [f"{claim.name}: {claim.verdict}", f"  claim: {claim.claim}", f"  paper: {claim.paper}"]
    lines += [f"  {reading.basis}: {reading.text}" for reading in claim.readings]
    lines += [f"  note: {note}" for note in claim.notes]
    return "\n".join([*lines, f"  worse: {claim.worse or 'nowhere'}", ""])


def content(claims: Sequence[Claim], args: argparse.Namespace, wall_s: float) -> dict[str, Any]:
    """What is kept."""
    return {
        "machine": machine("numpy", "numba", "cvxpy", "torch"),
        "full": args.full,
        "num_seeds": args.seeds,
        "wall_s": wall_s,
        "claims": [claim.to_json() for claim in claims],
    }


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least one seed")
    return value


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
