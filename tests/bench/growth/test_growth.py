from __future__ import annotations

import json
import math
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.growth import __main__ as command
from tests.bench.growth.measure import MeasureError, in_a_process, measured
from tests.bench.growth.page import tables
from tests.bench.growth.part import Growth, Part, Point, exponent
from tests.bench.growth.parts import PARTS
from tests.bench.growth.plot import save

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def own_server() -> Iterator[None]:
    """A process has one server that forks: with what it imported for parts, ranks of later tests would import torch."""
    yield
    forkserver._forkserver._stop()  # there for tests; nothing public ends it


def growth(*cpu_s: float, peaks: tuple[int, ...] = (), bound: float = 1.0, name: str = "part by size") -> Growth:
    """Of sizes 1, 10, 100."""
    peaks = peaks or (0,) * len(cpu_s)
    points = tuple(Point(10**i, s, s, peak) for i, (s, peak) in enumerate(zip(cpu_s, peaks, strict=True)))
    return Growth(name, "a pass over samples", bound, 1.0, points)


def test_an_exponent_is_that_of_the_last_step() -> None:
    assert exponent([1, 10, 100], [1.0, 1.0, 100.0]) == pytest.approx(2.0)
    assert exponent([1, 10], [3.0, 30.0]) == pytest.approx(1.0)
    assert exponent([1], [3.0]) is None
    assert exponent([1, 10], [0.0, 3.0]) is None


def test_a_part_is_above_when_time_or_memory_is() -> None:
    assert not growth(1, 2, 24).is_above, "within the tolerance"
    assert growth(1, 2, 26).is_above
    assert not growth(1, 2, 26, bound=1.1).is_above
    assert growth(1, 1, 1, peaks=(1, MIB, 100 * MIB)).is_above
    assert growth(1, 1, 1, peaks=(1, 1, 15 * MIB)).memory_exponent is None, "too little to tell"
    assert growth(1).excess == -math.inf


def test_parts_have_names_of_their_own_and_sizes_ten_times_as_large() -> None:
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for part in PARTS:
        assert " by " in part.name
        assert part.why
        assert [b / a for a, b in zip(part.sizes[:-1], part.sizes[1:], strict=True)] == [10.0] * (len(part.sizes) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_part_runs_at_its_smallest_size(part: Part, tmp_path: Path) -> None:
    work = part.prepare(part.sizes[0], tmp_path)
    work()
    if not part.is_once:
        work()


def test_what_a_work_takes_is_measured_and_what_prepares_it_is_not(tmp_path: Path) -> None:
    prepared = []

    def prepare(size: int, folder: Path):
        assert list(folder.iterdir()) == []
        (folder / "used").touch()
        prepared.append(bytes(256 * MIB))
        prepared.clear()
        return lambda: sum(bytearray(size))

    point = measured(Part("sum by bytes", (1, 10), prepare, 1.0, "", is_once=True), 32 * MIB, tmp_path)
    assert 0 < point.cpu_s <= point.wall_s + 0.1
    assert 31 * MIB < point.peak_bytes < 128 * MIB


def test_a_part_is_measured_in_a_process_of_its_own() -> None:
    part = next(part for part in PARTS if part.name == "order of an epoch by samples")
    point = in_a_process(part, 10_000, 60)
    assert (point.size, point.cpu_s > 0) == (10_000, True)
    with pytest.raises(MeasureError, match="must be positive"):
        in_a_process(part, -1, 60)
    with pytest.raises(MeasureError, match="not done after 0 s"):
        in_a_process(part, 10_000, 0)


def test_the_command_tells_the_worst_first_in_table_json_page_and_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured_s = {"padded balance by samples": 0.001, "lower bound by buckets": 0.000001}

    def measure(part: Part, size: int, limit_s: float) -> Point:
        return Point(size, measured_s[part.name] * size**2, 1.0, 20 * size * MIB)

    monkeypatch.setattr(command, "in_a_process", measure)
    monkeypatch.setattr(
        "sys.argv",
        ["growth", "--part", *measured_s, "--json", str(tmp_path / "g.json"), "--plot", str(tmp_path / "g.svg")],
    )
    command.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["part", "sizes"]
    assert [row.endswith("ABOVE") for row in rows] == [True, True]
    content = json.loads((tmp_path / "g.json").read_text())
    assert {"cpu", "numpy", "dflop", "date"} <= content["machine"].keys()
    assert [f["exponent"] for f in content["figures"]] == pytest.approx([2.0, 2.0])
    (table,) = tables(content).values()
    assert table.splitlines()[2].startswith("| **padded balance by samples** | 256 to 2,560 | ")
    assert {row.count("|") for row in table.splitlines()} == {9}
    drawing = (tmp_path / "g.svg").read_text()
    ElementTree.fromstring(drawing)
    assert all(f"{name}" in drawing for name in measured_s)
    assert "2.00 of 1.2" in drawing


def test_what_cannot_be_measured_is_told_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(part: Part, size: int, limit_s: float) -> Point:
        if part.name.startswith("first fit"):
            raise MeasureError("not done after 60 s")
        return Point(size, 1e-6 * size, 1.0, 0)

    monkeypatch.setattr(command, "in_a_process", measure)
    monkeypatch.setattr(
        "sys.argv", ["growth", "--part", "first fit", "lower bound", "--json", str(tmp_path / "g.json")]
    )
    with pytest.raises(SystemExit, match="not measured: first fit by samples"):
        command.main()
    assert "NOT MEASURED at 1000: not done" in capsys.readouterr().out
    (table,) = tables(json.loads((tmp_path / "g.json").read_text())).values()
    assert "not measured: at 1000: not done after 60 s" in table


def test_a_plot_marks_time_and_memory_apart_and_is_the_same_each_time(tmp_path: Path) -> None:
    found = [growth(1, 3, 12, peaks=(MIB, 20 * MIB, 100 * MIB)), growth(1, 1, 1, name="other by size"), growth(1)]
    for name in ("a", "b"):
        save(found, tmp_path / f"{name}.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "stroke-dasharray" in text
    assert text.count("other by size") == 1
