"""What a model has outside its decoder's layers: both ends, encoders, and what projects their rows.

The decoder and everything that contains it form a line from the model down; what branches off that line is an encoder
if it has a stack of layers, else a projector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

from torch import nn

from dflop.models.generic.classes import entry_of, feature_function
from dflop.models.generic.values import Encoder, medium_of

PROJECTORS = ("project", "connector", "merger", "aligner", "adapt")
"""Parts of names of branches that project though they have layers."""
_DEEP = "deepstack_visual_indexes"
"""Entry of towers' configs: layers whose hidden states the decoder is given as well."""


class Parts(NamedTuple):
    """Parameters outside the decoder's layers; fields as those of `Structure`."""

    encoders: tuple[Encoder, ...]
    head: str
    num_entry_params: int
    num_exit_params: int
    num_other_params: int
    is_tied: bool
    others: tuple[str, ...]


class _Branch(NamedTuple):
    path: str
    layers: str
    num_params: int
    medium: str

    @property
    def is_projector(self) -> bool:
        return any(word in self.path.rpartition(".")[2] for word in PROJECTORS)


def parts_of(model: Any, path: str, decoder: Any) -> Parts:
    """Everything that a model has outside its decoder's layers.

    Args:
        model: Of transformers.
        path: Of the decoder.
        decoder: Inside the model.
    """
    embedding = model.get_input_embeddings()
    sees, hears = (feature_function(model, f"get_{kind}_features") is not None for kind in ("image", "audio"))
    hears = hears and not sees
    head_name, head = _head(model)
    is_tied = head is not None and head.weight is getattr(embedding, "weight", None)
    counted = {id(p) for p in decoder.layers.parameters()}
    entry = leave = 0
    beside: list[tuple[str, nn.Module]] = []
    for name, module in _branches(model, path, head):
        if not name.startswith(f"{path}.") or _layers(module):
            beside.append((name, module))
        elif any(isinstance(m, nn.Embedding) for m in module.modules()):
            entry += _count(module, counted)
        else:
            leave += _count(module, counted)
    if head is not None:
        leave += _count(head, counted)
    branches = [
        _Branch(name, _layers(module), _count(module, counted), medium_of(name, hears_only=hears))
        for name, module in beside
    ]
    leave += _count(decoder, counted)
    others = tuple(name for name, p in model.named_parameters() if id(p) not in counted)
    other = _count(model, counted)
    return Parts(_encoders(model, branches), head_name, entry, leave, other, is_tied, others)


def _head(model: Any) -> tuple[str, nn.Module | None]:
    """(path, module) of the head; some models do not answer for the head of their text model."""
    head = model.get_output_embeddings()
    names = ((name, m) for name, m in model.named_modules() if (m is head if head else name.endswith("lm_head")))
    return next(names, ("", None))


def _branches(model: nn.Module, path: str, head: nn.Module | None) -> Iterator[tuple[str, Any]]:
    """(path, module) of every module that is not on the path from the model to the decoder's layers."""
    names = path.split(".") if path else []
    line = {
        ".".join(names[:depth]): names[depth] if depth < len(names) else "layers" for depth in range(len(names) + 1)
    }
    for above, inside in line.items():
        for name, child in model.get_submodule(above).named_children():
            if name != inside and child is not head:
                yield f"{above}.{name}" if above else name, child


def _count(module: nn.Module, counted: set[int]) -> int:
    """Parameters of a module that were not counted before; they are, from now on."""
    new = {id(p): p for p in module.parameters() if id(p) not in counted}
    counted.update(new)
    return sum(p.numel() for p in new.values())


def _layers(module: nn.Module) -> str:
    """Path of the longest stack of a branch: a list of modules of one class with parts of their own; empty: none."""
    stacks = [(n, m) for n, m in module.named_modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    alike = [
        (len(m), n) for n, m in stacks if len({type(x) for x in m}) == 1 and any(len(list(x.children())) > 1 for x in m)
    ]
    return max(alike, key=lambda stack: stack[0], default=(0, ""))[1]


def _encoders(model: nn.Module, branches: Sequence[_Branch]) -> tuple[Encoder, ...]:
    """Towers, each with the projectors of its medium; without a stack of layers, what embeds raw media is the tower."""
    filled = [branch for branch in branches if branch.num_params]
    own = [x for x in filled if not x.is_projector]
    towers = [x for x in own if x.layers] or own or filled
    found = [_encoder(model, x) for x in towers]
    for other in (x for x in filled if x not in towers):
        at = next((i for i, tower in enumerate(found) if tower.medium == other.medium), 0)
        of = found[at]
        found[at] = replace(
            of,
            projector=(*of.projector, other.path),
            num_projector_params=of.num_projector_params + other.num_params,
            num_matrix_params=max(of.num_matrix_params, _largest(model.get_submodule(other.path).parameters())),
        )
    return tuple(found)


def _encoder(model: nn.Module, branch: _Branch) -> Encoder:
    """What a branch has before and behind its layers, by the order in which its class makes them."""
    tower = model.get_submodule(branch.path)
    before: list[nn.Parameter] = []
    behind: list[tuple[str, nn.Parameter]] = []
    num_layers = 1
    if branch.layers:
        layers = cast(nn.ModuleList, tower.get_submodule(branch.layers))
        inside, num_layers, is_behind = set(map(id, layers.parameters())), len(layers), False
        for name, p in tower.named_parameters():
            if id(p) in inside:
                is_behind = True
            elif is_behind:
                behind.append((name, p))
            else:
                before.append(p)
    deep = entry_of(getattr(tower, "config", None), _DEEP) or ()
    return Encoder(
        path=branch.path, medium=branch.medium, layers=branch.layers, num_layers=num_layers,
        num_params=branch.num_params, projector=(),
        num_projector_params=0, num_entry_params=sum(p.numel() for p in before),
        num_matrix_params=_largest(p for _, p in behind), deep_layers=tuple(deep),
        num_deep_params=sum(p.numel() for name, p in behind if deep and "deepstack" in name),
    )  # fmt: skip


def _largest(params: Iterable[nn.Parameter]) -> int:
    return max((p.numel() for p in params if p.ndim > 1), default=0)
