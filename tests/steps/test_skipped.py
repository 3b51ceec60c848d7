import pytest

from dflop.records import QuarantinedSample
from dflop.steps.profiling import hint_for, skipped_text


def bad(index: int, reason: str) -> QuarantinedSample:
    return QuarantinedSample("key", index, f"id{index}", "profile", "", reason)


LONG = [bad(n, f"sample too long: {tokens} tokens > max_llm_tokens 8192") for n, tokens in enumerate((8195, 21597))]
BROKEN = [bad(7, "truncated JPEG: 812 of 4096 bytes"), bad(9, "truncated JPEG: 5 of 70 bytes"), bad(8, "no answer")]


def test_the_limit_its_key_and_the_longest_row_are_named() -> None:
    first, second, third = skipped_text([*LONG, *BROKEN], 2000)
    assert first.startswith(
        "dataset.max_llm_tokens: 8192; 2 of 2000 rows are longer (8,195 to 21,597 tokens) and skipped; raise"
    )
    assert "dataset.overlong: [shrink]" in first
    assert second == "2 of 2000 rows are skipped, first row 7: truncated JPEG: 812 of 4096 bytes"
    assert third == "1 of 2000 rows are skipped, first row 8: no answer"
    assert skipped_text([], 5) == []


def test_many_reasons_are_summed_up() -> None:
    lines = skipped_text([bad(n, "x" * n) for n in range(1, 9)], 10)
    assert lines[-1] == "3 rows are skipped for other reasons: dflop sql quarantine"


@pytest.mark.parametrize(("found", "key"), [(LONG, "dataset.overlong"), (BROKEN, "data_profile.max_bad_frac")])
def test_the_hint_is_that_of_most_rows(found: list[QuarantinedSample], key: str) -> None:
    assert key in hint_for(found)
