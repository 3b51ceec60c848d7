"""Which keys of a row, a message and a part are followed, which may be ignored, and which would change what is learnt.

A key in `REFUSED` means something to a trainer or a processor that people write their rows for (qwen-vl-utils,
ms-swift, LLaMA-Factory, TRL, axolotl, OpenAI) and nothing here: its row is quarantined with the key in the reason. A
key in no table is counted and reported, and the row is trained on. `dataset.ignored_keys` adds to `IGNORED`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dflop.data.annotations import MEDIA_KINDS, BadSample, printable
from dflop.data.media_value import is_media_like

LISTS = ("conversations", "messages", "texts")
ASKS = ("instruction", "prompt", "query", "question")
ANSWERS = ("output", "completion", "response", "answer")
CONVERSATION_KEYS = (*LISTS, *ASKS, "text")
"""A row has one of these; where it has several, the first counts, and of `ASKS` it has one alone."""
MEDIA_KEYS = tuple(key for kind in MEDIA_KINDS for key in (kind, f"{kind}s"))
LOSS_MARKS = ("loss", "train", "loss_weight", "loss_scale", "weight")
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
        video_start video_end audio_start audio_end start end start_time end_time start_sec end_sec clip clips array
        use_audio_in_video""",
    "resizing or cropping of an image": """min_pixels max_pixels total_pixels resized_height resized_width
        image_min_pixels image_max_pixels video_min_pixels video_max_pixels video_total_pixels detail min_dynamic_patch
        max_dynamic_patch max_num crop crop_box mm_processor_kwargs""",
    "loss masks and weights": """loss train loss_weight loss_scale weight sample_weight training train_detail
        train_on_turn loss_mask mask_history labels input_ids attention_mask token_type_ids assistant_masks
        completion_mask""",
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

_ORIGINS = _words(
    """image_url image_urls video_url video_urls audio_url audio_urls file_name filename file path url urls source
    image_name video_name audio_name original_path"""
)
_NAMING = frozenset((*_ORIGINS, *BESIDE_QUESTIONS))
IGNORED = _NAMING | frozenset(
    _words(
        """ids uid uuid idx index key sample_id question_id prompt_id conversation_id dialog_id image_id video_id
    audio_id dataset dataset_name dataset_source data_source source_dataset origin provider split subset
    category categories type task task_type task_name topic domain tags keywords language lang locale license
    licence copyright author title date created created_at updated_at timestamp version model model_name
    generator score scores similarity clip_score aesthetic_score quality difficulty rating ratings
    relevance_ratings relevance_min visual_dependency_ratings visual_dependency_min
    image_correspondence_ratings image_correspondence_min formatting_ratings formatting_min width height
    widths heights image_width image_height image_size original_width original_height resolution size duration
    duration_s sampling_rate sample_rate num_tokens token_count length lengths num_turns metadata meta info
    extra extra_info comment comments note notes status error_message exif md5 sha256 hash phash nsfw punsafe
    pwatermark solution ground_truth answers caption alt alt_text markdown emotion cache_control mime_type
    media_type cls __key__ __url__ __local_path__ __index_level_0__"""
    )
)
"""Keys that say where a row comes from and what it is like."""
_IGNORED_OF_ROWS = ("name", "channel")


class KeyReader:
    """Judges the keys of one row.

    Args:
        ignored: Keys that may be ignored besides `IGNORED`.
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self.ignored = ignored
        self.unknown: set[str] = set()
        """Keys met that are in no table."""

    def check(self, entry: Mapping[str, object], level: str, what: str) -> None:
        """Take note of the keys of a row, a message or a part.

        Args:
            entry: It.
            level: One of `FOLLOWED`.
            what: Subject of the reason.

        Raises:
            BadSample: a key that is not followed says how something is learnt, or names media.
        """
        for key, value in entry.items():
            if key in FOLLOWED[level] or key in self.ignored or says_nothing(key, value):
                continue
            if level == "row" and key in _IGNORED_OF_ROWS:
                continue
            if key in MEDIA_KEYS:  # of a message or a part; those of a row are followed
                raise BadSample(f"{what} has `{key}`: name media in the row or in a part of their type", key=key)
            if key in REFUSED:
                raise _refusal(key, f"{what} has `{key}` ({REFUSED[key]}), which is not supported")
            if key not in IGNORED:
                if is_media_like(value):
                    raise _refusal(printable(key), f"{what} has media under `{printable(key)}`, which is not read")
                self.unknown.add(printable(key))

    def check_media(self, row: Mapping[str, object]) -> None:
        """Of a row that no media were found for: that none are meant either.

        Raises:
            BadSample: a key that says where media come from holds a name.
        """
        for key in sorted(row.keys() & set(_ORIGINS) - set(self.ignored)):
            value = row[key]
            if is_media_like(value) or (key.startswith(MEDIA_KINDS) and not says_nothing(key, value)):
                raise _refusal(key, f"row has no media, but names some under `{key}`, which is not read")

    def check_columns(self, row: Mapping[str, object], keys: Iterable[str]) -> None:
        """Of a question and its answer in two columns: that nothing else belongs to the question.

        Raises:
            BadSample: one of these keys holds something.
        """
        for key in keys:
            if key in row and key not in self.ignored and not says_nothing(key, row[key]):
                raise _refusal(key, f"row has `{key}` in addition to its question: write it into the question")


def is_looked_at(key: str, ignored: Collection[str]) -> bool:
    """Whether the value of a row's key matters: it is followed, or may be a reason against the row."""
    return key not in ignored and (key not in IGNORED or key in FOLLOWED["row"] or key in _NAMING)


def says_nothing(key: str, value: object) -> bool:
    """Whether a key is there in name only: null, empty, or what holds without it."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")):
        return True
    if isinstance(value, Mapping):
        return all(says_nothing("", inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return all(says_nothing("", inner) for inner in value)
    if key in (*LOSS_MARKS, "sample_weight"):
        return value is True or (not isinstance(value, bool) and value == 1)
    if key == "label":  # of a preference; any other label is a class
        return not isinstance(value, bool)
    return (key == "detail" and value == "auto") or (key in _OFF and value is False)


_OFF = ("use_audio_in_video", "prefix", "partial", "mask_history")


def _refusal(key: str, reason: str) -> BadSample:
    return BadSample(f"{reason}; to ignore the key, add it to dataset.ignored_keys", key=key)


def never_ignored(keys: Iterable[str]) -> list[str]:
    """Those of some keys without which there is no row, so that they cannot be ignored."""
    return sorted(set(keys) & (FOLLOWED["row"] | FOLLOWED["message"] - {*LOSS_MARKS}))
