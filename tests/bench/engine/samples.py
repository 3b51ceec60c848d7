"""What the engine is timed on: a small Qwen2.5-Omni thinker, and global batches of samples without sound.

Sizes and lengths come from a table of real sizes, made small as in the bench of scheduling, or are generated; pixels
are then made up. With a dataset (`annotations.jsonl`, `media/`, `tokenizer.json`, as `dflop.data.demo` makes it) texts
and media are real, too.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflop.data.profile import DatasetRef, profile_shard
from dflop.data.tokens import ChatTokenizer
from dflop.jobs.source import DatasetSource
from dflop.models import load_family
from dflop.models.build import IGNORE_LABEL, build_model
from dflop.models.family import Family
from dflop.records import LLM, SampleShape
from dflop.train.feed import SampleSource, seconds_per_grid
from tests.bench.profile.cases import VOCAB_SIZE, tiny_omni
from tests.bench.schedule.real_data import Rows
from tests.bench.simulate.cases import MadeUpSource, token_id

MAX_LLM_TOKENS = 4096
PAD_ID = 0


@dataclass(frozen=True)
class Workload:
    """Global batches, and where their tokens and media come from; picklable."""

    batches: tuple[tuple[SampleShape, ...], ...]
    dataset: Path | None = None
    """Folder of real media; None: made up, of the same shapes."""

    @property
    def shapes(self) -> list[SampleShape]:
        return [shape for batch in self.batches for shape in batch]

    @cached_property
    def source(self) -> SampleSource:
        if self.dataset is None:
            return MadeUpSource("omni", self.shapes)
        return DatasetSource(_dataset(self.dataset), self.family, self.shapes)

    @cached_property
    def family(self) -> Family:
        return tiny_omni()[0] if self.dataset is None else _family_of(self.dataset)

    @property
    def vocab_size(self) -> int:
        return VOCAB_SIZE if self.dataset is None else _tokenizer(self.dataset, self.family).vocab_size

    @property
    def token_config(self) -> Mapping[str, Any]:
        """Entries of the model's configuration that come from the tokenizer."""
        if self.dataset is None:
            return self.family.token_ids(token_id("omni"))
        return self.family.token_ids(_tokenizer(self.dataset, self.family).special_ids)

    @property
    def hidden_size(self) -> int:
        return next(s.hidden_size for s in self.family.specs() if s.module == LLM)

    def model(self) -> torch.nn.Module:
        """The same weights wherever it is built."""
        config = {**self.family.hf_config, **self.token_config}
        return build_model(self.family, config, seed=0, dtype=torch.float32)

    def plain_model(self) -> torch.nn.Module:
        """The same weights with Hugging Face's own attention."""
        model = self.model()
        plain: torch.nn.Module = type(model)._from_config(  # type: ignore[attr-defined]  # transformers' own
            copy.deepcopy(model.config), attn_implementation="sdpa", dtype=torch.float32
        )
        plain.load_state_dict(model.state_dict())
        return plain

    def padded(self, shapes: Sequence[SampleShape]) -> tuple[dict[str, Any], torch.Tensor]:
        """Arguments of Hugging Face's own forward for samples side by side, padded to the longest, and labels."""
        samples = [self.source.tokens(s.sample_index) for s in shapes]
        size = (len(samples), max(len(s.input_ids) for s in samples))
        ids, mask = torch.full(size, PAD_ID), torch.zeros(size, dtype=torch.long)
        labels = torch.full(size, IGNORE_LABEL)
        for row, sample in enumerate(samples):
            n = len(sample.input_ids)
            ids[row, :n], labels[row, :n] = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.labels)
            mask[row, :n] = 1
        media = self._media(shapes, "image", "pixel_values", "image_grid_thw")
        media |= self._media(shapes, "video", "pixel_values_videos", "video_grid_thw")
        if "video_grid_thw" in media:
            seconds = [seconds_per_grid(i) for s in shapes for i in s.items if i.kind == "video"]
            media["video_second_per_grid"] = torch.tensor(seconds)
        return {"input_ids": ids, "attention_mask": mask, "use_cache": False, **media}, labels

    def _media(self, shapes: Sequence[SampleShape], kind: str, data: str, grids: str) -> dict[str, torch.Tensor]:
        found = [(s.sample_index, n, i) for s in shapes for n, i in enumerate(s.items) if i.kind == kind]
        if not found:
            return {}
        arrays = [self.source.array(sample, n) for sample, n, _ in found]
        return {data: torch.from_numpy(np.concatenate(arrays)), grids: torch.tensor([i.grid for _, _, i in found])}


def drawn(sizes: Path | None, num_batches: int, num_samples: int) -> Workload:
    """Batches of rows of a table of sizes, or of generated ones, with made-up media."""
    rows = Rows(sizes, tiny_omni()[0])
    return Workload(tuple(tuple(rows.batch(num_samples, [n], n * num_samples)) for n in range(num_batches)))


def real(dataset: Path, num_batches: int, num_samples: int) -> Workload:
    """Batches of samples of a dataset, in a fixed random order.

    Raises:
        ValueError: the dataset has too few samples without sound.
    """
    found, _ = profile_shard(_dataset(dataset), _family_of(dataset), 0, 1)
    shapes = [s for s in found if all(i.kind != "audio" for i in s.items)]
    if len(shapes) < num_batches * num_samples:
        raise ValueError(f"{dataset} has {len(shapes)} samples without sound, needed: {num_batches * num_samples}")
    order = np.random.default_rng(0).permutation(len(shapes))[: num_batches * num_samples]
    batches = order.reshape(num_batches, num_samples)
    return Workload(tuple(tuple(shapes[i] for i in batch) for batch in batches), dataset)


def _dataset(folder: Path) -> DatasetRef:
    return DatasetRef.of_file(
        folder / "annotations.jsonl", folder / "media", folder / "tokenizer.json", MAX_LLM_TOKENS
    )  # fmt: skip


def _tokenizer(folder: Path, family: Family) -> ChatTokenizer:
    return ChatTokenizer(folder / "tokenizer.json", family)


def _family_of(folder: Path) -> Family:
    """The bench's model with a vocabulary as large as the dataset's."""
    small, _, _ = tiny_omni()
    config = copy.deepcopy(dict(small.hf_config))
    config["text_config"] = {**config["text_config"], "vocab_size": _tokenizer(folder, small).vocab_size}
    return load_family("qwen2_5_omni_thinker", config, small.media)
