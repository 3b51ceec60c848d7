from dflop.data.annotations import AnnotatedSample, BadSample
from dflop.data.dataset_profile import DatasetRef
from dflop.data.header_cache import HeaderCache
from dflop.data.shapes import ShapeRules, header_of, place, shapes_of
from dflop.data.tokens import ChatTokenizer
from dflop.records import QuarantinedSample, SampleShape
from tests.data.helpers import TinyFamily, chat, encode


def shape(dataset: DatasetRef, family: TinyFamily, index: int = 0, *overlong: str) -> SampleShape | QuarantinedSample:
    tokenizer = ChatTokenizer(dataset.tokenizer, family)
    rules = ShapeRules("key", family, tokenizer, dataset.max_llm_tokens, overlong)
    rows = dataset.open()
    try:
        sample: AnnotatedSample | BadSample = rows.sample(index)
    except BadSample as error:
        sample = error
    (found,) = shapes_of([(index, sample)], rules, HeaderCache(rows).read)
    return found


def test_shape_of_each_kind(write_rows, family, tokenizer):
    row = chat("<image><video><audio> what?", "cat", id="all", image="cat.png", video="clip.mp4", audio="tone.flac")
    dataset = write_rows([row])
    result = shape(dataset, family)
    assert isinstance(result, SampleShape)
    assert [i.num_rows for i in result.items] == [3 * 2, 1 * 3 * 2, 50]
    assert result.num_llm_tokens == result.num_text_tokens + 62
    sample = dataset.open().sample(0)
    layouts = [place(family, header_of(i), 1, 0).layout for i in result.items]
    assert len(encode(tokenizer, sample, layouts).input_ids) == result.num_llm_tokens


def test_a_row_that_says_less_than_its_recording_lasts_means_a_part(write_rows, family):
    part = {"type": "audio", "audio": "tone.flac", "duration": 0.5}
    said = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "ok"}]
    keys = ("duration", "audio_duration", "duration_s", "segmentDuration", "duration_in_seconds")
    rows = [chat("<audio>", "x", audio="tone.flac", **{key: 0.5}) for key in keys] + [{"messages": said}]
    whole = [{"duration": value} for value in (1.9, 2, 2000, "0.5", 0, None)] + [{"num_durations": 0.5}]
    rows += [chat("<audio>", "x", audio="tone.flac", **more) for more in whole]
    rows += [
        chat("<audio><video>", "x", audio="tone.flac", video="clip.mp4", duration=0.1),
        chat("q", "x", duration=0.1),
    ]
    dataset = write_rows([*rows, chat("<image>", "x", image="cat.png", duration=0.1)])
    found = [shape(dataset, family, index) for index in range(len(rows) + 1)]
    for result, key in zip(found[:6], [*keys, "duration"], strict=True):
        assert isinstance(result, QuarantinedSample)
        assert result.reason.startswith(f"`{key}` is 0.5, but the recording lasts 2.0 s")
    assert all(isinstance(result, SampleShape) for result in found[6:])


def test_every_refusal_is_a_row_with_its_reason(write_rows, family):
    long = "cat " * 3000
    cases: list[tuple[object, str, str]] = [
        (chat("<image>", "x", id="gone", image="gone.png"), "gone.png", "image: file not found"),
        (chat("<image>", "x", id="up", image="../up.png"), "../up.png", "media path leaves the media root"),
        (chat("q", "", id="mute"), "", "no supervised tokens: every answer is empty"),
        (chat(long, "x", id="long"), "", "sample too long"),
        (chat("<audio>" * 40, "x", id="many", audio=["tone.flac"] * 41), "", "sample too long"),
        (chat("<image>", "x", id="wrong", image="tone.flac"), "tone.flac", "image: not an image"),
        (chat("<image>", "x", id="extra"), "", "1 <image> placeholders for 0 image files"),
        ('{"id": "cut"', "", "row at byte"),
    ]
    dataset = write_rows([row for row, _, _ in cases])
    for index, (row, path, reason) in enumerate(cases):
        result = shape(dataset, family, index)
        assert isinstance(result, QuarantinedSample)
        assert (result.sample_index, result.path, result.phase) == (index, path, "profile")
        assert result.reason.startswith(reason)
        assert result.sample_id == (row["id"] if isinstance(row, dict) else "")


def test_too_long_is_shrunk_then_cut_and_the_trainer_does_the_same(write_rows, family, tokenizer):
    row = chat("<image><video> what is it?", "the cat sat on the mat " * 4, image="cat.png", video="clip.mp4")
    whole = shape(write_rows([row]), family)
    assert isinstance(whole, SampleShape)
    text = whole.num_text_tokens
    for limit, steps, level, num_cut in (
        (whole.num_llm_tokens, ("shrink", "truncate"), 0, 0),
        (text + 11, ("shrink", "truncate"), 11, 0),
        (text + 11, ("truncate", "shrink"), 0, 1),
        (text, ("shrink", "truncate"), 12, 2),
        (text + 1, ("truncate",), 0, 11),
    ):
        dataset = write_rows([row], max_llm_tokens=limit)
        found = shape(dataset, family, 0, *steps)
        assert isinstance(found, SampleShape), (limit, steps, found)
        assert found.num_llm_tokens <= limit
        assert found.num_llm_tokens == found.num_text_tokens + sum(i.num_rows for i in found.items)
        assert (found.media_level > 0) == (level > 0), (limit, steps, found)
        assert (found.num_cut_tokens > 0) == (num_cut > 0), (limit, steps, found)
        sample = dataset.open().sample(0)
        layouts = [place(family, header_of(i), 1, found.media_level).layout for i in found.items]
        encoded = encode(tokenizer, sample, layouts).cut(found.num_llm_tokens)
        assert len(encoded.input_ids) == found.num_llm_tokens
        assert encoded.num_supervised_tokens == found.num_supervised_tokens
        assert [len(p) for p in encoded.media_positions] == [i.num_rows for i in found.items]


def test_what_no_step_makes_fit_is_left_out(write_rows, family):
    cases = [
        (chat("what?", "cat " * 300), 40, ("shrink",), "sample too long: 3"),
        (chat("cat " * 300, "x"), 40, ("truncate",), "no supervised tokens among the first 40"),
        (chat("<audio>", "x", audio="tone.flac"), 40, ("shrink", "truncate"), "sample too long: 6"),
    ]
    for row, limit, steps, reason in cases:
        found = shape(write_rows([row], max_llm_tokens=limit), family, 0, *steps)
        assert isinstance(found, QuarantinedSample)
        assert found.reason.startswith(reason), found.reason
