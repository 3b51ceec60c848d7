"""Drawings as parts of a page: valid, the same each time, without styles, and with ids of their own."""

import re
import xml.etree.ElementTree as ET

import pytest
from matplotlib.figure import Figure

from dflop.report import plots
from dflop.report.plots import Picture
from tests.report.runs import HOSTILE


def draw(figure: Figure) -> dict[str, list[str]]:
    axes = figure.subplots()
    axes.plot([1, 2, 3], [1, 4, 9], marker="o", linestyle="--", label=HOSTILE)
    axes.barh(1, 2, hatch="///", facecolor="none", edgecolor="#0072B2", alpha=0.4)
    axes.text(1, 1, 'style="fill: none" <b>', rotation=30, alpha=0.5)
    axes.broken_barh([(0, 1), (2, 1)], (0, 1)).set_gid("bars")
    axes.set_xscale("log")
    axes.grid()
    figure.legend()
    return {"bars": ["<one>", "two"]}


@pytest.fixture(scope="module")
def svgs() -> dict[str, str]:
    return {name: Picture(name, "any", (4.0, 3.0), draw).svg() for name in ("a", "b")}


def test_svg_is_valid_deterministic_and_has_no_date(svgs: dict[str, str]) -> None:
    assert Picture("a", "any", (4.0, 3.0), draw).svg() == svgs["a"]
    for svg in svgs.values():
        root = ET.fromstring(svg)
        assert root.tag.endswith("svg")
        assert root.get("aria-label")
        assert root.get("viewBox")
        assert "metadata" not in svg
        assert plots.INK not in svg


def test_ids_of_several_plots_do_not_collide_and_every_reference_resolves(svgs: dict[str, str]) -> None:
    ids: list[str] = []
    for svg in svgs.values():
        root = ET.fromstring(svg)
        own = {node.get("id") for node in root.iter() if node.get("id")}
        ids += [str(i) for i in own]
        for node in root.iter():
            for value in (node.get("{http://www.w3.org/1999/xlink}href"), node.get("clip-path")):
                target = (value or "").removeprefix("url(").removesuffix(")").removeprefix("#")
                assert not target or target in own
    assert len(ids) == len(set(ids))


def test_texts_and_hints_stay_what_they_are(svgs: dict[str, str]) -> None:
    root = ET.fromstring(svgs["a"])
    assert {'style="fill: none" <b>', HOSTILE} <= {node.text for node in root.iter() if node.text}
    told = [
        (node.tag.split("}")[1], child.text) for node in root.iter() for child in node if child.tag.endswith("}title")
    ]
    assert told == [("path", "<one>"), ("path", "two")]


def test_what_a_style_said_an_attribute_says(svgs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not re.search(r"<[^<>]*\sstyle=", svgs["a"])
    assert "<style" not in svgs["a"]
    monkeypatch.setattr(plots, "_attributes", lambda style: f' style="{style}"')
    given = Picture("a", "any", (4.0, 3.0), draw).svg()
    for name in ("fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "fill-opacity"):
        told = re.findall(rf"[\" ;]{name}: ([^;\"]+)", given)
        assert sorted(re.findall(rf' {name}="([^"]+)"', svgs["a"])) == sorted(told), name


def test_what_no_attribute_can_say_is_refused() -> None:
    with pytest.raises(ValueError, match="mix-blend-mode: multiply"):
        plots._attributes("fill: #000000; mix-blend-mode: multiply")
