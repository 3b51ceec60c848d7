"""What rows come with: images, videos and sounds with broken headers and bodies, chat templates, tokenizers.

A file has a size or a reason; what has a size decodes to that size or has a reason then, and a family places it or says
why not.
"""

import contextlib
import json
from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from PIL import Image

from dflop.data.chat import BUILT_IN, ChatTemplate
from dflop.data.decode import decode_audio, decode_image, decode_video
from dflop.data.demo_content import write_audio, write_video
from dflop.data.formats.embedded import NamedBytes
from dflop.data.headers import BadMedia, read_header
from dflop.data.tokens import ChatTokenizer
from dflop.models import FAMILIES, load_family
from dflop.models.media import MediaHeader, MediaRules
from tests.data.helpers import encode, make_tokenizer, parse_row
from tests.fuzz import hostile
from tests.fuzz.target import Target, attempt, check_reason, made

IMAGES = ("rgb.png", "rgb.jpg", "rgb.webp", "rgb.gif", "rgb.bmp", "rgb.tiff", "rgb.ppm", "l.png", "l.jpg", "l.gif",
          "l.bmp", "l.tiff", "l.ppm")  # fmt: skip
CLIPS, SOUNDS = ("clip.mp4", "clip.mkv", "clip.avi"), ("tone.flac", "tone.wav")
_FAMILIES = tuple(load_family(name, {}, {}) for name in FAMILIES)
_MAX_DECODED_PIXELS = 4_000_000
"""A header may promise more, within the limit; decoding it here would only take time."""


def samples(folder: Path) -> None:
    """Small sound files."""
    pixels = Image.fromarray(np.arange(30 * 60 * 3, dtype=np.uint32).reshape(30, 60, 3).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in IMAGES:
        turned = {"exif": exif} if name.endswith(("png", "jpg", "webp")) else {}
        pixels.convert(name.partition(".")[0].upper()).save(folder / name, **turned)
    for name in CLIPS:
        write_video([np.full((48, 64, 3), 20 * i, np.uint8) for i in range(6)], folder / name, Fraction(10))
    for name in SOUNDS:
        write_audio(np.sin(np.arange(8_000) / 5).astype(np.float32) / 2, folder / name)


def rules() -> MediaRules:
    return load_family("qwen2_5_omni_thinker", {}, {})


@contextlib.contextmanager
def _or_a_reason() -> Iterator[None]:
    try:
        yield
    except BadMedia as error:
        check_reason(error.reason, 400)


def _read(folder: Path, data: bytes, *, kinds: tuple[str, ...]) -> None:
    path = folder / "media"
    path.write_bytes(data)
    for kind in kinds:
        with _or_a_reason():
            read_header(kind, NamedBytes(data, "media"))
        with _or_a_reason():
            header = read_header(kind, path)
            assert min(header.width_px, header.height_px, header.duration_s) >= 0
            for family in _FAMILIES:
                _place(family, header)
            _decode(kind, path, header)


def _place(family: MediaRules, header: MediaHeader) -> None:
    try:
        placed = family.place(header)
    except ValueError:
        return
    assert min(placed.num_rows, placed.num_tokens) > 0
    assert sum(n for n in placed.layout if isinstance(n, int)) == placed.num_rows
    assert placed.sum_sq_tokens < 2**63, "squared lengths that no table holds"


def _decode(kind: str, path: Path, header: MediaHeader) -> None:
    if kind == "audio":
        assert decode_audio(path, 16_000).ndim == 1
    elif header.width_px * header.height_px > _MAX_DECODED_PIXELS:
        return
    elif kind == "image":
        assert decode_image(path).shape == (header.height_px, header.width_px, 3)
    else:
        decode_video(path, [0, min(2, header.num_frames - 1)])


def _broken(*names: str) -> st.SearchStrategy[bytes]:
    return st.deferred(lambda: hostile.broken_bytes(*((made(samples) / name).read_bytes() for name in names)))


_TEMPLATES = (
    *BUILT_IN.values(),
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endif %}{% endfor %}",
)
_JINJA = (
    "{{", "}}", "{%", "%}", "{{ messages }}", "{{ 1 // 0 }}", "{{ messages[9].content }}", "{{ cycler }}",
    "{{ ''.__class__.__mro__ }}", "{% for x in range(99999999) %}a", "{{ 'a' * 10 ** 10 }}", "{% include 'a' %}",
    "{{ m.content.format(m) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ m['content'] | tojson }}",
    "{{ undefined.a.b }}", "{% break %}", "{{ raise_exception(messages) }}", "{{ strftime_now() }}", "(" * 300,
    "{% filter nope %}{% endfilter %}", "\ue0f00\ue0f1", "\ue0f0٣\ue0f1", "{{ 2 ** 99999999 }}",
)  # fmt: skip
_ROW = {"conversations": [{"from": "human", "value": "what? \x00\ufffd <|im_end|>"},
                          {"from": "gpt", "value": "the cat"}]}  # fmt: skip


def _template(_folder: Path, example: tuple[str, list[str]]) -> None:
    source, roles = example
    found = attempt(ChatTemplate, source, "fuzz")
    skeleton = attempt(found.skeleton, tuple(roles)) if found is not None else None
    assert skeleton is None or [p for p in skeleton if isinstance(p, int)] == list(range(len(roles)))


def _template_file(folder: Path, example: bytes) -> None:
    path = folder / "tokenizer_config.json"
    path.write_bytes(example)
    found = attempt(ChatTemplate.load, str(path))
    if found is not None:
        attempt(found.skeleton, ("user", "assistant"))


def _sound_tokenizer() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made(make_tokenizer) / "tokenizer.json").read_text())
    model = found["model"]
    kept = {token: number for token, number in model["vocab"].items() if number < 280}  # an example stays readable
    pairs = [pair if isinstance(pair, list) else pair.split() for pair in model["merges"]]
    model |= {"vocab": kept, "merges": [pair for pair in pairs if "".join(pair) in kept]}
    return found


def _tokenizer(folder: Path, example: bytes) -> None:
    path = folder / "tokenizer.json"
    path.write_bytes(example)
    tokenizer, sample = attempt(ChatTokenizer, path, rules()), parse_row(_ROW, 0)
    if tokenizer is not None:
        encoded = attempt(encode, tokenizer, sample)
        if encoded is not None:
            assert encoded.num_text_tokens == len(encoded.input_ids) == len(encoded.labels)


_ROLES = st.lists(st.sampled_from(("system", "user", "assistant", "text")), min_size=1, max_size=4)
_NAMED = {
    "bos_token": "<s>", "eos_token": {"content": "</s>"},
    "chat_template": [{"name": "default", "template": BUILT_IN["qwen"]}],
}  # fmt: skip
_FILES = hostile.broken_json(_NAMED, {**_NAMED, "chat_template": BUILT_IN["chatml"]})
_TOKENIZERS = st.deferred(lambda: hostile.broken_json(_sound_tokenizer()))
_KINDS = ("image", "video", "audio")
_NOISE = st.binary(max_size=200) | _broken(*IMAGES, *SOUNDS)
TARGETS = (
    *(Target(name, what, examples, partial(_read, kinds=kinds)) for name, what, examples, kinds in (
        ("image", "bytes of images of seven formats broken", _broken(*IMAGES), _KINDS[:1]),
        ("video", "bytes of MP4, Matroska and AVI broken", _broken(*CLIPS), _KINDS[1:2]),
        ("audio", "bytes of FLAC and WAV broken", _broken(*SOUNDS), _KINDS[2:]),
        ("noise-as-media", "any bytes, read as every kind", _NOISE, _KINDS),
    )),
    Target("chat-template", "Jinja of chat templates cut up",
           st.tuples(hostile.broken_text(_TEMPLATES, _JINJA), _ROLES), _template),
    Target("chat-template-file", "`tokenizer_config.json` with values of any type, broken bytes", _FILES,
           _template_file),
    Target("chat-template-name", "names of templates and files", hostile.TEXTS,
           lambda _, name: attempt(ChatTemplate.load, name)),
    Target("tokenizer", "`tokenizer.json` with values of any type, broken bytes", _TOKENIZERS, _tokenizer),
)  # fmt: skip
