"""Data-sheet figures of devices, and the parts of them that trainings have been seen to reach.

Rates are per device and direction; peaks are dense, data sheets tell twice that for sparse matrices. Memory is what
the data sheet says in decimal gigabytes; devices report a little more. Networks are those of NVIDIA's own DGX systems,
one adapter per device; a cluster with fewer has less.

Fractions of the peak are fitted to published trainings of language models (`python -m tests.bench.published`
prints the fit); Hopper's agree with what one H200 was seen to do (docs/measured.md). A device with few published runs
has the fractions of the nearest one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflop.errors import ConfigError, did_you_mean


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How far seconds by a data sheet are off, as |predicted / true - 1|."""

    num_runs: int
    """Published runs that it is taken over."""
    median_frac: float
    p95_frac: float
    hardware: str = ""
    """Hardware of the runs."""


# Each run predicted by a fit that saw no run of its laboratory; the tests fit again and compare.
A100_RUNS = Accuracy(33, 0.057, 0.099, "A100 and A800")
HOPPER_RUNS = Accuracy(55, 0.041, 0.12, "H100, H200 and B200")
# No encoder has been published. On one H200 half of the layers of two encoders, from 5,000 tokens on, were predicted
# within 5 % and the worst within 29 % (tests/gpu/results/h200); that is one machine, so the stated error is wider.
ENCODERS = Accuracy(0, 0.15, 0.3)


@dataclass(frozen=True, slots=True)
class Device:
    """What one accelerator can do."""

    name: str
    peak_bf16_flops: float
    """Dense, per second."""
    memory_bytes_per_s: float
    memory_bytes: int
    nvlink_bytes_per_s: float
    """To the other devices of its node."""
    network_bytes_per_s: float
    """To other nodes."""
    matmul_frac: float
    """Share of the peak that matmuls of a training reach."""
    attention_frac: float
    """Share of the peak that attention of a training reaches (FlashAttention-2 and kernels of its time)."""
    accuracy: Accuracy
    """For language models."""
    host_bytes_per_s: float
    """Rate of its PCIe link to the host, in each direction."""
    num_per_node: int = 8
    """As in NVIDIA's DGX and HGX systems."""
    fp8_ratio: float = 0.0
    """Peak of FP8 matmuls over that of bfloat16; 0: it has none."""

    @property
    def source(self) -> str:
        """Where costs by this sheet come from and how far they are off, in a sentence without its full stop."""
        known = self.accuracy
        return (
            f"analytic, {self.name}: language models ±{100 * known.median_frac:.0f} % against {known.num_runs} "
            f"published runs on {known.hardware} (95 % of them within {100 * known.p95_frac:.0f} %), encoders "
            f"±{100 * ENCODERS.median_frac:.0f} %, none published"
        )


# NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB): 312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s both directions
# together, PCIe gen 4. DGX A100 data sheet: eight ConnectX-6 adapters of 200 Gb/s. The board of 40 GB has 1,555 GB/s.
A100 = Device("A100-80G SXM", 312e12, 2.039e12, 80_000_000_000, 300e9, 25e9, 0.895, 0.475, A100_RUNS, 32e9)
A800 = replace(A100, name="A800-80G SXM", nvlink_bytes_per_s=200e9)
A100_40 = replace(A100, name="A100-40G SXM", memory_bytes_per_s=1.555e12, memory_bytes=40_000_000_000)
# NVIDIA H100 Tensor Core GPU data sheet (SXM): 1,979 TFLOP/s bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s both
# directions together, PCIe gen 5; FP8 twice bf16. DGX H100 data sheet: eight ConnectX-7 adapters of 400 Gb/s.
H100 = Device("H100 SXM", 989.5e12, 3.35e12, 80_000_000_000, 450e9, 50e9, 0.771, 0.336, HOPPER_RUNS, 64e9, 8, 2.0)
# NVIDIA H200 Tensor Core GPU data sheet (SXM): as H100 with 141 GB at 4.8 TB/s. DGX H200 data sheet: as DGX H100.
H200 = replace(H100, name="H200 SXM", memory_bytes_per_s=4.8e12, memory_bytes=141_000_000_000)
# NVIDIA DGX B200 data sheet, an eighth of it: 2.25 PFLOP/s bf16 dense, FP8 twice that, 180 GB at 8 TB/s, NVLink 1.8
# TB/s both directions together, one adapter of 400 Gb/s.
B200 = replace(
    H100,
    name="B200 SXM",
    peak_bf16_flops=2.25e15,
    memory_bytes_per_s=8e12,
    memory_bytes=180_000_000_000,
    nvlink_bytes_per_s=900e9,
)

DEVICES = {"a100": A100, "a100-40": A100_40, "a800": A800, "h100": H100, "h200": H200, "b200": B200}


SLOWER_VARIANTS = ("pcie", "nvl", "mig")
"""In device names: other boards of the same chip, and slices of one, whose figures are others."""


def sheet_of(hardware: str) -> Device | None:
    """The data sheet of a device by its driver's name for it; None where none is known."""
    if any(variant in hardware.lower() for variant in SLOWER_VARIANTS):
        return None
    try:
        return find_device(hardware)
    except ConfigError:
        return None


def find_device(name: str) -> Device:
    """The device whose key is in `name`, such as `NVIDIA H100 80GB HBM3`; of `a100-40` both parts are.

    Raises:
        ConfigError: none is; the hint lists the keys.
    """
    for key, device in sorted(DEVICES.items(), key=lambda item: -len(item[0])):
        if all(part in name.lower() for part in key.split("-")):
            return device
    raise ConfigError(f"no data sheet of device `{name}`", hint=did_you_mean(name.lower(), DEVICES))
