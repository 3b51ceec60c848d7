"""From a config to transformers' own model: its class, its text model, and modules that stand in for others.

Every module that `StandIn` derives from answers for the one it replaces: transformers' code asks layers for attributes
(`layer_type`, `attention_type`) that the replaced one has.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dflop.models.fusing import fuse

ACTIVE = ("num_experts_per_tok", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token")
"""Entries of configs that count a token's experts."""
SHARED = "num_kv_shared_layers"
"""Entry of configs whose last layers use keys and values of earlier ones."""
PER_LAYER = "hidden_size_per_layer_input"
"""Entry of configs whose layers are given embeddings of their own."""
MARKS = ("mm_token_type_ids", "token_type_ids")
"""Arguments of a forward pass that say which tokens are placeholders."""
INNER = "thinker_config"
"""Section of models that also speak: the part that is trained here."""


def trained_config(config: Any) -> Any:
    """The part of a config that is trained: a model that also speaks has it in a section."""
    return getattr(config, INNER, None) or config


def build(
    config: Any,
    *,
    device: str = "meta",
    dtype: torch.dtype = torch.bfloat16,
    attention: str,
    experts: str | None = "eager",
) -> nn.Module:
    """Transformers' model of a config with random weights, or without memory on `meta`.

    Args:
        config: Stays as it is.
        device: Of the weights.
        dtype: Of the weights.
        attention: Name of the attention; a tower that has a class per implementation keeps its own.
        experts: Name of the experts' function; None: transformers decides.
    """
    model_class = class_of(config)
    last: Exception | None = None
    for name in (attention, {"text_config": attention}):
        try:
            with torch.device(device):
                model: nn.Module = model_class._from_config(
                    copy.deepcopy(config), attn_implementation=name, experts_implementation=experts, dtype=dtype
                )
            return model
        except KeyError as error:
            if error.args != (attention,):
                raise
            last = error
    assert last is not None
    raise last


def config_of(stated: Mapping[str, Any]) -> Any:
    """The trained part of a config as transformers' class of its `model_type` reads it."""
    import transformers

    return trained_config(transformers.CONFIG_MAPPING[str(stated["model_type"])].from_dict(dict(stated)))


def class_of(config: Any) -> Any:
    """Transformers' class of a multimodal model with this config."""
    import transformers

    auto: Any = transformers.AutoModelForImageTextToText
    if type(config) not in auto._model_mapping:
        auto = transformers.AutoModelForMultimodalLM
    return auto._model_mapping[type(config)]


def construct(config: Any, dtype: torch.dtype, experts: str | None = None) -> nn.Module:
    """The model of a config with transformers' own attention, in towers and decoder, and layers that keep little.

    Args:
        config: Of transformers.
        dtype: Parameter type.
        experts: As for `build`.
    """
    last: Exception | None = None
    for name in ("sdpa", "eager"):
        try:
            model = build(config, device="cpu", dtype=dtype, attention=name, experts=experts)
        except ValueError as error:  # a class without it
            last = error
        else:
            fuse(model)
            return model
    assert last is not None
    raise last


def find_decoder(model: nn.Module) -> tuple[str, Any]:
    """(path, module) of the text model: the innermost module with both the input embeddings and a list of layers.

    Raises:
        LookupError: there is none.
    """
    embedding = model.get_input_embeddings()  # type: ignore[operator]  # every model of transformers has it
    found = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and any(m is embedding for m in module.modules())
    ]
    if not found:
        raise LookupError("no module holds both the input embeddings and a list of layers")
    return found[-1]


def layers_of(tower: Any, path: str) -> Sequence[Any]:
    """Layers of a tower by the path of their list; a tower without one, which only projects its input, is one layer."""
    return list(tower.get_submodule(path)) if path else [tower]


def takes(model: Any, name: str) -> bool:
    """Whether a model's forward, or the forward inside it, names an argument."""
    return any(name in inspect.signature(m.forward).parameters for m in (model, model.base_model))


def feature_function(model: Any, name: str) -> Callable[..., Any] | None:
    """`get_image_features` or a sibling of a model; None where it has none."""
    return getattr(model, name, None) or getattr(model.base_model, name, None)


def encoder_function(shell: Any, kind: str) -> Callable[..., Any] | None:
    """The function of a module for items of a kind; frames are pictures to a class without one for clips (SmolVLM)."""
    own: Callable[..., Any] | None = getattr(shell, f"get_{kind}_features", None)
    return own or (getattr(shell, "get_image_features", None) if kind == "video" else None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def entry_of(config: Any, name: str) -> Any:
    """An entry of a config; None where it has none, or where layers differ in it and the config refuses to answer."""
    try:
        return getattr(config, name, None)
    except Exception:  # whatever a property of a config class raises
        return None


def extra_inputs(decoder: Any, length: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Inputs that some decoders need besides embeddings: those of Gemma's layers, one per layer, all zeros."""
    width = entry_of(decoder.config, PER_LAYER)
    if not width or not hasattr(decoder, "get_per_layer_inputs"):
        return {}
    shape = (1, length, decoder.config.num_hidden_layers, width)
    return {"per_layer_inputs": torch.zeros(shape, device=device, dtype=dtype)}


class StandIn(nn.Module):
    """Stands where another module is and answers for its attributes, without holding its parameters."""

    def __init__(self, replaced: Any) -> None:
        super().__init__()
        self._replaced = (replaced,)  # in a tuple: not a submodule

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self._replaced[0], name)


class PassThrough(StandIn):
    """Stands where a layer is that runs elsewhere, without its memory; hidden states leave as they came."""

    def __init__(self, replaced: nn.Module) -> None:
        shell = copy.copy(replaced)
        shell._modules, shell._parameters = {}, {}
        super().__init__(shell)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Recorder(StandIn):
    """Stands for a module and notes what it would be given; hidden states leave as they came."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given = {**{str(n): value for n, value in enumerate(args)}, **kwargs}
        if args or "hidden_states" in kwargs:  # a layer, or a norm
            return args[0] if args else kwargs["hidden_states"]
        if kwargs.get("inputs_embeds") is None:
            self.given["inputs_embeds"] = self._replaced[0].embed_tokens(kwargs["input_ids"])
        return Output(self.given["inputs_embeds"])


class Output(tuple[Any, ...]):
    """An output of a model of which only the hidden states are asked for; every other field is None."""

    def __new__(cls, hidden: torch.Tensor) -> Output:
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[0] if name == "last_hidden_state" else None

    def keys(self) -> tuple[str]:
        """As transformers 5.17 hands an output on: `**outputs`."""
        return ("last_hidden_state",)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(0 if key == "last_hidden_state" else key)


@contextlib.contextmanager
def in_place(owner: Any, name: str, module: nn.Module) -> Iterator[None]:
    """Within it, `module` stands in the place of a part of `owner`."""
    old = getattr(owner, name)
    setattr(owner, name, module)
    try:
        yield
    finally:
        setattr(owner, name, old)
