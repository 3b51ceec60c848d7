"""Whole conversations: token ids are those of Hugging Face's processor, whatever a template writes around media."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflop.data.demo_content import SPECIAL_TOKENS, train_tokenizer
from dflop.data.tokens import ChatTokenizer
from dflop.models import load_family
from dflop.models.media import MediaHeader
from tests.data.helpers import encode, parse_row

# In the manner of the published templates of each family.
LOOP, END = "{% for m in messages %}<|im_start|>{{ m.role }}\n", "<|im_end|>\n{% endfor %}"
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
IMAGE, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"
SHOW = (
    "{% macro show(m) %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    f"{{% if 'image' in p %}}{IMAGE}{{% elif 'video' in p %}}{VIDEO}{{% else %}}{{{{ p.text }}}}{{% endif %}}"
    "{% endfor %}{% endif %}{% endmacro %}"
)


def parts(kinds: dict[str, str]) -> str:
    """A template that writes something for media of these kinds, and text as it is."""
    cases = "".join(f"{{% elif '{kind}' in p %}}{written}" for kind, written in kinds.items())
    return (
        f"{{% set ns = namespace(n=0) %}}{SYSTEM}{LOOP}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}"
        f"{{% for p in m.content %}}{{% if 'text' in p %}}{{{{ p.text }}}}{cases}{{% endif %}}{{% endfor %}}"
        f"{{% endif %}}{END}"
    )


COUNT = "{% set ns.n = ns.n + 1 %}"
THINKING = (
    f"{SHOW}{LOOP}{{% set c = show(m) %}}{{% if m.role == 'assistant' %}}{{% set r = '' %}}{{% if '</think>' in c %}}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}"
    "{{ '<think>\n' + r + '\n</think>\n\n' + c.lstrip('\n') }}{% else %}{{ c | trim }}{% endif %}" + END
)
OF_KIND = "{% for p in m.content | selectattr('type', 'equalto', 'KIND') %}"
MOVED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' }}"
    + "".join(OF_KIND.replace("KIND", kind) + f"<{kind}>{{% endfor %}}" for kind in ("image", "video"))
    + OF_KIND.replace("KIND", "text") + "{{ '\n' + p.text }}{% endfor %}<|im_end|>{% endfor %}"
)  # fmt: skip
OMNI = {k: f"<|{b}_bos|><|{k.upper()}|><|{b}_eos|>" for k, b in
        {"image": "vision", "video": "vision", "audio": "audio"}.items()}  # fmt: skip
TILE = {"size": {"height": 28, "width": 28}}
GRID = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]
ONE_TILE = {"vision_config": {"image_size": 28, "patch_size": 14}}


class Case(NamedTuple):
    family: str
    template: str
    named: dict[str, str]
    config: dict[str, object] = {}
    options: dict[str, object] = {}


QWEN = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
AUDIO = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
CASES = {
    "pairs": Case("qwen2_5_vl", parts({"image": IMAGE, "video": VIDEO}), QWEN),
    "numbered": Case("qwen3_vl", parts({"image": f"{COUNT}Picture {{{{ ns.n }}}}: {IMAGE}", "video": VIDEO}), QWEN),
    "no pair": Case("qwen3_vl", parts({"image": "<|image_pad|>", "video": "<|video_pad|>"}), QWEN),
    "thinking": Case("qwen3_vl", THINKING, QWEN),
    "three kinds": Case("qwen2_5_omni_thinker", parts(OMNI), {
        **AUDIO, "image_token": "<|IMAGE|>", "video_token": "<|VIDEO|>", "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
    }),
    "audio in lines": Case("qwen2_audio", parts({"audio": f"{COUNT}Audio {{{{ ns.n }}}}: {OMNI['audio']}\n"}), AUDIO),
    "lines of frames": Case(
        "internvl", parts({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}),
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        ONE_TILE,
        {"image": TILE, "video": {**TILE, "num_frames": 4, "do_sample_frames": True}, "whole": {"image_seq_length": 1}},
    ),
    "media first": Case(
        "llava_onevision", MOVED, {"image_token": "<image>", "video_token": "<video>"},
        {**ONE_TILE, "image_grid_pinpoints": GRID},
        {"image": {**TILE, "image_grid_pinpoints": GRID}, "video": TILE,
         "whole": {"num_image_tokens": 4, "vision_feature_select_strategy": "full"}},
    ),
}  # fmt: skip
SIDES = st.integers(28, 90)
SIZES = {
    "image": st.tuples(SIDES, SIDES),
    "video": st.tuples(st.integers(4, 9), st.sampled_from([2.0, 24.0]), SIDES, SIDES),
    "audio": st.integers(1600, 30_000),
}
TEXTS = st.lists(
    st.sampled_from(["the cat", " sat", "\n", "  ", "Picture 1: ", "<think>\nhm\n</think>\n\n", "<3.5 seconds>"]),
    min_size=1, max_size=3,
).map("".join)  # fmt: skip


def options_of(case, rules):
    if case.options or case.family == "qwen2_audio":
        return case.options
    limits = rules.limits(0)
    image = {"size": {"shortest_edge": limits["min_pixels"], "longest_edge": limits["max_pixels"]}}
    video = {"size": {"shortest_edge": limits["video_min_pixels"], "longest_edge": limits["video_max_pixels"]}}
    sampling = {"fps": limits["video_fps"], "min_frames": limits["video_min_frames"], "do_sample_frames": True}
    return {"image": {**image, "patch_size": rules.vision["patch_size"]}, "video": {**video, **sampling}}


def header(kind, size):
    if kind == "audio":
        return MediaHeader(kind, 0, 0, 0, size / 16_000)
    if kind == "image":
        return MediaHeader(kind, *size, 1, 0.0)
    return MediaHeader(kind, size[2], size[3], size[0], size[0] / size[1])


@pytest.mark.parametrize("name", CASES)
def test_token_ids_and_places_of_media_equal_the_processor(ask_processor, tmp_path_factory, name):
    case = CASES[name]
    rules = load_family(case.family, case.config, {"video_frames": 4} if case.family == "internvl" else {})
    path = tmp_path_factory.mktemp("whole") / "tokenizer.json"
    tokens = dict.fromkeys([*SPECIAL_TOKENS, *case.named.values(), "<|vision_start|>", "<|vision_end|>"])
    train_tokenizer(
        ["the cat sat\nPicture 1: Audio 2: Frame3: <3.5 seconds> user assistant\n"] * 3, path, tuple(tokens)
    )
    path.with_name("t.jinja").write_text(case.template)
    ours = ChatTokenizer(path, rules, str(path.with_name("t.jinja")))
    kinds = sorted(rules.media_tokens)
    part = st.one_of(TEXTS.map(lambda t: ("text", t)), *(st.tuples(st.just(k), SIZES[k]) for k in kinds))
    turn = st.tuples(st.lists(part, max_size=4), TEXTS, TEXTS)

    @settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(turn, min_size=1, max_size=2), st.booleans())
    def compare(turns, with_system):
        messages, given = [{"role": "system", "content": [{"type": "text", "text": "the cat"}]}][: int(with_system)], []
        for drawn, question, answer in turns:
            asked = [p for i, p in enumerate(drawn) if p[0] != "text" or drawn[max(0, i - 1)][0] != "text"]
            asked += [("text", question)] if not asked or asked[-1][0] != "text" else []
            given += [p for p in asked if p[0] != "text"]
            content = [{"type": kind, kind: value if kind == "text" else "a.x"} for kind, value in asked]
            messages += [{"role": "user", "content": content}]
            messages += [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
        sample = parse_row({"messages": messages}, 0)
        num_images = sum(kind == "image" for kind, _ in given)
        layouts = [rules.place(header(kind, size), num_images).layout for kind, size in given]
        ours.check(sample)
        sizes = {key: [size for kind, size in given if key.startswith(kind)] for key in ("images", "videos", "audio")}
        said = ask_processor(
            case.family, options=options_of(case, rules), tokenizer=str(path), named=case.named,
            template=case.template, messages=messages, **sizes,
        )  # fmt: skip
        encoded = encode(ours, sample, layouts)
        assert said.get("error") is None
        assert encoded.input_ids.tolist() == said["ids"]
        rows = [sum(entry for entry in layout if isinstance(entry, int)) for layout in layouts]
        assert encoded.num_text_tokens + sum(rows) == len(said["ids"])
        assert [len(where) for where in encoded.media_positions] == rows

    compare()
