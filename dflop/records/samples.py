"""What a dataset is made of, as far as costs go."""

from __future__ import annotations

from dataclasses import dataclass

LLM = "llm"
"""Name of the language-model module; every other module is an encoder that feeds it."""


@dataclass(frozen=True, slots=True)
class ModuleLoad:
    """Work that some set of samples brings to one module, in the units the cost model understands."""

    num_items: int
    """What the edge works on item by item: media items (encoders), tokens that carry loss (LLM: its head)."""
    num_tokens: int
    """Positions the module's layers process (patches, audio frames after convolution, LLM tokens)."""
    sum_sq_tokens: int
    """Sum of squared lengths over the sequences attention runs on."""

    def __add__(self, other: ModuleLoad) -> ModuleLoad:
        return ModuleLoad(
            self.num_items + other.num_items,
            self.num_tokens + other.num_tokens,
            self.sum_sq_tokens + other.sum_sq_tokens,
        )


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One image, video or audio clip of a sample: its size as read from the header, and what it costs."""

    kind: str
    """`image`, `video` or `audio`."""
    path: str
    """Relative to the dataset's media root."""
    width_px: int
    height_px: int
    num_frames: int
    """Frames in the container (1 for an image, 0 for audio)."""
    duration_s: float
    module: str
    """Encoder module that consumes the item."""
    grid: tuple[int, int, int]
    """(temporal, height, width) patches of the encoder input; (feature frames, 0, 0) for audio."""
    num_tokens: int
    sum_sq_tokens: int
    num_rows: int
    """Rows the encoder hands to the LLM for this item, equal to its placeholder tokens."""

    @property
    def load(self) -> ModuleLoad:
        return ModuleLoad(1, self.num_tokens, self.sum_sq_tokens)


@dataclass(frozen=True, slots=True)
class SampleShape:
    """What one sample will cost every module, known from headers and the tokenizer alone."""

    profile_key: str
    """Identity of the data profile (annotations, media root, tokenizer, family rules) the row belongs to."""
    sample_index: int
    """Row of the sample in the annotation file; with `profile_key` the identity of the sample."""
    sample_id: str
    num_text_tokens: int
    num_supervised_tokens: int
    """Tokens that carry loss; the sample's share of the global loss denominator."""
    num_llm_tokens: int
    """Text tokens plus every media row: the length of the sample's sequence in the LLM."""
    items: tuple[MediaItem, ...]
    media_level: int = 0
    """How many times the family's media limits were halved to make the sample fit."""
    num_cut_tokens: int = 0
    """Tokens cut off its end to make it fit; not part of the counts above."""
    weight: float = 1.0
    """How often a mixture draws it, relative to the other samples of the profile."""
    sum_sq_llm_tokens: int = 0
    """Squared attention length in the LLM, averaged over its layers; 0: the square of `num_llm_tokens`."""
    content_hash: int = 0
    """Hash of texts and media, signed 64 bits: equal ones teach the same. 0: unknown, as for a table of sizes."""

    def load(self, module: str) -> ModuleLoad:
        """Work this sample brings to `module`; zero when it has no item for it."""
        if module == LLM:
            sum_sq_tokens = self.sum_sq_llm_tokens or self.num_llm_tokens**2
            return ModuleLoad(self.num_supervised_tokens, self.num_llm_tokens, sum_sq_tokens)
        return sum((i.load for i in self.items if i.module == module), ModuleLoad(0, 0, 0))


@dataclass(frozen=True, slots=True)
class QuarantinedSample:
    """A sample that cannot be trained on, and why. Nothing is dropped without such a row."""

    profile_key: str
    sample_index: int
    sample_id: str
    phase: str
    """`profile` when headers gave it away, `train` when decoding did."""
    path: str
    reason: str
    run_id: str = ""
    step: int = -1


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """A finished data or model profile; its presence means every row under `profile_key` is in the spool."""

    profile_key: str
    kind: str
    """`data` or `model`."""
    run_id: str
    inputs: str
    """JSON object of what the key was computed from, for people."""
    num_rows: int
    num_quarantined: int
    created_at_s: float
    elapsed_s: float
