"""Which keys of a row, a message and a part are followed, which may be ignored, and which would change what is learnt.

A key in `REFUSED`, or of the form of `MASK` or `EXTENT`, means something to a trainer or a processor that people write
their rows for (qwen-vl-utils, ms-swift, LLaMA-Factory, TRL, axolotl, torchtune, NeMo, OpenAI) and nothing here: its row
is quarantined with the key in the reason. A key in no table is counted and reported, and the row is trained on.
`dataset.ignored_keys` adds to `IGNORED`. Neither hides media: see `ledger.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from dflop.data.annotations import MEDIA_KINDS, BadSample, printable
from dflop.data.media_value import is_media, is_media_like

LISTS = ("conversations", "messages", "texts")
ASKS = ("instruction", "prompt", "query", "question")
ANSWERS = ("output", "completion", "response", "answer")
CAPTIONS = ("text", "caption", "sentence", "transcription", "transcript")
"""Keys of a caption, which is the answer in a row with media and no conversation."""
CONVERSATION_KEYS = (*LISTS, *ASKS, *CAPTIONS)
"""A row has one of these; where it has several, the first counts, and of `ASKS` it has one alone."""
MEDIA_KEYS = tuple(key for kind in MEDIA_KINDS for key in (kind, f"{kind}s"))
INVERSE_MARKS = ("masked", "is_masked")
LOSS_MARKS = ("loss", "train", "loss_weight", "loss_scale", "weight", *INVERSE_MARKS)
BESIDE_QUESTIONS = ("context", "passage", "choices", "options", "hint", "lecture")
"""Refused in a row with one of `ASKS`, where they are part of the question."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FOLLOWED: Mapping[str, frozenset[str]] = {
    "row": frozenset(("id", "system", "system_prompt", *CONVERSATION_KEYS, *ANSWERS, "input", "history", *MEDIA_KEYS)),
    "message": frozenset(("role", "from", "content", "value", "user", "assistant", *LOSS_MARKS)),
    "part": frozenset(
        (
            *_words("type text value path url source data base64 bytes format"),
            *(key for kind in MEDIA_KINDS for key in (kind, f"{kind}_url", f"input_{kind}")),
        )
    ),
}
"""Keys that are read, by where they stand."""

_MEANINGS = {
    "tool calls": """tools functions tool_choice tool_calls tool_call function_call tool_call_id
        tool_responses tool_response tool_results parallel_tool_calls observation documents""",
    "selection of frames or of a part of a recording": """fps sample_fps raw_fps video_fps nframes num_frames
        min_frames max_frames fps_min_frames fps_max_frames video_maxlen frames frame_indices video_metadata
        clip clips array use_audio_in_video""",
    "resizing or cropping of an image": """min_pixels max_pixels total_pixels resized_height resized_width
        image_min_pixels image_max_pixels video_min_pixels video_max_pixels video_total_pixels detail min_dynamic_patch
        max_dynamic_patch max_num crop crop_box mm_processor_kwargs""",
    "loss masks and weights": """loss train loss_weight loss_scale weight sample_weight training train_detail eot
        labels input_ids token_type_ids""",
    "reasoning before the answer": """reasoning_content reasoning reasoning_details thinking thinking_blocks
        thinking_budget thought thoughts think enable_thinking chat_template chat_template_kwargs""",
    "preference data": """chosen rejected rejected_response rejected_responses rejected_messages
        rejected_images rejected_videos rejected_audios positive positives positive_messages negative negatives
        negative_messages label kto_tag margin ranking completions chosen_response preference""",
    "boxes and points": "objects bbox bboxes bbox_2d box boxes point points point_2d ref mask masks segmentation",
    "speaker, recipient, or continuation of an answer": "name recipient channel refusal prefix partial system_message",
    "media under another name": """image_path image_paths image_file image_files image_bytes image_base64 img imgs
        picture pictures video_path video_paths video_file audio_path audio_paths audio_file jpg jpeg png webp mp4 wav
        mp3 flac pixel_values""",
}
REFUSED: Mapping[str, str] = {key: meaning for meaning, keys in _MEANINGS.items() for key in _words(keys)}
"""What a key that is not followed says."""

MASK = re.compile(
    r"(.*_)?(loss|(un)?mask(s|ed|ing)?|(roles|turns)?_?(to|no|not|dont|do_not)_train|train_(on|only|last)"
    r"|trainable|((token|turn|message|answer|example)_)?weights|(only|on)_last|last_(turn_)?only)(_.*)?"
)
"""Keys that say which tokens are learnt."""
_MASKS_AS_HERE = re.compile(
    r"(?P<yes>mask_(the_)?(prompt|input|question|instruction|user|system|query)s?|(.*_)?only_loss|eot)"
    r"|(?P<no>(.*_)?train_on_(input|prompt|user|system|question)s?|.*_last(_.*)?|last_.*|mask_history|(is_)?masked)"
)
"""Keys that ask for what dflop does anyway, when true or when false."""

_OF_RECORDING = (
    "((audio|video|clip|media|seg(ment)?|speech|sound|rec(ording)?|wav|chunk|utt(erance)?|frame|time|sample|shot|scene"
    "|event|moment|temporal|crop|trim|cut|span|window|sub|first|last|t(?=_))_?)*"
)
_UNIT = "times?|sec(ond)?s?|s|t|ms|milliseconds?|frames?|at|samples?|points?|stamps?|offset|in|range|span"
EXTENT = re.compile(
    rf"{_OF_RECORDING}(((start|begin|beginning|end|ending|stop|offset|onset|from|to|timestamp|frame)s?"
    rf"(_?({_UNIT}|idx|index|indices|pos(ition)?))*)|((segment|span|interval|trim|window|moment|clip|cut|excerpt|range"
    rf"|bound|boundary|boundaries|timespan|timecode)s?(_?({_UNIT}))*))"
)
"""Keys that say which part of a recording is meant, where a time or the number of a frame stands under them."""
_DURATION = re.compile(rf"{_OF_RECORDING}duration(_?(in_)?(s|secs?|seconds?))?")
_MAX_EXTENT_LENGTH, _MAX_TIME = 40, 1e7
_TIME = re.compile(r"[\d.:,]+\s*(s|ms|sec)?(\s*(-|to)\s*[\d.:,]+\s*(s|ms|sec)?)?")

IGNORED = frozenset(BESIDE_QUESTIONS) | frozenset(
    _words(
        """image_url image_urls video_url video_urls audio_url audio_urls file_name filename file path url urls source
    image_name video_name audio_name original_path ids uid uuid
    idx index key sample_id question_id prompt_id conversation_id dialog_id image_id video_id
    audio_id dataset dataset_name dataset_source data_source source_dataset origin provider split subset
    category categories type task task_type task_name topic domain tags keywords language lang locale license
    licence copyright author title date created created_at updated_at timestamp version model model_name
    generator score scores similarity clip_score aesthetic_score quality difficulty rating ratings
    relevance_ratings relevance_min visual_dependency_ratings visual_dependency_min
    image_correspondence_ratings image_correspondence_min formatting_ratings formatting_min width height
    widths heights image_width image_height image_size original_width original_height resolution size duration
    duration_s sampling_rate sample_rate num_tokens token_count length lengths num_turns metadata meta info
    extra extra_info comment comments note notes status error_message exif md5 sha256 hash phash nsfw punsafe
    pwatermark solution ground_truth answers alt alt_text markdown emotion cache_control mime_type
    media_type cls __key__ __url__ __local_path__ __index_level_0__"""
    )
)
"""Keys that say where a row comes from and what it is like."""
_NO_QUESTION = {**FOLLOWED, "row": FOLLOWED["row"] | {"name", "channel"}}


class KeyReader:
    """Judges the keys of one row.

    Args:
        ignored: Keys that may be ignored besides `IGNORED`.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self.ignored = ignored
        self.unknown: set[str] = set()
        """Keys met that are in no table."""
        self.durations: list[tuple[str, float]] = []
        """Keys that say how long a recording is, and what they say."""

    def check(self, entry: Mapping[str, object], level: str, what: str, kinds: Collection[str] = ()) -> None:
        """Take note of the keys of a row, a message or a part.

        Args:
            entry: It.
            level: One of `FOLLOWED`.
            what: Subject of the reason.
            kinds: Of the media it is about, as far as they are known.

        Raises:
            BadSample: a key that is not followed says how something is learnt, or names media.
        """
        for key, value in self._not_followed(entry, level):
            if key in MEDIA_KEYS:  # of a message or a part; those of a row are followed
                raise BadSample(f"{what} has `{key}`: name media in the row or in a part of their type", key=key)
            if meaning := _meaning(key, value, kinds):
                raise _refusal(printable(key), f"{what} has `{printable(key)}` ({meaning}), which is not supported")
            if isinstance(value, int | float) and value > 0 and _DURATION.fullmatch(_plain(key)):
                self.durations.append((printable(key), float(value)))
            if is_media(value) or (key not in IGNORED and is_media_like(value)):
                raise _refusal(printable(key), f"{what} has media under `{printable(key)}`, which is not read")
            if key not in IGNORED:
                self.unknown.add(printable(key))

    def check_row(self, row: Mapping[str, object], kinds: Collection[str]) -> None:
        """Check that a row means its media as a whole, and that a row without media names none.

        Raises:
            BadSample: a key says which part of a recording is meant, or names media of a row that has none.
        """
        for key, value in self._not_followed(row, "row"):
            if meaning := _meaning(key, value, kinds):
                raise _refusal(printable(key), f"row has `{printable(key)}` ({meaning}), which is not supported")
            if not kinds and _is_name(key, value):
                raise _refusal(key, f"row has no media, but names some under `{printable(key)}`, which is not read")

    def _not_followed(self, entry: Mapping[str, object], level: str) -> Iterator[tuple[str, object]]:
        for key, value in entry.items():
            if key not in _NO_QUESTION[level] and key not in self.ignored and not says_nothing(key, value):
                yield key, value

    def check_columns(self, row: Mapping[str, object], keys: Iterable[str]) -> None:
        """Check that nothing else belongs to the question where question and answer are two columns.

        Raises:
            BadSample: one of these keys holds something.
        """
        for key in keys:
            if key in row and key not in self.ignored and not says_nothing(key, row[key]):
                raise _refusal(key, f"row has `{key}` in addition to its question: write it into the question")


def _meaning(key: str, value: object, kinds: Collection[str]) -> str:
    """What a key that is not followed says; empty: nothing that matters."""
    if key in REFUSED:
        return REFUSED[key]
    plain = _plain(key)
    if key not in IGNORED and MASK.fullmatch(plain) and (not isinstance(value, str) or "train" in plain):
        return "loss masks and weights"
    is_extent = ("audio" in kinds or "video" in kinds) and len(key) <= _MAX_EXTENT_LENGTH and EXTENT.fullmatch(plain)
    return "part of a recording" if is_extent and _is_time(value) else ""


def _plain(key: str) -> str:
    """`startTime` and `start-time` as `start_time`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]", "_", key).lower()


def _is_time(value: object) -> bool:
    """Whether a value is a time or the number of a frame, or consists of some, other than the start and the end."""
    if isinstance(value, str):
        return bool(_TIME.fullmatch(value.strip())) and bool(re.search("[1-9]", value))
    if isinstance(value, list | tuple | dict):
        inner = [v for v in (value.values() if isinstance(value, dict) else value) if v is not None]
        return any(map(_is_time, inner)) and all(v in (0, -1) or _is_time(v) for v in inner)
    return isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, -1) and value < _MAX_TIME


def _is_name(key: str, value: object) -> bool:
    """Whether a value of a row without media names some."""
    if isinstance(value, str) and " " in value.strip():
        return False
    return is_media_like(value) or (key.startswith(MEDIA_KINDS) and "/" in str(value))


def says_nothing(key: str, value: object) -> bool:
    """Whether a key is there in name only: null, empty, or what holds without it."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")):
        return True
    if isinstance(value, Mapping):
        return all(says_nothing("", inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return all(says_nothing("", inner) for inner in value)
    if isinstance(value, bool) and (mask := _MASKS_AS_HERE.fullmatch(_plain(key))):
        return value is (mask["yes"] is not None)
    if key in (*LOSS_MARKS, "sample_weight"):
        return value is True or (not isinstance(value, bool) and value == 1)
    if key == "label":  # of a preference; any other label is a class
        return not isinstance(value, bool)
    return (key == "detail" and value == "auto") or (key in _OFF and value is False)


_OFF = ("use_audio_in_video", "prefix", "partial")


def _refusal(key: str, reason: str) -> BadSample:
    return BadSample(f"{reason}; to ignore the key, add it to dataset.ignored_keys", key=key)


def never_ignored(keys: Iterable[str]) -> list[str]:
    """Keys among these without which there is no row, so that they cannot be ignored."""
    return sorted(set(keys) & (FOLLOWED["row"] | FOLLOWED["message"] - {*LOSS_MARKS}))
