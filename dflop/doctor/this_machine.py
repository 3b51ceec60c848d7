"""This machine: cores and memory, GPUs, what torch sees of them, and whether flash-attn fits that torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dflop import units
from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding

AREA = "machine"
TIMEOUT_S = 120
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits")
_TORCH = (
    "import torch; print(torch.__version__, torch.version.cuda or '-', torch.cuda.is_available(), "
    "torch.cuda.device_count(), getattr(torch, 'compiled_with_cxx11_abi', lambda: '?')())"
)
_FLASH = {
    "flash": ("flash-attn", "from flash_attn import __version__, flash_attn_varlen_func; print(__version__)"),
    "flash3": ("FlashAttention-3", "from flash_attn_interface import flash_attn_varlen_func; print('can be imported')"),
}
"""By `model.attention`: the name of the package, and what shows that it fits this torch."""


class Gpu(NamedTuple):
    """A GPU of this machine."""

    name: str
    memory_bytes: int
    driver: str


def memory_bytes() -> int:
    """Memory of this machine; 0 where it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return 0


def find_gpus() -> list[Gpu]:
    """GPUs that nvidia-smi tells of; none where there is no nvidia-smi, or no driver."""
    if shutil.which(_NVIDIA_SMI[0]) is None:
        return []
    done = _run(_NVIDIA_SMI)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    rows = [[cell.strip() for cell in line.split(",")] for line in lines]
    return [Gpu(row[0], int(float(row[1])) << 20, row[2]) for row in rows if len(row) == 3 and row[1].isdecimal()]


def machine(wants_gpu: bool, attention: str = "auto") -> Iterator[Finding]:
    """Findings about this machine, whose GPUs a configuration may want, with its `model.attention`."""
    yield Finding(AREA, "cores", OK, f"{len(os.sched_getaffinity(0))} for this process, of {os.cpu_count()}")
    yield Finding(AREA, "memory", OK, units.num_bytes(memory_bytes()))
    gpus = find_gpus()
    if gpus:
        kinds = sorted({f"{gpu.name} ({units.num_bytes(gpu.memory_bytes)}), driver {gpu.driver}" for gpu in gpus})
        yield Finding(AREA, "GPUs", OK, f"{len(gpus)}: {'; '.join(kinds)}")
    else:
        advice = "run on a machine with GPUs, or set cluster.device: cpu" if wants_gpu else ""
        yield Finding(AREA, "GPUs", FAIL if wants_gpu else SKIP, "none found by nvidia-smi", advice)
    yield torch_finding(len(gpus), wants_gpu)
    yield flash_finding("flash", is_needed=attention == "flash")
    if attention == "flash3" or importlib.util.find_spec("flash_attn_interface") is not None:
        yield flash_finding("flash3", is_needed=attention == "flash3")


def torch_finding(num_gpus: int, wants_gpu: bool) -> Finding:
    """Whether torch is there and sees the GPUs that nvidia-smi tells of."""
    if importlib.util.find_spec("torch") is None:
        return Finding(AREA, "torch", SKIP, "not installed", "for profiling and training: pip install 'dflop[train]'")
    done = _run((sys.executable, "-c", _TORCH))
    if done.returncode != 0:
        return Finding(AREA, "torch", FAIL, _last_line(done.stderr), "reinstall torch for this machine")
    version, cuda, is_available, count, _ = done.stdout.split()
    built = f"{version}, built for {'CUDA ' + cuda if cuda != '-' else 'CPUs'}"
    if not num_gpus:
        return Finding(AREA, "torch", OK, built)
    if is_available == "True" and int(count) == num_gpus:
        return Finding(AREA, "torch", OK, f"{built}, sees {count} GPUs")
    advice = "install a torch built for CUDA"
    if cuda != "-":
        advice = "the driver may be older than this CUDA: see nvidia-smi"
    return Finding(AREA, "torch", FAIL if wants_gpu else WARN, f"{built}, sees {count} of {num_gpus} GPUs", advice)


def flash_finding(kernel: str, *, is_needed: bool) -> Finding:
    """Whether a package of attention kernels can be imported with this torch: a wheel for another lacks a symbol."""
    package, code = _FLASH[kernel]
    module = code.split()[1]
    if importlib.util.find_spec(module) is None:
        how = "pip install 'dflop[flash]'" if kernel == "flash" else "build `hopper` of its repository"
        advice = f"{how}, or model.attention: auto" if is_needed else "torch's own kernel is used on GPUs, SDPA on CPUs"
        return Finding(AREA, package, FAIL if is_needed else SKIP, "not installed", advice)
    done = _run((sys.executable, "-c", code))
    if done.returncode == 0:
        return Finding(AREA, package, OK, done.stdout.strip())
    torch = _run((sys.executable, "-c", _TORCH)).stdout.split()
    built = f"torch {torch[0]}, CUDA {torch[1]}, CXX11 ABI {torch[4].upper()}" if len(torch) == 5 else "this torch"
    advice = f"install a build for {built}, or remove {package} and keep model.attention: auto"
    return Finding(AREA, package, FAIL if is_needed else WARN, _last_line(done.stderr), advice)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        # Not in the working directory: a folder `torch` there would be imported instead.
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, cwd=Path(sys.prefix)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it ended without a message"


def slow_kernels() -> Iterator[Finding]:
    """A finding for everything that was reported to cost a multiple; measured on a GPU if there is one."""
    area = "kernels"
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        yield Finding(area, "all", SKIP, "not measured: torch or transformers is missing", "pip install 'dflop[train]'")
        return
    from dflop.models.generic.kernel_traps import kernel_traps

    for trap in kernel_traps():
        yield Finding(area, trap.name, WARN if trap.is_hit else OK, str(trap), trap.remedy)
