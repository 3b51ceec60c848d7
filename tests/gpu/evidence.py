"""Measure on one GPU what plans assume: `python -m tests.gpu.evidence --minutes 9 --out FOLDER`.

For whoever has a GPU: torch, transformers, numpy, pyarrow, numba, PyYAML and pytest, nothing else. Parts run in
order of worth and append every result to `FOLDER/PART.jsonl` at once, so a run that is cut off keeps what it measured:

- `attention`: variable-length kernels and SDPA on LLM and encoder heads, seconds and FLOP/s;
- `roofline`: matrix products, copies, norms, and how long the launch of a small kernel takes;
- `levers`: a step of InternViT-300M with a 1.5-billion decoder as training runs it, and with one lever moved at a time;
- `trace`: one microbatch under torch's profiler: kernels, launches, waits, gaps between kernels;
- `host_waits`: lines of code at which the engine waits for the device;
- `new_lengths`: kernels of attention on lengths that were not seen before;
- `copies`: bytes per second between page-locked memory and the device;
- `step`: InternViT-300M with a 1.5-billion decoder: packed, padded as Hugging Face does, one by one;
- `orders`: microbatches of 8 data-parallel ranks under four policies, timed one after the other: a step is its slowest
  rank, messages between ranks left out;
- `memory`: peaks of the loss, and of layers with and without recomputation;
- `tables`: layers of SigLIP-so400m, InternViT-300M, Qwen2.5-7B and a Whisper-like encoder, seconds and bytes beside
  what the data sheet predicts (`FOLDER/MODEL.MODULE.parquet` holds the measurements).

`--device cpu --tiny` rehearses all of it with a model that means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from dflop.profile.hardware import hardware_name, software_name
from tests.gpu import host, layers, levers, new_lengths, one_step
from tests.gpu.nnls import stand_in
from tests.gpu.subject import TABLES, Subject, released, tiny

Part = Callable[[Subject, float], Iterator[Mapping[str, Any]]]
PARTS: Mapping[str, tuple[Part, float]] = {
    "attention": (layers.attention_kernels, 0.10),
    "roofline": (layers.roofline, 0.05),
    "levers": (levers.levers, 0.3),
    "trace": (host.trace, 0.1),
    "host_waits": (host.host_waits, 0.02),
    "new_lengths": (new_lengths.new_lengths, 0.1),
    "copies": (levers.copies, 0.02),
    "step": (one_step.step, 0.24),
    "orders": (one_step.orders, 0.30),
    "memory": (layers.memory, 0.06),
    "tables": (layers.tables, 0.34),
}
"""What measures until a deadline, and its share of the minutes; what a part leaves goes to those behind it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--part", action="append", choices=[*PARTS], help="default: all, in this order")
    parser.add_argument("--model", action="append", choices=[n for n, _ in TABLES], help="of `tables`; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model instead, to see whether all of this runs")
    args = parser.parse_args()
    stand_in()
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    # The scheduler's kernels are compiled while parts that need none of them run: 40 s on a machine that has none.
    subprocess.Popen([sys.executable, "-c", "from dflop.schedule.step_scheduler import warm; warm()"])
    subject = tiny(device, args.out) if args.tiny else released(device, args.out, args.model)
    (args.out / "circumstances.json").write_text(json.dumps(circumstances(device), indent=1))
    chosen, end_s = args.part or [*PARTS], time.monotonic() + 60 * args.minutes
    failed = [name for name in chosen if not run_part(name, chosen, subject, end_s, PARTS)]
    if failed:
        print(f"parts that failed: {', '.join(failed)}; errors are in {args.out}/PART.jsonl", file=sys.stderr)
    return bool(failed)


def run_part(
    name: str, chosen: list[str], subject: Subject, end_s: float, parts: Mapping[str, tuple[Part, float]]
) -> bool:  # fmt: skip
    """Whether a part ran to its end; each of its rows is on disk as soon as it is known, the error of a failure too."""
    measure, share = parts[name]
    later = sum(parts[other][1] for other in chosen[chosen.index(name) :])
    started_s = time.monotonic()
    deadline_s = started_s + max(0.0, end_s - started_s) * share / later
    with (subject.folder / f"{name}.jsonl").open("a") as file:
        try:
            for row in measure(subject, deadline_s):
                write(file, row)
        except Exception as error:  # the parts behind it are worth as much
            traceback.print_exc()
            write(file, {"error": f"{type(error).__name__}: {error}"})
            return False
        finally:
            print(f"{name}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
            if subject.device.type == "cuda":
                torch.cuda.empty_cache()
    return True


def circumstances(device: torch.device) -> dict[str, Any]:
    """What the times depend on."""
    is_cuda = device.type == "cuda"
    return {
        "hardware": hardware_name(device.type),
        "software": software_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if is_cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def write(file: Any, row: Mapping[str, Any]) -> None:
    """A row on disk and on the terminal."""
    line = json.dumps(row)
    print(line, flush=True)
    file.write(line + "\n")
    file.flush()
    os.fsync(file.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
