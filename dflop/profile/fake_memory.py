"""What a stage needs of a device's memory, counted without the memory: tensors have shapes and no data.

A stage is built under `FakeTensorMode` at any depth and full size, and one forward is traced; what autograd keeps is
counted by the same hook as in a probe. Exact for the same kernels; not predicted: rounding and fragmentation of an
allocator, workspaces of libraries, and what CUDA kernels keep that CPU kernels do not.

Models read lengths, grids and positions to decide what to do, so tensors of integers, and what is computed from nothing
but real ones, stay real. Weights are floating point and hence fake, and so is all that they touch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from dflop.models.family import Family
from dflop.models.ways import TRAIN, Way
from dflop.profile.groups import ProbeGroup
from dflop.profile.probe import ModuleProbe, ProbeSettings


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of one stage on one group; names as in `Measurement`."""

    module: str
    num_layers: int
    num_items: int
    num_tokens: int
    sum_sq_tokens: int
    param_bytes: int
    gradient_bytes: int
    """Of the weights; 0 where they are frozen."""
    optimizer_bytes: int
    """AdamW's two moments, in the type of the weights."""
    activation_bytes: int


def fake_stage(
    family: Family,
    token_config: Mapping[str, Any],
    vocab_size: int,
    module: str,
    num_layers: int,
    *,
    dtype: str,
    way: Way = TRAIN,
) -> Callable[[ProbeGroup], StageBytes]:
    """Build a module without data, at any depth.

    Args:
        family: Family of the full model.
        token_config: Config entries that come from the tokenizer.
        vocab_size: Rows of the embedding.
        module: Module to build.
        num_layers: Its depth.
        dtype: Name of the weights' type.
        way: How the module is run.

    Returns:
        Counts the bytes for a group.
    """
    mode = IntegersAreReal()
    settings = ProbeSettings("", "", "", dtype, num_repeats=0)
    with mode, mode.answering_no():
        cpu = torch.device("cpu")  # `cuda` would need a build of torch that has it
        probe = ModuleProbe(family, token_config, vocab_size, module, num_layers, settings, cpu, way=way)

    def count(group: ProbeGroup) -> StageBytes:
        with mode:
            activation_bytes = probe.saved_bytes(group)
        load = probe.load(group)
        trained_bytes = 0 if way.is_frozen else probe.param_bytes
        return StageBytes(
            module, num_layers, load.num_items, load.num_tokens, load.sum_sq_tokens,
            param_bytes=probe.param_bytes, gradient_bytes=trained_bytes, optimizer_bytes=2 * trained_bytes,
            activation_bytes=activation_bytes,
        )  # fmt: skip

    return count


class IntegersAreReal(FakeTensorMode):
    """New floating-point tensors are fake, and what comes of them; all others are real."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._answer_no = False

    def answering_no(self) -> AbstractContextManager[None]:
        """Within it, values of fake tensors read as zero: initialisers that reject samples then accept them."""
        return _Flag(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = MappingProxyType({})
    ) -> Any:
        given = dict(kwargs)
        tensors = [x for x in tree_leaves((args, given)) if isinstance(x, torch.Tensor)]
        fakes = [x for x in tensors if isinstance(x, FakeTensor)]
        if tensors and not fakes:
            return func(*args, **given)
        if self._answer_no and func is torch.ops.aten._local_scalar_dense.default:
            return fakes[0].dtype.is_floating_point and 0.0
        if func in _INDEXING:
            args = (args[0], [i for given_index in args[1] for i in _numbers(given_index)], *args[2:])
        out = super().__torch_dispatch__(func, types, args, given)
        if not tensors and isinstance(out, torch.Tensor) and not out.dtype.is_floating_point:
            return func(*args, **given)
        return out


_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default)


def _numbers(index: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    """A real mask as the numbers it selects: how many there are cannot be asked of a fake one."""
    if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
        return [index]
    return index.nonzero().unbind(1)


class _Flag(AbstractContextManager[None]):
    def __init__(self, mode: IntegersAreReal) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._mode._answer_no = True

    def __exit__(self, *_: object) -> None:
        self._mode._answer_no = False
