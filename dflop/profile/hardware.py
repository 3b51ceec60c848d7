"""Names of the hardware and software a measurement belongs to: a cost table is reused only where both match."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import transformers


def hardware_name(device: torch.device) -> str:
    """Device name as the driver or `/proc/cpuinfo` gives it, e.g. `cpu: AMD EPYC 9R14`."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"cpu: {_cpu_model()}"


def software_name() -> str:
    """Versions that change timings."""
    return f"torch {torch.__version__}; transformers {transformers.__version__}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()
