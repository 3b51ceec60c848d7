"""Some of an encoder's layers, run by Hugging Face's own forward: entered before their first, left behind their last.

Every tower puts its input through a few modules, a list of layers, and a few modules more. In front of the slice stands
`Enter`, which puts what the stage before handed over in the place of whatever came so far; behind it `Leave`, which
ends the forward there. What lies before the layers is replaced by stand-ins that yield nothing of the right shape, so
that a stage holds and computes no more than its own. Packing, windows and positions stay Hugging Face's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dflop.models.taps import DeepFeatures, HiddenStates, Taps

Shape = tuple[int, ...]


class Left(Exception):
    """How a forward is left behind the slice; carries the hidden states."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Leave(nn.Module):
    """Stands behind the last layer of a slice that is not the encoder's last."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise Left(hidden_states)


class Enter(nn.Module):
    """Stands before the first layer of a slice that is not the encoder's first."""

    carry: torch.Tensor | None = None

    def __init__(self, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """What was handed over, `[tokens, width]`, in the shape that the layers are given."""
        assert self.carry is not None, "a slice is entered with what the stage before handed over"
        carry = self.carry.reshape(hidden_states.shape)
        return (carry,) if self._in_tuple else carry


class StandIn(nn.Module):
    """In the place of a module whose result nobody looks at.

    Args:
        shape: Of the result, from the input.
        dtype: Of the result.
        attributes: What else the tower's forward reads of the module.
    """

    def __init__(self, shape: Callable[[torch.Tensor], Shape], dtype: torch.dtype, **attributes: Any) -> None:
        super().__init__()
        self._shape, self._dtype = shape, dtype
        self.register_buffer("weight", torch.zeros(1, 1, dtype=dtype), persistent=False)  # towers look where it lies
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Zeros that take no memory."""
        return torch.zeros((), dtype=self._dtype, device=given.device).expand(self._shape(given))


ENTRIES: Mapping[str, tuple[str, ...]] = {
    "native": ("patch_embed", "pos_embed"),
    "mel": ("conv1", "conv2"),
    "windows": ("conv1", "conv2", "embed_positions"),
    "tiles": ("embeddings",),
    "anyres": ("embeddings",),
}
"""Per way of calling a tower, the modules before its layers; a tower may lack some."""


def stand_ins(call: str, tower: Any, dtype: torch.dtype) -> dict[str, StandIn]:
    """Stand-ins of a tower's entries; ask before they are taken away."""
    width = _width(call, tower)
    if call == "native":
        found = {"patch_embed": StandIn(lambda x: (len(x), width), dtype)}
        if hasattr(tower, "pos_embed"):
            found["pos_embed"] = StandIn(lambda ids: (*ids.shape, 1), dtype)
        return found
    if call in ("mel", "windows"):
        found = {
            "conv1": StandIn(lambda x: (len(x), 1, x.shape[2]), dtype, stride=tower.conv1.stride),
            "conv2": StandIn(lambda x: (len(x), 1, (x.shape[2] - 1) // 2 + 1), dtype, stride=tower.conv2.stride),
        }
        if call == "windows":
            found["embed_positions"] = StandIn(lambda x: (1,), dtype)
            found["embed_positions"].weight = torch.zeros(1, width, dtype=dtype)
        return found
    num_tokens = tokens_per_tile(call, tower)
    return {"embeddings": StandIn(lambda x: (len(x), num_tokens, width), dtype)}


def placeholder(call: str, tower: Any, sizes: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Input of a tower whose entries are stand-ins: as many items of as many tokens, and nothing in them."""
    if call == "native":
        return torch.empty(num_tokens(call, tower, sizes), 0, dtype=dtype, device=device)
    if call == "mel":
        return torch.zeros(1, int(sizes[:, 0].sum()), dtype=dtype, device=device)
    if call == "windows":
        length = tower.max_source_positions * tower.conv1.stride[0] * tower.conv2.stride[0]
        return torch.zeros((), dtype=dtype, device=device).expand(len(sizes), 1, length)
    return torch.zeros(int(sizes[:, 0].sum()), 1, 1, 1, dtype=dtype, device=device)


def num_tokens(call: str, tower: Any, sizes: torch.Tensor) -> int:
    """Tokens between the layers of a tower, from the sizes of the items."""
    if call == "native":
        return int(sizes.prod(dim=1).sum())
    if call == "mel":
        window = 2 * tower.n_window
        whole, rest = sizes[:, 0] // window, sizes[:, 0] % window
        return int((whole * ((window - 1) // 2 + 1) + torch.where(rest > 0, (rest - 1) // 2 + 1, 0)).sum())
    if call == "windows":
        return len(sizes) * int(tower.max_source_positions)
    return int(sizes[:, 0].sum()) * tokens_per_tile(call, tower)


def tokens_per_tile(call: str, tower: Any) -> int:
    """Patches of a tile, and the class token where the tower has one."""
    config = tower.config
    image, patch = (v[0] if isinstance(v, (list, tuple)) else v for v in (config.image_size, config.patch_size))
    return int(image // patch) ** 2 + (call == "tiles")


def _width(call: str, tower: Any) -> int:
    name = (
        "d_model"
        if call in ("mel", "windows")
        else "embed_dim"
        if hasattr(tower.config, "embed_dim")
        else "hidden_size"
    )
    return int(getattr(tower.config, name))  # the `hidden_size` of Qwen2-VL's tower is the LLM's


class TowerSlice:
    """A tower cut down, in place, to some of its layers.

    Args:
        module: The whole tower.
        tower: How it is called, and where its layers are.
        layers: Global indices, `[first, end)`; not all of them.
        taken: Numbers of the hidden states that the projector takes, where it is for the caller to choose.
        dtype: Of the parameters.
    """

    def __init__(
        self, module: Any, tower: Any, layers: tuple[int, int], taken: Sequence[int], dtype: torch.dtype
    ) -> None:
        first, end = layers
        self._module, self._call, self._dtype = module, tower.call, dtype
        parent, _, name = tower.layers.rpartition(".")
        holder = module.get_submodule(parent) if parent else module
        whole = getattr(holder, name)
        self._width = _width(tower.call, module)
        self._unit = int(getattr(module, "spatial_merge_unit", 1))
        self.detaches = False
        """Whether the layers hand no gradient back: set where they are frozen."""
        self._enter = Enter(in_tuple=tower.call == "mel") if first else None
        shift = first - (self._enter is not None)
        self._taps = Taps()
        if hasattr(module, "deepstack_visual_indexes"):
            self._taps = DeepFeatures(module, first, end, shift)
        elif tower.call in ("tiles", "anyres"):
            self._taps = HiddenStates(module, whole, taken, first, end, self._width)
        kept: list[nn.Module] = [*([self._enter] if self._enter else []), *whole[first:end]]
        setattr(holder, name, nn.ModuleList([*kept, *([Leave()] if end < len(whole) else [])]))
        if hasattr(module, "fullatt_block_indexes"):
            module.fullatt_block_indexes = [i - shift for i in module.fullatt_block_indexes if first <= i < end]
        if self._enter is not None:
            for entry, stand_in in stand_ins(tower.call, module, dtype).items():
                setattr(module, entry, stand_in)

    def carry_shape(self, sizes: torch.Tensor) -> tuple[int, int]:
        """`[rows, width]` of what enters: hidden states, and beside those of a merged patch what came up on the way."""
        tokens = num_tokens(self._call, self._module, sizes)
        if not self._taps.num_before:
            return tokens, self._width
        return tokens // self._unit, sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        return [self._unit * self._width, *[self._taps.width] * self._taps.num_before]

    def run(
        self, encode: Callable[[torch.Tensor], torch.Tensor], data: torch.Tensor | None, carry: torch.Tensor | None,
        sizes: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Hidden states behind the slice (and beside them what came up so far), or the encoder's rows.

        Args:
            encode: The tower's usual call.
            data: Of the items, on the first stage.
            carry: Of `carry_shape`, on the others.
            sizes: Of the items.
        """
        before: tuple[torch.Tensor, ...] = ()
        if self._enter is not None:
            assert carry is not None
            if self._taps.num_before:
                carry, *rest = carry.split(self._widths, dim=1)
                before = tuple(rest)
            # What comes up on the way may train before, beside hidden states that do not.
            self._enter.carry = carry.detach() if self.detaches else carry
            data = placeholder(self._call, self._module, sizes, self._dtype, carry.device)
        assert data is not None
        with self._taps.listening(before) as found:
            try:
                rows = encode(data)
            except Left as left:
                hidden = left.hidden.reshape(-1, self._width)
                return torch.cat([hidden.reshape(-1, self._unit * self._width), *found], dim=1) if found else hidden
            finally:
                if self._enter is not None:
                    self._enter.carry = None
        return self._taps.rows(rows, before)
