"""What a stage of any decoder asks of the model's classes before it is made, and what it refuses.

Which keys a layer sees, what a class does with logits behind its head, where layers may be cut. A class of which a
stage would leave something out is refused by name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from dflop.errors import ConfigError
from dflop.models.family import Decoder, Tower
from dflop.models.generic.classes import MARKS, PER_LAYER, SHARED, Output, entry_of, in_place
from dflop.models.generic.reach import Reach, UnknownArgument, read_reaches
from dflop.models.generic.routers import routers_of

_ROPE = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
"""Required arguments of `get_rope_index` that are known."""


def untrained(model: Any, decoder: Decoder, towers: Iterable[Tower]) -> str:
    """Why no stage can be made of a model, which need not have memory; empty: one can."""
    try:
        read_class(model, decoder, towers)
    except ConfigError as error:
        return error.what
    except UnknownArgument as error:
        return str(error)
    return ""


def read_class(model: Any, of: Decoder, towers: Iterable[Tower]) -> tuple[tuple[Reach | None, ...], Final]:
    """What a stage asks of a class: which keys its layers see, and what it does with logits.

    Raises:
        ConfigError: a stage would leave something out.
        UnknownArgument: a layer sees keys by an unknown rule.
    """
    above, _, name = of.path.rpartition(".")
    shell = model.get_submodule(above)
    name_ends(getattr(shell, name))
    _check(model, of, towers, shell, getattr(shell, name))
    mark = next((m for m in MARKS if m in inspect.signature(shell.forward).parameters), "")
    return read_reaches(shell, name, mark), final_of(model, of.head)


class Final(NamedTuple):
    """What a class does with logits behind its head."""

    scale: float
    capped: Callable[[torch.Tensor], torch.Tensor] | None
    """Where it is more than a factor."""


def final_of(model: Any, head: str) -> Final:
    """Read from the class's own forward, with a head in place that returns what it is given."""
    above, _, name = head.rpartition(".")
    owner = model.get_submodule(above)

    def final(logits: torch.Tensor) -> torch.Tensor:
        with in_place(owner, name, nn.Identity()):
            return logits_of(model, logits[None])[0]

    asked = torch.linspace(-90.0, 90.0, 16).view(4, 4)
    answer = final(asked).float()
    scale = float(answer[-1, -1] / asked[-1, -1])
    if torch.allclose(answer, asked * scale, rtol=1e-6, atol=0.0):
        return Final(1.0 if torch.equal(answer, asked) else scale, None)
    return Final(1.0, final)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """`[1, tokens, vocab]` by the class's own forward, with its scale and its cap on logits.

    Args:
        model: Whose head is asked.
        hidden: What left the decoder, `[1, tokens, hidden]`.
    """
    prefix, given = model.base_model_prefix, {"input_ids": torch.zeros(hidden.shape[:2], dtype=torch.long)}
    if not isinstance(getattr(model, prefix, None), nn.Module):
        if hasattr(model, "language_model"):  # a causal model inside, which has the head
            model = model.language_model
        else:  # Qwen2.5-Omni's thinker in transformers 5.17, which embeds by its decoder
            given = {"inputs_embeds": hidden}
        prefix = "model"
    with in_place(model, prefix, _Given(hidden)):
        logits: torch.Tensor = model(**given).logits
    return logits


class _Given(nn.Module):
    """Stands for the model below the head and returns hidden states that exist."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Output:
        return Output(self._hidden)


def router_loss_asked(config: Any) -> float:
    """Coefficient of the routers' load balancing loss that a decoder's config asks for; 0: none."""
    asked = entry_of(config, "output_router_logits") and entry_of(config, "router_aux_loss_coef")
    return float(asked or 0.0)


def adds_rows(shell: Any) -> bool:
    """Whether a class adds media rows to the embeddings of placeholders instead of replacing them, by its source."""
    source = inspect.getsource(type(shell).forward)
    return re.search(r"masked_scatter\(\s*\w+,\s*inputs_embeds\[", source) is not None


def last_cut(decoder: Any) -> int:
    """The last layer that may be the first of a stage: what layers share stays in their stage."""
    if entry_of(decoder.config, PER_LAYER):  # made of the token ids, which the first stage has
        return 0
    num_layers, shared = len(decoder.layers), entry_of(decoder.config, SHARED) or 0
    types = entry_of(decoder.config, "layer_types") or [""] * num_layers
    wanted = set(types[num_layers - shared :]) if shared else ()
    givers = (max(i for i in range(num_layers - shared) if types[i] == kind) for kind in wanted)
    return min(givers, default=num_layers)


def name_ends(decoder: Any) -> None:
    """Let a decoder's embeddings and last norm be known as `embed_tokens` and `norm`, whatever the class calls them."""
    named = (part for part in decoder.children() if isinstance(part, nn.Embedding))
    if getattr(decoder, "embed_tokens", None) is None and (embedding := next(named, None)) is not None:
        decoder.embed_tokens = embedding
    norms = [part for name, part in decoder.named_children() if "norm" in name]
    if norms and not hasattr(decoder, "norm"):
        decoder.norm = norms[-1]


def check_cut(decoder: Any, layers: tuple[int, int], num_deep: int) -> None:
    """Refuse layers `[first, end)` of a stage that need what another stage has, or give it what it cannot take.

    Args:
        decoder: Of the model.
        layers: Of the stage.
        num_deep: First layers after which deep features are added.

    Raises:
        ConfigError: they do.
    """
    if layers[0] > (latest := last_cut(decoder)):
        raise ConfigError(
            f"layer {layers[0]} begins a stage, and layers behind {latest} use keys or embeddings of earlier ones",
            where="model.hf_config", hint="use fewer stages",
        )  # fmt: skip
    if layers[0] == 0 and layers[1] < min(num_deep, len(decoder.layers)):
        raise ConfigError(
            f"features of media are added after the first {num_deep} decoder layers, the first stage has {layers[1]}",
            where="plan", hint="use fewer stages",
        )  # fmt: skip


def _check(model: Any, of: Decoder, towers: Iterable[Tower], shell: Any, decoder: Any) -> None:
    """Refuse a class of which a stage would leave something out."""
    kind = type(decoder).__name__

    def refuse(what: str) -> ConfigError:
        hint = "`dflop model check` reports what the model is made of"
        return ConfigError(what, where="model.hf_config", hint=hint)

    if not isinstance(getattr(decoder, "embed_tokens", None), nn.Module):
        raise refuse(f"{kind} has no `embed_tokens`, which stages need")
    known = (*(p for tower in towers for p in (tower.path, *tower.extras)), of.path, of.head)
    others = [n for n, _ in model.named_parameters() if not any(n == k or n.startswith(f"{k}.") for k in known)]
    if others:
        raise refuse(f"`{others[0]}` is part of no module")
    if entry_of(decoder.config, PER_LAYER) and not hasattr(decoder, "get_per_layer_inputs"):
        raise refuse(f"layers of {kind} take per-layer embeddings")
    if router_loss_asked(decoder.config) and not routers_of(decoder.layers, int(decoder.config.hidden_size)):
        raise refuse(f"the routers' loss of {kind} is not computed: set `output_router_logits` to false")
    if of.num_deep_features and not hasattr(decoder, "_deepstack_process"):
        raise refuse(f"{kind} takes deep features in a way that is not known")
    if hasattr(shell, "get_rope_index"):
        needed = inspect.signature(shell.get_rope_index).parameters.values()
        missing = [p.name for p in needed if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if strange := [name for name in missing if name not in _ROPE]:
            raise refuse(f"rope positions of {type(shell).__name__} take {', '.join(strange)}")
