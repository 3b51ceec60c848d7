from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dflop.launch import tail
from dflop.launch.tail import last_lines, new_lines


@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=12), max_size=40),
    st.integers(0, 45),
    st.integers(1, 64),
)
def test_the_last_lines_are_those_of_the_whole_file(tmp_path_factory, lines, num_lines, block):
    path = tmp_path_factory.mktemp("logs") / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    before, tail.BLOCK_BYTES = tail.BLOCK_BYTES, block
    try:
        text, offset = last_lines(path, num_lines)
    finally:
        tail.BLOCK_BYTES = before
    assert text == "".join(f"{line}\n" for line in lines[len(lines) - min(num_lines, len(lines)) :])
    assert offset == path.stat().st_size


def test_what_is_added_comes_once_and_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert (last_lines(path, 5), new_lines(path, 0)) == (("", 0), ("", 0, 0))
    path.write_text("one\ntwo\nthr")
    text, offset = last_lines(path, 1)
    assert text == "two\n"
    with path.open("a") as file:
        file.write("ee\nfo")
    text, offset, _ = new_lines(path, offset)
    assert text == "three\n"
    assert new_lines(path, offset) == ("", offset, 0)
    path.write_text("anew\n")
    assert new_lines(path, offset + 100) == ("anew\n", 5, 0)
