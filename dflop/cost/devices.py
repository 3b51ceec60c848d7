"""Data-sheet figures of devices, for cost tables of hardware nobody has at hand.

Rates are per device and direction; peaks are dense, data sheets tell twice that for sparse matrices. Memory is what
the data sheet says in decimal gigabytes; devices report a little more. Networks are those of NVIDIA's own DGX systems,
one adapter per device; a cluster with fewer has less.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflop.errors import CostError, did_you_mean


@dataclass(frozen=True, slots=True)
class Device:
    """What one accelerator can do at best."""

    name: str
    peak_bf16_flops: float
    """Dense, per second."""
    memory_bytes_per_s: float
    memory_bytes: int
    nvlink_bytes_per_s: float
    """To the other devices of its node."""
    network_bytes_per_s: float
    """To other nodes."""
    num_per_node: int = 8
    """As in NVIDIA's DGX and HGX systems."""


# NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB): 312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s both directions
# together. DGX A100 data sheet: eight ConnectX-6 adapters of 200 Gb/s.
A100 = Device("A100-80G SXM", 312e12, 2.039e12, 80_000_000_000, 300e9, 25e9)
# NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOP/s bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s both
# directions together. DGX H100 data sheet: eight ConnectX-7 adapters of 400 Gb/s.
H100 = Device("H100 SXM", 989.5e12, 3.35e12, 80_000_000_000, 450e9, 50e9)
# NVIDIA H200 Tensor Core GPU data sheet (SXM): as H100 with 141 GB at 4.8 TB/s. DGX H200 data sheet: as DGX H100.
H200 = Device("H200 SXM", 989.5e12, 4.8e12, 141_000_000_000, 450e9, 50e9)

DEVICES = {"a100": A100, "h100": H100, "h200": H200}


def find_device(name: str) -> Device:
    """The device whose key occurs in `name`, such as `NVIDIA H100 80GB HBM3`.

    Raises:
        CostError: none does; the hint lists the keys.
    """
    for key, device in DEVICES.items():
        if key in name.lower():
            return device
    raise CostError(f"no data sheet of device `{name}`", hint=did_you_mean(name.lower(), DEVICES))
