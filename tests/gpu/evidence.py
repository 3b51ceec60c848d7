"""Gather evidence on one GPU in nine minutes: `python -m tests.gpu.evidence --minutes 9 [--out FOLDER]`.

Needs torch, transformers with what it brings, numpy, pyarrow and numba. The part `job` also needs what `dflop train`
needs: `--wheels` names a folder of wheels that are unpacked for all parts. Parts run in order of worth, each in a
process of its own with a share of the time. Each appends its results to `FOLDER/rows.jsonl` at once; one that fails
leaves its last lines there, one that does not fit is skipped by name. `FOLDER/page.md` is the page of the run.

- `job`: `dflop train` from profiles to report, stopped and resumed (`tests.gpu.job`);
- `loop`: training loop and checkpoints alone, cut off and resumed;
- `layouts`: layouts of at most four ranks, which share the GPU over gloo, against Hugging Face in float32;
- `jitter`: three of them with layers and messages delayed at random: the same bits?
- `offload`: six microbatches with activations on the host: seconds and memory;
- `host_waits`: lines of code at which the engine waits for the device, in every model family;
- `launches`: passes that launches bound, alone and beside a thread that decodes plans;
- `faults`: a rank without memory, a killed rank, an infinite pixel;
- `alone`: a world of one over NCCL: groups, collectives, a step;
- `repeated`: whether a step has the same bits again;
- `tables`: layers of released models beside what the data sheet predicts;
- `roofline`, `copies`: matrix products, memory, launches, PCIe beside the data sheet;
- `half`, `attention`, `levers`, `step`, `memory`, `trace`, `new_lengths`, `orders`, `shared`: what time is left for.

`--device cpu --tiny` rehearses all of it with models that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dflop.profile.hardware import hardware_name, software_name
from tests.gpu import alone, host, layers, levers, new_lengths, one_step, page, ranks
from tests.gpu.drawn import ROOT
from tests.gpu.nnls import stand_in
from tests.gpu.subject import TABLES, Subject, released, tiny

Part = Callable[[Subject, float], Iterator[Mapping[str, Any]]]
PARTS: Mapping[str, tuple[Part, float]] = {
    "job": (partial(ranks.job, ranks=1), 120),
    "loop": (ranks.loop, 30),
    "layouts": (ranks.layouts, 90),
    "jitter": (ranks.jitter, 40),
    "offload": (alone.offload, 40),
    "host_waits": (alone.host_waits, 30),
    "launches": (alone.launches, 25),
    "faults": (ranks.faults, 25),
    "alone": (alone.alone, 20),
    "repeated": (alone.repeated, 15),
    "tables": (layers.tables, 75),
    "roofline": (layers.roofline, 15),
    "copies": (levers.copies, 10),
    "half": (ranks.half, 30),
    "attention": (layers.attention_kernels, 30),
    "levers": (levers.levers, 90),
    "step": (one_step.step, 70),
    "memory": (layers.memory, 30),
    "trace": (host.trace, 40),
    "new_lengths": (new_lengths.new_lengths, 40),
    "orders": (one_step.orders, 90),
    "shared": (partial(ranks.job, ranks=2), 90),
}
"""What measures until a deadline, and the seconds of nine minutes that it has; the last ones need what others leave."""
NEEDS_CUDA = {"copies"}
LEAST_S, GRACE_S = 12.0, 8.0
"""Less is not worth a start; and how long a part may go on behind its deadline."""
ROWS, EXIT_NEEDS = "rows.jsonl", 69


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="default: the variable OUT")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--part", action="append", choices=[*PARTS], help="default: all, in this order")
    parser.add_argument("--model", action="append", choices=[n for n, _ in TABLES], help="of `tables`; default: all")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to unpack beside what is installed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models instead, to see whether all of this runs")
    parser.add_argument("--run", choices=[*PARTS], help="this part here, as the others are run")
    parser.add_argument("--seconds", type=float, default=60, help="of `--run`")
    args = parser.parse_args()
    if args.out is None:
        parser.error("--out FOLDER is missing")
    args.out.mkdir(parents=True, exist_ok=True)
    if args.run:
        return run_part(args.run, args)
    end_s = time.monotonic() + 60 * args.minutes
    os.environ |= environment(args.wheels, args.out)
    command = shlex.join(["python", "-m", "tests.gpu.evidence", *_arguments(args.out)])
    facts = {**circumstances(torch.device(args.device)), "command": command, "commit": commit()}
    (args.out / "circumstances.json").write_text(json.dumps(facts, indent=1))
    # The scheduler's kernels are compiled while parts that need none of them run: 40 s on a machine that has none.
    warm = subprocess.Popen([sys.executable, "-c", "from dflop.schedule.step_scheduler import warm; warm()"], cwd=ROOT)
    outcomes = {}
    for name in args.part or PARTS:
        outcomes[name] = start_part(name, args, end_s)
        page.write(args.out)
    warm.kill()
    failed = [name for name, how in outcomes.items() if how == "failed"]
    print(f"{args.out / 'page.md'}; failed: {', '.join(failed) or 'none'}", file=sys.stderr)
    return bool(failed)


def start_part(name: str, args: argparse.Namespace, end_s: float) -> str:
    """Run a part in a process of its own; how it ended, which is a row, too."""
    started_s, file = time.monotonic(), args.out / ROWS
    given_s = min(PARTS[name][1] * args.minutes / 9, end_s - started_s)
    if name in NEEDS_CUDA and args.device != "cuda":
        return note(file, name, "needs CUDA")
    if given_s < LEAST_S:
        return note(file, name, "skipped", why=f"{max(given_s, 0):.0f} s were left")
    command = [sys.executable, "-m", "tests.gpu.evidence", "--run", name, "--seconds", str(given_s)]
    command += ["--out", str(args.out), "--device", args.device, *(["--tiny"] if args.tiny else [])]
    command += [word for model in args.model or () for word in ("--model", model)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    last = deque[str](maxlen=15)
    watch = killer(process, min(given_s + GRACE_S, max(end_s - started_s, GRACE_S)))
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last.append(line.rstrip()[:300])
    code, wall_s = process.wait(), time.monotonic() - started_s
    watch.cancel()
    if code == EXIT_NEEDS:
        return note(file, name, f"needs {last[-1]}", wall_s=wall_s)
    if code < 0:
        return note(file, name, "stopped", wall_s=wall_s, why="its time was over" if code in (-9, -15) else f"{code}")
    return note(file, name, "failed" if code else "done", wall_s=wall_s, **({"last": list(last)} if code else {}))


def killer(process: subprocess.Popen[str], seconds: float) -> threading.Timer:
    """A timer that kills a process and those that it started."""

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    return timer


def run_part(name: str, args: argparse.Namespace) -> int:
    """Run a part here; each of its rows is on disk as soon as it is known."""
    stand_in()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device, deadline_s = torch.device(args.device), time.monotonic() + args.seconds
    subject = tiny(device, args.out) if args.tiny else released(device, args.out, args.model)
    try:
        for row in PARTS[name][0](subject, deadline_s):
            note(args.out / ROWS, name, **row)
    except ranks.Needs as error:
        print(error)
        return EXIT_NEEDS
    return 0


def note(path: Path, part: str, outcome: str = "", **row: Any) -> str:
    """A row on disk and on the terminal; returns the outcome of a part that has ended."""
    line = json.dumps({"part": part, **({"outcome": outcome} if outcome else {}), **row}, default=str)
    line = line.replace(f"{ROOT}/", "")  # no page names folders of a machine
    print(line, flush=True)
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return outcome


def environment(wheels: Path | None, out: Path) -> dict[str, str]:
    """What parts run with: kernels on one folder, unpacked wheels on the path."""
    found = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONUNBUFFERED": "1"}
    if wheels is not None:
        place = Path(os.environ.get("TMPDIR", "/tmp")) / "dflop-wheels"  # not in `out`, which may be copied back
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(place)
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    return found


def circumstances(device: torch.device) -> dict[str, Any]:
    """What the times depend on."""
    is_cuda = device.type == "cuda"
    return {
        "hardware": hardware_name(device.type),
        "software": software_name(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if is_cuda else None,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _arguments(out: Path) -> list[str]:
    return [out.name if word == str(out) else word for word in sys.argv[1:]]


def commit() -> str:
    """Of the checkout; empty where there is no git."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def write(file: Any, row: Mapping[str, Any]) -> None:
    """A row of a file that is open, and on the terminal."""
    line = json.dumps(row)
    print(line, flush=True)
    file.write(line + "\n")
    file.flush()
    os.fsync(file.fileno())


if __name__ == "__main__":
    raise SystemExit(main())
