"""Runs a model over what its processor makes of an item, without memory: floats have no values, whole numbers do.

The model is on the meta device. Grids, masks and token ids stay real on the CPU, as towers compute sequence lengths
from them; an operation on both kinds takes place on meta.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dflop.models.generic import watch
from dflop.models.generic.classes import build, find_decoder
from dflop.models.generic.entry import feature_function
from dflop.models.generic.folder import read_config

META = torch.device("meta")
_BY_MASK = ("index", "index_put", "index_put_")


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
        return func(*args, **kwargs)


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
    """The model of a config on meta, with attention that keeps what a fast kernel keeps."""
    watch.register()
    return build(read_config(hf_config, "model.hf_config"), attention=watch.NAME, experts=watch.NAME)


def run_encoders(model: Any, inputs: Mapping[str, Any]) -> None:
    """Run a model on meta up to the first layer of its decoder; hooks see what its encoders do.

    Args:
        model: On meta.
        inputs: What the processor makes of a prompt with its media.

    Raises:
        Exception: whatever the model raises where it does not take these inputs.
    """
    given = {name: _without_values(value) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    encode = next((f for name in inputs if (f := _encode_function(model, name))), None)
    _, decoder = find_decoder(model)
    handle = decoder.register_forward_pre_hook(_stop)
    try:
        mode = WithoutValues()  # type: ignore[no-untyped-call]  # torch's is not typed
        with mode, contextlib.suppress(_DecoderReached):
            if encode is None:
                model(**given, use_cache=False)
            else:
                takes = inspect.signature(encode).parameters
                encode(**{name: value for name, value in given.items() if name in takes})
    finally:
        handle.remove()


_FEATURES = {"pixel_values": "get_image_features", "pixel_values_videos": "get_video_features",
             "input_features": "get_audio_features"}  # fmt: skip
"""Input -> the model's function that encodes it; models without one do so in their forward."""


def _encode_function(model: Any, name: str) -> Any:
    wanted = _FEATURES.get(name)
    return feature_function(model, wanted) if wanted else None


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(META) if tensor.is_floating_point() else tensor


class _DecoderReached(Exception):  # no error: all encoders have run
    pass


def _stop(*_: Any) -> None:
    raise _DecoderReached
