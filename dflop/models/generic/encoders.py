"""What a model has outside its decoder's layers: both ends, encoders, and what projects their rows.

The decoder and everything that contains it form a line from the model down; what branches off that line is an encoder
if it has a stack of layers, else a projector.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from dflop.models.generic.values import Encoder

_PROJECTORS = ("project", "connector", "merger", "aligner", "adapt")
"""Parts of names of branches that project though they have layers."""
_SOUND = ("audio", "speech", "acoustic", "semantic", "sound")


class Parts(NamedTuple):
    """Parameters outside the decoder's layers; fields as those of `Structure`."""

    encoders: tuple[Encoder, ...]
    num_entry_params: int
    num_exit_params: int
    num_other_params: int
    is_tied: bool


def parts_of(model: Any, path: str, decoder: Any) -> Parts:
    """Everything that a model has outside its decoder's layers.

    Args:
        model: Of transformers.
        path: Of the decoder.
        decoder: Inside the model.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None:  # some models do not answer for the head of their text model
        head = next((module for name, module in model.named_modules() if name.endswith("lm_head")), None)
    is_tied = head is not None and head.weight is getattr(embedding, "weight", None)
    counted = {id(p) for p in decoder.layers.parameters()}
    entry = leave = 0
    beside: list[tuple[str, nn.Module]] = []
    for name, module in _branches(model, path, head):
        if not name.startswith(f"{path}.") or _num_layers(module):
            beside.append((name, module))
        elif any(isinstance(m, nn.Embedding) for m in module.modules()):
            entry += _count(module, counted)
        else:
            leave += _count(module, counted)
    if head is not None:
        leave += _count(head, counted)
    branches = [(name, _num_layers(module), _count(module, counted)) for name, module in beside]
    leave += _count(decoder, counted)
    other = _count(model, counted)
    return Parts(_encoders(branches), entry, leave, other, is_tied)


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


def _num_layers(module: nn.Module) -> int:
    """Layers of the longest stack of a branch: a list of modules of one class with parts of their own."""
    stacks = (m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    alike = (m for m in stacks if len({type(x) for x in m}) == 1 and any(len(list(x.children())) > 1 for x in m))
    return max(map(len, alike), default=0)


def _encoders(branches: Sequence[tuple[str, int, int]]) -> tuple[Encoder, ...]:
    """Towers, each with the projectors of its medium; without a tower, what projects raw media is the encoder.

    Args:
        branches: (path, layers, parameters).
    """
    filled = [branch for branch in branches if branch[2]]
    towers = [x for x in filled if x[1] and not any(word in x[0].rpartition(".")[2] for word in _PROJECTORS)] or filled
    owner = {}
    for path, _, _ in (x for x in filled if x not in towers):
        alike = (tower for tower, _, _ in towers if _is_sound(tower) == _is_sound(path))
        owner[path] = next(alike, towers[0][0])
    found = []
    for path, num_layers, num_params in towers:
        own = [(x, n) for x, _, n in filled if owner.get(x) == path]
        found.append(Encoder(path, num_layers, num_params, ", ".join(x for x, _ in own), sum(n for _, n in own)))
    return tuple(found)


def _is_sound(path: str) -> bool:
    return any(word in path for word in _SOUND)
