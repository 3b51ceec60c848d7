"""A model's processor as a function of media headers: the text that replaces a placeholder, and the frames it takes.

A processor runs on media without values (tensors on the meta device) exactly as on real ones, up to the point where it
has the expanded text and would tokenize it. That takes milliseconds whatever the number of pixels. Where a processor
looks at values, and for sounds, it is run on blank media.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dflop.errors import ConfigError
from dflop.models.media import Layout, MediaHeader
from dflop.models.processor_settings import read_object

KINDS: Mapping[str, tuple[str, str]] = {
    "image": ("images", "image_processor"),
    "video": ("videos", "video_processor"),
    "audio": ("audio", "_audio_processor"),
}
"""Media kind -> argument of a processor's call, attribute of the part that takes it."""
_OBJECTS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
"""Files of a folder that a processor is made of."""
Options = Mapping[str, Mapping[str, Any]]
"""Media kind -> keyword arguments of the part of a processor that takes it, such as `fps`."""
_Item = tuple[MediaHeader, Any, Sequence[int]]
"""Header, what a processor is given, and which frames of a clip that has."""


class MediaProcessor:
    """A processor of transformers, asked by sizes.

    Args:
        processor: Any `ProcessorMixin`.
        options: What differs from the processor's own settings.
    """

    def __init__(self, processor: Any, options: Options | None = None) -> None:
        self.processor = processor
        self.options = options or {}
        self.num_words = lru_cache(maxsize=4096)(self._num_words)
        self.prompt = lru_cache(self._prompt)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Media kinds that the processor has a part for."""
        return tuple(kind for kind, (_, part) in KINDS.items() if getattr(self.processor, part, None) is not None)

    def _prompt(self, kind: str) -> tuple[str, str, str]:
        """(text before, placeholder, text after) of a conversation with one item, by the chat template if there is one.

        Raises:
            ValueError: the processor or its template has no placeholder of this kind.
        """
        token = getattr(self.processor, f"{kind}_token", None)
        if not token:
            raise ValueError(f"{type(self.processor).__name__} has no placeholder for {kind}")
        if not self.processor.chat_template:
            return "", token, ""
        content = [{"type": kind, kind: "a"}, {"type": "text", "text": "a"}]
        text = self.processor.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        token = token if token in text else f"<{kind}>"  # a few write another one into texts than they repeat
        before, found, after = str(text).partition(token)
        if not found or token in after:
            raise ValueError(f"the chat template writes {text.count(token)} placeholders `{token}` for one {kind}")
        return before, token, after

    def token_ids(self, *headers: MediaHeader) -> list[int]:
        """Token ids of a prompt with real items of sizes, all of a kind, by the whole call, which samples clips."""
        kind = headers[0].kind
        takes_all = kind == "video" and all(len(self._frames(h)) == h.num_frames for h in headers)
        options = {"do_sample_frames": False} if takes_all else {}
        items = [(h, _noise(h, self.sample_rate), range(h.num_frames)) for h in headers]
        out = self.processor(**self._arguments(kind, items, options))
        ids: list[int] = np.asarray(out["input_ids"][0]).tolist()
        return ids

    def expanded(self, header: MediaHeader, pad: str, *, has_values: bool = False) -> Layout:
        """What the processor puts for the placeholder of an item, of a clip for the frames that it takes.

        Args:
            header: Of the item.
            pad: The token that stands for an encoder's row.
            has_values: Call the processor with a blank item instead of a tensor without values; sounds always are.
        """
        arguments, before, after = self._call_of(header, has_values)
        return self._layout(self._expanded_text(arguments), before, after, pad)

    def made(self, header: MediaHeader, pad: str, *, has_values: bool = False) -> tuple[Layout, Mapping[str, Any]]:
        """(as `expanded`, what the processor hands to the model) of a prompt with an item, on meta without values."""
        arguments, before, after = self._call_of(header, has_values)
        texts: list[str] = []
        with self._tokenizer_as(_Recorder(self.processor.tokenizer, texts)):
            out = self.processor(**arguments)
        return self._layout(texts[-1], before, after, pad), dict(out)

    def inputs_of(self, header: MediaHeader, media: np.ndarray) -> Mapping[str, Any]:
        """What the processor hands to the model of a prompt with one item.

        Args:
            header: Of the item.
            media: Frames that it takes, uint8 `[T, H, W, 3]`; of a sound its samples.
        """
        item = media if header.kind == "audio" else _visual(header, media)
        options = {"do_sample_frames": False} if header.kind == "video" else {}
        return dict(self.processor(**self._arguments(header.kind, [(header, item, self._frames(header))], options)))

    def _call_of(self, header: MediaHeader, has_values: bool) -> tuple[dict[str, Any], str, str]:
        """(arguments of a call with an item, text before its placeholder, text after it)."""
        frames = self._frames(header)
        given = replace(header, num_frames=len(frames)) if header.kind == "video" else header
        has_values = has_values or header.kind == "audio"
        item = _blank(given, self.sample_rate) if has_values else _without_values(given)
        options: dict[str, Any] = {"do_sample_frames": False} if header.kind == "video" else {}
        options |= {} if has_values else {"input_data_format": "channels_first"}
        before, _, after = self.prompt(header.kind)
        return self._arguments(header.kind, [(header, item, frames)], options), before, after

    def _layout(self, text: str, before: str, after: str, pad: str) -> Layout:
        if text.startswith(before) and text.endswith(after):
            text = text[len(before) : len(text) - len(after)]
        return parse_layout(text, pad)

    def stated_tokens(self, header: MediaHeader) -> int:
        """Placeholder tokens of a picture or a sound as the processor's `_get_num_multimodal_tokens` counts them.

        Raises:
            LookupError: the processor has no such method, or does not count this kind.
        """
        count = getattr(self.processor, "_get_num_multimodal_tokens", None)
        size = [self.num_samples(header)] if header.kind == "audio" else [[header.height_px, header.width_px]]
        argument = "audio_lengths" if header.kind == "audio" else "image_sizes"
        of_kind = {f"{KINDS[header.kind][0]}_kwargs": dict(self.options.get(header.kind, {}))}
        answer = count(**{argument: size}, **of_kind) if count else {}
        if not answer or f"num_{header.kind}_tokens" not in answer:
            raise LookupError(f"{type(self.processor).__name__} counts no {header.kind} tokens from sizes")
        return int(answer[f"num_{header.kind}_tokens"][0])

    def frame_indices(self, num_frames: int, fps: float) -> tuple[int, ...]:
        """Frames that the processor takes of a video, in order, by its own sampling.

        All of them where it does not sample, or is to take more than there are, which most refuse.

        Args:
            num_frames: Of the video.
            fps: Frames per second of the video.

        Raises:
            ValueError: the processor refuses a video of this length.
        """
        from transformers.video_utils import VideoMetadata

        part = self.processor.video_processor
        settings = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
        settings |= self.processor._merge_kwargs(tokenizer_init_kwargs={})["videos_kwargs"]
        settings |= self.options.get("video", {})
        if not settings.pop("do_sample_frames", False) or num_frames < (settings["num_frames"] or 0):
            return tuple(range(num_frames))
        facts = VideoMetadata(total_num_frames=num_frames, fps=fps, duration=num_frames / fps)
        found = map(int, part.sample_frames(facts, **settings))
        return tuple(i for i in found if i < num_frames)  # rounding takes some past the end

    @property
    def sample_rate(self) -> int:
        """Samples per second of the sounds that the processor takes; 0: it takes none."""
        part = getattr(self.processor, "_audio_processor", None)
        return int(getattr(part, "sampling_rate", 0) or 0)

    def num_samples(self, header: MediaHeader) -> int:
        """Samples of a sound."""
        return round(header.duration_s * self.sample_rate)

    def _num_words(self, text: str) -> int:
        return len(self.processor.tokenizer(text)["input_ids"])

    def _expanded_text(self, arguments: Mapping[str, Any]) -> str:
        try:
            with self._tokenizer_as(_Stop(self.processor.tokenizer)):
                self.processor(**arguments)
        except _ExpandedText as stopped:
            return stopped.text
        raise LookupError(f"{type(self.processor).__name__} tokenizes no text")

    @contextlib.contextmanager
    def _tokenizer_as(self, other: Any) -> Iterator[None]:
        tokenizer = self.processor.tokenizer
        self.processor.tokenizer = other
        try:
            yield
        finally:
            self.processor.tokenizer = tokenizer

    def _frames(self, header: MediaHeader) -> Sequence[int]:
        is_video = header.kind == "video"
        return self.frame_indices(header.num_frames, header.num_frames / header.duration_s) if is_video else ()

    def _arguments(self, kind: str, items: Sequence[_Item], options: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of a call with one prompt."""
        name, _ = KINDS[kind]
        options = {**self.options.get(kind, {}), **options}
        if kind == "video":
            options |= {"video_metadata": [_metadata(h, frames) for h, _, frames in items], "return_metadata": True}
        if kind == "audio":
            options["sampling_rate"] = self.sample_rate
        text, given = "".join(self.prompt(kind)) * len(items), [item for _, item, _ in items]
        if kind == "image" and len(items) > 1:
            given = [given]  # a list of images would be one of samples that have one each
        return {"text": [text], name: given, f"{name}_kwargs": options, "return_tensors": "pt"}


def _metadata(header: MediaHeader, frames: Sequence[int]) -> dict[str, Any]:
    """Metadata of a clip, as a processor takes them with its `frames`."""
    fps = header.num_frames / header.duration_s
    facts = {"total_num_frames": header.num_frames, "fps": fps, "duration": header.duration_s}
    return {**facts, "frames_indices": list(frames)}


def load_processor(folder: Path) -> Any:
    """The processor of a model's folder, from its files alone.

    Raises:
        ConfigError: the folder has no processor or tokenizer, wants code of its own, or a package is missing.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        package = re.search(r"requires the (\w+) library|[Pp]ackage `([\w-]+)`", str(error))
        name = next(filter(None, package.groups())).lower() if package else ""
        hint = f"pip install {name}" if name else one_line(error)
        raise ConfigError("the processor needs a package that is missing", where=str(folder), hint=hint) from error
    except Exception as error:  # transformers raises what its files lead to: OSError, KeyError, TypeError, ...
        for path in filter(Path.exists, (folder / name for name in _OBJECTS)):
            read_object(path, "a file of the model's folder")  # one that was cut off is named
        hint = "copy processor_config.json or preprocessor_config.json, and tokenizer.json, from the release anew"
        raise ConfigError(f"no processor: {one_line(error)}", where=str(folder), hint=hint) from error
    if not hasattr(processor, "tokenizer"):
        raise ConfigError(
            f"no processor: transformers makes a {type(processor).__name__} of the folder, for text or media alone",
            where=str(folder), hint="`processor_class` in its files has to name a processor that transformers knows",
        )  # fmt: skip
    return processor


def parse_layout(text: str, pad: str) -> Layout:
    """Texts and numbers of pads in an expanded placeholder."""
    found: list[str | int] = []
    for number, part in enumerate(text.split(pad)):
        if number and found and isinstance(found[-1], int):
            found[-1] += 1
        elif number:
            found.append(1)
        if part:
            found.append(part)
    return tuple(found)


def _noise(header: MediaHeader, sample_rate: int) -> Any:
    """An item of a size as people hand it to a processor: a picture, frames, or a waveform."""
    rng = np.random.default_rng(0)
    if header.kind == "audio":
        return rng.standard_normal(round(header.duration_s * sample_rate), dtype=np.float32) / 10
    return _visual(header, rng.integers(0, 256, _shape(header), dtype=np.uint8))


def _blank(header: MediaHeader, sample_rate: int) -> Any:
    if header.kind == "audio":
        return np.zeros(round(header.duration_s * sample_rate), np.float32)
    return _visual(header, np.zeros(_shape(header), np.uint8))


def _shape(header: MediaHeader) -> tuple[int, ...]:
    return header.num_frames, header.height_px, header.width_px, 3


def _visual(header: MediaHeader, frames: np.ndarray) -> Any:
    if header.kind == "video":
        return frames
    from transformers.image_transforms import to_pil_image

    return to_pil_image(frames[0], do_rescale=False, input_data_format="channels_last")


def _without_values(header: MediaHeader) -> Any:
    import torch

    num_frames, height_px, width_px, num_colours = _shape(header)
    frames = torch.empty(num_frames, num_colours, height_px, width_px, dtype=torch.uint8, device="meta")
    return frames if header.kind == "video" else frames[0]


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


class _ExpandedText(Exception):  # no error: it carries the text out of the processor
    def __init__(self, text: str) -> None:
        self.text = text


class _InPlace:
    """Stands for a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _Stop(_InPlace):
    """Ends the call where the processor tokenizes a text."""

    def __call__(self, text: str | list[str], *args: Any, **kwargs: Any) -> Any:
        raise _ExpandedText(text if isinstance(text, str) else text[0])


class _Recorder(_InPlace):
    """Keeps the texts that the processor tokenizes."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        super().__init__(tokenizer)
        self._texts = texts

    def __call__(self, text: str | list[str], *args: Any, **kwargs: Any) -> Any:
        self._texts.append(text if isinstance(text, str) else text[0])
        return self._tokenizer(text, *args, **kwargs)
