"""Small models of types without a family, bound to a stand-in for the generic family, with samples for them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dflop.data.tokens import EncodedSample
from dflop.models.build import IGNORE_LABEL
from dflop.models.family import GENERIC, GENERIC_PARTS, Decoder, Family, Tower
from dflop.models.generic import arrays, classes, items
from dflop.models.generic.encoders import parts_of
from dflop.models.media import MediaHeader, Placement
from dflop.records import LLM, MediaItem, SampleShape
from tests.models.generic.configs import MORE, PARTS
from tests.models.whole_model import build_model

FIRST_TEXT_ID, VOCAB = 10, 160
PLACES = "image_position_ids"
IMAGES = ([1], [], [3, 2], [1, 4], [], [2])
"""Sizes of the pictures of each sample: patches, or tiles."""


class SmallFamily(Family):
    """What the engine asks of a family; items are placed by `Case`."""

    name = GENERIC
    media_defaults: Mapping[str, Any] = {}
    media_tokens: Mapping[str, Any] = {}

    def __init__(self, kind: str, config: Mapping[str, Any] | None = None) -> None:
        super().__init__({"model_type": kind, **(config or (PARTS | MORE)[kind])}, {})
        self.configs = {LLM: {"hidden_size": 64}}
        model = classes.build(classes.config_of(self.hf_config), attention="eager")
        path, decoder = classes.find_decoder(model)
        vision, head = parts_of(model, path, decoder).encoders[0], model.get_output_embeddings()
        tower: Any = model.get_submodule(vision.path)
        deep = getattr(tower, "deepstack_visual_indexes", ())
        shell: Any = model.get_submodule(vision.path.rpartition(".")[0])
        self.form, self._says_places = (
            items.form_of(shell),
            PLACES in inspect.signature(shell.get_image_features).parameters,
        )
        call = GENERIC_PARTS if self.form == arrays.PARTS else GENERIC
        self.towers = {"vision": Tower(vision.path, call, vision.layers, vision.projector)}
        where = next(name for name, module in model.named_modules() if module is head)
        self.decoder = Decoder(len(deep), path, where)
        self._depths = {"vision": vision.num_layers, LLM: len(decoder.layers)}
        self._sizes: dict[arrays.Grid, int] = {}
        c = classes.config_of(self.hf_config).vision_config
        self.patch_px = c.patch_size if isinstance(c.patch_size, int) else c.patch_size[0]
        self.patch = (3 * self.patch_px**2 * getattr(c, "temporal_patch_size", 1),)

    def specs(self) -> Any:
        entry = {"vision": 1, LLM: max(1, self.decoder.num_deep_features)}
        return tuple(
            SimpleNamespace(module=name, num_layers=depth, num_entry_layers=entry[name])
            for name, depth in self._depths.items()
        )

    def array_shape(self, module: str, grid: tuple[int, int, int]) -> tuple[int, ...]:
        return arrays.array_shape(self.form, self.patch, grid)

    def item(self, size: int) -> MediaItem:
        """A picture; `size` says how large it is."""
        side = 4 * self.patch_px
        if self.form == arrays.GRID:
            grid, rows = (1, 2 * size, 4), 2 * size
        elif self.form == arrays.PARTS:
            grid, rows = arrays.grid_of(self.form, "image", self.made(size)), 2 * size
            self._sizes[grid] = size
        elif self.form == arrays.SIZED:
            grid, rows = (1, 2 * size * self.patch_px, side), 2 * size
        else:
            grid, rows = (size, side, side), 4 * size
        tokens = 4 * rows
        placed = Placement("vision", grid, tokens, tokens**2, rows, (rows,))
        return MediaHeader("image", 100, 100, 1, 0.0).item("", placed)

    def made(self, size: int, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """What a processor makes of a picture in the form `parts`: patches, and their places or mask and shape."""
        shape = 1, (2 if self._says_places else 8) * size, *self.patch
        pixels = np.zeros(shape) if rng is None else rng.standard_normal(shape)
        if self._says_places:
            return {"pixel_values": pixels, PLACES: np.indices((2, size)).reshape(1, 2, -1).transpose(0, 2, 1)}
        mask = np.ones((1, 8 * size), np.int64)
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": np.array([[2 * size, 4]])}

    def filler(self, item: MediaItem) -> np.ndarray | None:
        return (
            arrays.array_of(self.form, "image", self.made(self._sizes[item.grid])) if item.grid in self._sizes else None
        )

    def _place(self, header: MediaHeader, num_images: int, level: int) -> Placement:
        raise NotImplementedError

    def token_ids(self, token_id: Mapping[str, int]) -> dict[str, int]:
        return {}

    def array_of(self, item: MediaItem, versions: Sequence[np.ndarray]) -> np.ndarray:
        raise NotImplementedError


@dataclass(frozen=True)
class Small:
    """A subject of parity tests: a small model of a type, and its few samples in two global batches."""

    kind: str
    rate: float = 0.001
    """Of gradient descent; at a larger one a second step amplifies the rounding of the first."""

    @cached_property
    def family(self) -> SmallFamily:
        return SmallFamily(self.kind)

    @cached_property
    def batches(self) -> list[list[SampleShape]]:
        source = self.source([])
        return [[source.shape(n) for n in range(len(IMAGES))]] * 2

    def source(self, batch: Sequence[SampleShape]) -> SmallSource:
        return SmallSource(self.family)

    def build(self) -> torch.nn.Module:
        """The model as every rank builds it, with all parameters away from where initialisation leaves them."""
        model = build_model(self.family, self.family.hf_config, seed=0, dtype=torch.float32)
        for number, (name, p) in enumerate(model.named_parameters()):
            # Rows as large as embeddings: norms and the delta rule amplify the rounding of small ones.
            scale = 0.05 if name.startswith((self.family.decoder.path, self.family.decoder.head)) else 0.15
            p.data += scale * torch.randn(p.shape, generator=torch.Generator().manual_seed(number))
            if name.endswith("A_log"):  # states that forget at once leave gradients that are rounding alone
                p.data -= 3.0
        return model

    def plain(self) -> torch.nn.Module:
        """The same weights as transformers runs them."""
        config = classes.config_of(self.family.hf_config)
        plain = classes.build(config, device="cpu", dtype=torch.float32, attention="eager")
        plain.load_state_dict(self.build().state_dict())
        return plain.train()

    def loss_sum(self, plain: torch.nn.Module, batch: Sequence[SampleShape], position: int) -> torch.Tensor:
        """Summed loss of one sample by transformers' own forward."""
        source = self.source(batch)
        sample, shape = source.tokens(position), source.shape(position)
        ids = torch.from_numpy(sample.input_ids)
        given = self._pixels([torch.from_numpy(source.array(position, n)) for n in range(len(shape.items))], shape)
        is_picture = (ids == source.pad).long()[None]
        given |= {name: is_picture for name in classes.MARKS if classes.takes(plain, name)}
        logits = plain(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False, **given).logits
        return torch.nn.functional.cross_entropy(logits[0, :-1], torch.from_numpy(sample.labels[1:]), reduction="sum")

    def _pixels(self, made: Sequence[torch.Tensor], shape: SampleShape) -> dict[str, Any]:
        form, grids = self.family.form, torch.tensor([item.grid for item in shape.items])
        if not made:
            return {}
        if form == arrays.GRID:
            return {"pixel_values": torch.cat(list(made)), "image_grid_thw": grids}
        if form == arrays.PARTS:
            return _padded([items.parts_of(array)[1] for array in made])
        if form != arrays.SIZED:
            tiles = torch.cat(list(made))
            return {"pixel_values": tiles[None] if form == arrays.LISTED else tiles}
        sizes = grids[:, 1:]
        pixels = torch.zeros(len(made), 3, *sizes.amax(0).tolist())
        for n, (array, (height, width)) in enumerate(zip(made, sizes.tolist(), strict=True)):
            pixels[n, :, :height, :width] = array.view(3, height, width)
        return {"pixel_values": pixels, "image_sizes": sizes}


def _padded(pictures: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pictures in one batch, padded to the largest."""
    longest = max(of["pixel_values"].shape[1] for of in pictures)

    def padded(name: str, x: torch.Tensor) -> torch.Tensor:
        if name == "spatial_shapes":
            return x
        return torch.cat([x, x.new_full((1, longest - x.shape[1], *x.shape[2:]), -1 if name == PLACES else 0)], dim=1)

    return {name: torch.cat([padded(name, of[name]) for of in pictures]) for name in pictures[0]}


class SmallSource:
    """Samples that are a pure function of their number."""

    def __init__(self, family: SmallFamily) -> None:
        self._family = family
        config = classes.config_of(family.hf_config)
        self.pad: int = getattr(config, "image_token_id", None) or config.image_token_index

    def shape(self, sample_index: int) -> SampleShape:
        pictures = tuple(self._family.item(size) for size in IMAGES[sample_index])
        num_text, num_rows = 24 + 5 * sample_index, sum(item.num_rows for item in pictures)
        return SampleShape(
            profile_key="small", sample_index=sample_index, sample_id=f"s{sample_index}", num_text_tokens=num_text,
            num_supervised_tokens=7 + sample_index, num_llm_tokens=num_text + num_rows, items=pictures,
        )  # fmt: skip

    def tokens(self, sample_index: int) -> EncodedSample:
        shape, rng = self.shape(sample_index), np.random.default_rng(sample_index)
        text = rng.integers(FIRST_TEXT_ID, VOCAB, shape.num_text_tokens).tolist()
        ids, text, positions = text[:3], text[3:], []
        for item in shape.items:
            positions.append(len(ids) + np.arange(item.num_rows))
            ids += [*[self.pad] * item.num_rows, *text[:2]]
            text = text[2:]
        ids += text
        labels = np.full(len(ids), IGNORE_LABEL)
        labels[-shape.num_supervised_tokens :] = ids[-shape.num_supervised_tokens :]
        return EncodedSample(np.asarray(ids), labels, tuple(positions))

    def array(self, sample_index: int, item: int) -> np.ndarray:
        grid = self.shape(sample_index).items[item].grid
        rng = np.random.default_rng([sample_index, item])
        if self._family.form == arrays.PARTS:
            return arrays.array_of(arrays.PARTS, "image", self._family.made(IMAGES[sample_index][item], rng))
        return rng.standard_normal(self._family.array_shape("vision", grid), dtype=np.float32)
