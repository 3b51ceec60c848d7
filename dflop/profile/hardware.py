"""Names of the hardware and software a measurement belongs to: a cost table is reused only where both match."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from dflop.errors import ConfigError

PROBES_VERSION = 4
"""Changes when the same module takes another time, or other groups of samples are timed: older costs are not reused."""


def hardware_name(device: str, stated: str = "auto") -> str:
    """Device name as the driver or `/proc/cpuinfo` gives it, e.g. `cpu: AMD EPYC 9R14`.

    Args:
        device: `cpu` or `cuda`.
        stated: What the configuration calls it, instead; `auto`: nothing.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if stated != "auto":
        return stated
    if device == "cuda":
        import torch

        try:
            return f"cuda: {torch.cuda.get_device_name()}"
        except (AssertionError, RuntimeError) as error:  # torch without CUDA, or no driver or device
            hint = "run where there is a GPU, or set cluster.device to cpu or cluster.hardware to a label"
            what = f"no CUDA device: {str(error).splitlines()[0]}"
            raise ConfigError(what, where="cluster.device", hint=hint) from None
    return f"cpu: {_cpu_model()}"


def software_name() -> str:
    """Versions that change timings; read from package metadata, so that nothing heavy is imported."""
    return f"torch {version('torch')}; transformers {version('transformers')}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Model"))]
    return names[0] if names else platform.processor() or platform.machine()
