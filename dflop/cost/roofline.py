"""What a layer asks of a device, and how fast devices have been seen to do it.

A pass over a layer is three kinds of work, one after the other: matmuls, attention, and operations that only move
bytes (norms, rotary positions, activations, residuals). Per token, with h the hidden size and q the width of all query
heads: two FLOPs per weight used; 4 q FLOPs per key that a query sees, half of them where attention is causal; and
`Program.moves * 2 h` bytes. A backward pass takes matmuls twice (once with frozen weights), attention 2.5 times, as
flash attention makes its scores again (Dao et al., arXiv 2205.14135), and bytes twice.

`Device.matmul_frac`, `Device.attention_frac` and `Program.moves` are fitted to published trainings
(`python -m tests.bench.published` fits them again). The rest was measured on one H200 (docs/measured.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from dflop.cost.devices import Device
from dflop.records import LLM, ModuleSpec

BYTES_PER_VALUE = 2
ATTENTION_BACKWARD = 2.5
LOGIT_BYTES = 24
"""Moved per logit: written in 16 bit, read and written again in 32 for the cross entropy and for its gradient."""
DECODER_LAUNCH_S, ENCODER_LAUNCH_S = 1.1e-3, 0.6e-3
"""A pass over a layer takes no less: eager PyTorch launches its kernels one by one, which took so long on the host of
one H200 for the smallest inputs."""
EDGE_LAUNCH_S = 0.5e-3


@dataclass(frozen=True, slots=True)
class Program:
    """How the operations between matmuls run."""

    name: str
    moves: float
    """Times that a layer and pass move the 2 h bytes of a token's hidden state."""
    launch_frac: float
    """Share of an eager layer's launches."""
    cast_bytes: float
    """Moved per value that is cast to 8 bit."""


EAGER = Program("eager", 79.4, 1.0, 33.0)
"""One kernel per operation, this package's default: its own norms and MLPs keep less, and took as long on an H200."""
COMPILED = Program("compiled", 39.9, 0.5, 5.0)
"""`torch.compile`, or kernels fused by hand: half the bytes. No published run is small enough to show launches, which
are taken to halve with them."""


@dataclass(frozen=True, slots=True)
class Work:
    """One pass over one layer or edge on one rank."""

    matmul_flops: float
    """Per token."""
    attention_flops: float
    """Per squared token."""
    hidden_bytes: float
    """Per token: its hidden state, as far as this rank holds it; `Program.moves` times that is moved."""

    def times(self, matmul: float, attention: float, moved: float) -> Work:
        """So many passes of each kind."""
        return Work(matmul * self.matmul_flops, attention * self.attention_flops, moved * self.hidden_bytes)

    def __add__(self, other: Work) -> Work:
        return Work(
            self.matmul_flops + other.matmul_flops,
            self.attention_flops + other.attention_flops,
            self.hidden_bytes + other.hidden_bytes,
        )

    def seconds_per_token(self, device: Device, program: Program = EAGER) -> float:
        """Matmuls and bytes."""
        moved_s = program.moves * self.hidden_bytes / device.memory_bytes_per_s
        return self.matmul_flops / (device.peak_bf16_flops * device.matmul_frac) + moved_s

    def seconds_per_sq_token(self, device: Device) -> float:
        """Attention."""
        return self.attention_flops / (device.peak_bf16_flops * device.attention_frac)


def layer_work(spec: ModuleSpec, tp: int = 1) -> Work:
    """A forward pass over a mean layer, which `tp` ranks share."""
    return Work(
        matmul_flops=2.0 * spec.mean(lambda kind: kind.num_used_params) / tp,
        attention_flops=(2.0 if spec.module == LLM else 4.0) * spec.query_width / tp,
        hidden_bytes=BYTES_PER_VALUE * spec.hidden_size / tp,
    )


def backward_work(forward: Work, *, is_frozen: bool = False, recomputed_frac: float = 0.0) -> Work:
    """The backward pass of a layer, with the part of the forward pass that runs once more."""
    again = forward.times(recomputed_frac, recomputed_frac, recomputed_frac)
    return forward.times(1.0 if is_frozen else 2.0, ATTENTION_BACKWARD, 2.0) + again
