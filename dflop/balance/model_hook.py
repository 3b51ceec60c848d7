"""Deal the images and videos of a step over ranks round a model of transformers that has `get_image_features`.

Within the context manager the model's own `get_image_features` and `get_video_features` encode the items that a rank
was dealt and return the rows of the rank's own items. Ranks meet once in each forward pass. A rank without media joins
after its embedding, where the others insert their rows, so that collectives have one order on all ranks in both passes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dflop.balance.items import MIN_GAIN, DealtItems, ItemDealer, Items, Size
from dflop.balance.media_costs import MediaCost, patches
from dflop.errors import ConfigError

WHERE = "dflop.balance.balanced_encoder"


class _Kind(NamedTuple):
    """How models take a kind of media."""

    method: str
    pixels: str
    sizes: tuple[str, ...]
    """What comes per item, of which a model takes one or none."""


KINDS = {
    "image": _Kind("get_image_features", "pixel_values", ("image_grid_thw", "image_sizes")),
    "video": _Kind("get_video_features", "pixel_values_videos", ("video_grid_thw",)),
}


@contextlib.contextmanager
def balanced_encoder(
    model: torch.nn.Module, *, group: dist.ProcessGroup | None = None, cost: MediaCost = patches,
    min_gain: float = MIN_GAIN,
) -> Iterator[ItemDealer | None]:  # fmt: skip
    """Deal media over ranks in every forward pass of `model` within it; all ranks enter and leave it together.

    Every rank of the group runs the same forward passes, with media or without; the encoder may be trained under DDP
    or FSDP2 over the group, or be frozen. Checkpointing of layers is fine, of the whole model not.

    Args:
        model: With native-resolution patches (`image_grid_thw`: Qwen2-VL to Qwen3.5, GLM-4V) or an item per entry of
            `pixel_values` (LLaVA, InternVL); bare, or in DDP or FSDP2.
        group: Data-parallel ranks; None: all.
        cost: Of an item's size.
        min_gain: See `ItemDealer`.

    Yields:
        What deals, with its `gain`; None where there is one rank, and nothing to deal.

    Raises:
        ConfigError: no part of the model has `get_image_features`.
    """
    owners = [m for m in model.modules() if callable(getattr(m, "get_image_features", None))]
    if not owners:
        raise ConfigError(
            f"{type(model).__name__} has no `get_image_features`", where=WHERE,
            hint="use dflop.balance.ItemDealer round an encoder of your own",
        )  # fmt: skip
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        yield None
        return
    dealer = ItemDealer(group, min_gain)
    hook = _Hook(owners[-1], dealer, cost)  # the innermost: those above hand on to it
    try:
        yield dealer
    finally:
        hook.remove()
        dealer.close()


class _Hook:
    """Takes part in a model's forward passes."""

    def __init__(self, owner: Any, dealer: ItemDealer, cost: MediaCost) -> None:
        self._owner, self._dealer, self._cost = owner, dealer, cost
        self._items: dict[str, Items | None] = {}
        self._dealt: dict[str, DealtItems] = {}
        self._waiting: list[str] = []
        """Kinds that ranks have items of and that were not encoded in this forward pass yet."""
        self._is_encoding = False
        self._own = {kind: getattr(owner, of.method) for kind, of in KINDS.items() if hasattr(owner, of.method)}
        for kind in self._own:
            setattr(owner, KINDS[kind].method, self._method(kind))
        self._handles = (
            owner.register_forward_pre_hook(self._begin, with_kwargs=True),
            owner.get_input_embeddings().register_forward_hook(lambda _module, _args, out: self._without_media(out)),
        )

    def remove(self) -> None:
        """Leave the model as it was."""
        for kind in self._own:
            delattr(self._owner, KINDS[kind].method)
        for handle in self._handles:
            handle.remove()

    def _begin(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Meet the other ranks."""
        given = inspect.signature(self._owner.forward).bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        self._items = {kind: self._found(kind, given) for kind in self._own}
        self._dealt = self._dealer.meet(self._items)
        self._waiting = list(self._dealt)
        if kwargs.get("inputs_embeds") is not None:
            kwargs = {**kwargs, "inputs_embeds": self._without_media(kwargs["inputs_embeds"])}
        return args, kwargs

    def _found(self, kind: str, given: Mapping[str, Any]) -> Items | None:
        """This rank's items of a kind."""
        data = given.get(KINDS[kind].pixels)
        if data is None or not len(data):
            return None
        if not isinstance(data, torch.Tensor) or given.get("batch_num_images") is not None:
            raise ConfigError(
                f"`{KINDS[kind].pixels}` is no single tensor with one item per entry", where=WHERE,
                hint="give padded tensors, and samples of one image each where the model takes `batch_num_images`",
            )  # fmt: skip
        per_item = next((given[name] for name in KINDS[kind].sizes if given.get(name) is not None), None)
        sizes: list[Size] = [()] * len(data) if per_item is None else [tuple(row) for row in per_item.tolist()]
        has_patches = data.ndim == 2
        num_parts = [int(patches(size)) for size in sizes] if has_patches else [1] * len(sizes)
        return Items(data, num_parts, sizes, [self._cost(size) for size in sizes])

    def _without_media(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Take part in what comes next and this rank has no items of; its rows, of which there are none, are added."""
        while not self._is_encoding and self._waiting and self._items[self._waiting[0]] is None:
            rows = self._encode(self._waiting[0], embeddings.device, {})[1]
            embeddings = embeddings + rows[0].sum().to(embeddings.dtype)
        return embeddings

    def _method(self, kind: str) -> Any:
        own = self._own[kind]

        def features(*args: Any, **kwargs: Any) -> Any:
            if self._is_encoding or self._waiting[:1] != [kind]:  # called by the other one, or outside of a forward
                return own(*args, **kwargs)
            pixels, *rest = inspect.signature(own).bind_partial(*args, **kwargs).arguments.items()
            more = dict(rest)
            more |= more.pop("kwargs", {})
            more = {name: value for name, value in more.items() if name not in KINDS[kind].sizes}
            out, rows = self._encode(kind, pixels[1].device, more)
            rows[0] = self._without_media(rows[0])
            return _with_rows(out, rows)

        return features

    def _encode(self, kind: str, device: torch.device, more: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
        """(what the model's own method returned last, rows of this rank's items)."""
        takes = inspect.signature(self._own[kind]).parameters
        of_sizes = next((name for name in KINDS[kind].sizes if name in takes), "")
        last: list[Any] = []

        def encode(data: torch.Tensor, sizes: list[Size]) -> list[torch.Tensor]:
            per_item = {of_sizes: torch.tensor(sizes, device=device)} if sizes[0] else {}
            last.append(self._own[kind](data, **{**more, **per_item, "return_dict": True}))
            return _rows_of(last[0])

        self._waiting.pop(0)
        self._is_encoding = True
        try:
            rows = self._dealer.encode(self._dealt[kind], self._items[kind], encode, device)
        finally:
            self._is_encoding = False
        return last[0], rows


def _rows_of(out: Any) -> list[torch.Tensor]:
    """`[rows, width]` per item; deep features come last in a row."""
    rows = list(out.pooler_output)
    for layer in getattr(out, "deepstack_features", None) or ():
        deep = layer.split([len(of) for of in rows]) if isinstance(layer, torch.Tensor) else layer
        rows = [torch.cat([of, more], dim=-1) for of, more in zip(rows, deep, strict=True)]
    return rows


def _with_rows(out: Any, rows: list[torch.Tensor]) -> Any:
    """An output like `out` with other rows."""
    deep = getattr(out, "deepstack_features", None) or ()
    widths = [
        out.pooler_output[0].shape[-1],
        *((of if isinstance(of, torch.Tensor) else of[0]).shape[-1] for of in deep),
    ]
    pooled, *layers = zip(*(row.split(widths, dim=-1) for row in rows), strict=True)
    found = type(out)()
    is_stacked = isinstance(out.pooler_output, torch.Tensor)
    found["pooler_output"] = torch.stack(pooled) if is_stacked else type(out.pooler_output)(pooled)
    if deep:
        found["deepstack_features"] = [
            torch.cat(layer) if isinstance(of, torch.Tensor) else layer for of, layer in zip(deep, layers, strict=True)
        ]
    return found
