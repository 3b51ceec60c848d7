"""Runs a model over what its processor makes of an item, without memory: floats have no values, whole numbers do.

The model is on the meta device. Grids, masks and token ids stay real on the CPU, as towers compute sequence lengths
from them; an operation on both kinds takes place on meta.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dflop.models.fusing import fuse
from dflop.models.generic import watch
from dflop.models.generic.arrays import is_whole_numbers
from dflop.models.generic.classes import build, encoder_function, find_decoder
from dflop.models.generic.folder import read_config

META = torch.device("meta")
_BY_MASK = ("index", "index_put", "index_put_")
_NO_VALUES = ("unallocated storage", "meta tensors")
"""Parts of torch's errors where values of a tensor on meta are asked for."""


class WithoutValues(TorchDispatchMode):
    """Operations with any tensor on meta take place there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, has_meta = dict(kwargs or {}), False

        def look(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal has_meta
            has_meta |= tensor.device == META
            return tensor

        tree_map_only(torch.Tensor, look, (args, kwargs))
        if has_meta:
            if func.overloadpacket.__name__ in _BY_MASK:  # how many a mask selects is known before it goes to meta
                args = (args[0], _selected(args[1]), *args[2:])
            args, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(META), (args, kwargs))
            if kwargs.get("device") is not None:
                kwargs["device"] = META
        elif kwargs.get("device") is not None and _is_whole(func, args, kwargs):
            kwargs["device"] = torch.device("cpu")
        return func(*args, **kwargs)


class _StatedNumbers(TorchFunctionMode):
    """Numbers that a class states, as the sizes of a grid, are on the CPU: a tensor on `meta` would have no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == META:
            made = func(*args, **{**kwargs, "device": "cpu"})
            return made.to(META) if made.is_floating_point() else made
        return func(*args, **kwargs)


def _is_whole(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a new tensor is of whole numbers or a mask, whose values are kept."""
    if (dtype := kwargs.get("dtype")) is not None:
        return not dtype.is_floating_point
    is_range = func.overloadpacket.__name__ == "arange" and all(isinstance(arg, int) for arg in args)
    return is_range or any(isinstance(arg, torch.Tensor) and not arg.is_floating_point() for arg in args)


def _selected(indices: Any) -> list[Any]:
    """Indices with numbers in place of masks; a mask without values selects everything."""
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype != torch.bool:
            found.append(index)
        else:
            mask = torch.ones(index.shape, dtype=torch.bool) if index.device == META else index
            found += mask.nonzero(as_tuple=True)
    return found


def empty_model(hf_config: Mapping[str, Any]) -> Any:
    """The model of a config on meta, with layers that keep what those of training do."""
    watch.register()
    model = build(read_config(hf_config, "model.hf_config"), attention=watch.NAME, experts=watch.NAME)
    fuse(model)
    return model


def run_encoders(model: Any, kind: str, inputs: Mapping[str, Any]) -> Any:
    """Run the encoder of a kind of media on meta; hooks see what it does.

    By the model's own function for it, or by its forward up to the decoder's first layer. What depends on values behind
    the encoder does not run.

    Args:
        model: On meta.
        kind: `image`, `video` or `audio`.
        inputs: What the processor makes of a prompt with its media.

    Returns:
        What the function returns; None where the forward ran, or the function to where it needs values.

    Raises:
        Exception: whatever the model raises where it does not take these inputs.
    """
    given = {name: _without_values(value) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    counts = {name: value for name, value in inputs.items() if is_whole_numbers(value)}
    problem = None
    encode = encoder_function(model.base_model, kind) or encoder_function(model, kind)  # inside, arguments have names
    mode = WithoutValues()  # type: ignore[no-untyped-call]  # torch's is not typed
    with mode, _StatedNumbers(), _without_what_needs_values():
        if encode is not None:
            takes = inspect.signature(encode).parameters
            try:
                return encode(**{name: value for name, value in (given | counts).items() if name in takes})
            except TypeError as error:  # it asks for what the model's forward makes
                problem = error
        _, decoder = find_decoder(model)
        handle = decoder.register_forward_pre_hook(_stop)
        try:
            model(**given, use_cache=False)
        except _DecoderReached:
            return None
        except Exception as error:
            raise error from problem
        finally:
            handle.remove()


@contextlib.contextmanager
def _without_what_needs_values() -> Iterator[None]:
    """Ends the block where an operation needs values of a tensor on meta."""
    try:
        yield
    except NotImplementedError:
        return
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_VALUES):
            raise


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(META) if tensor.is_floating_point() else tensor


class _DecoderReached(Exception):  # no error: all encoders have run
    pass


def _stop(*_: Any) -> None:
    raise _DecoderReached
