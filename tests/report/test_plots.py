from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from dflop.report import plots
from tests.report.runs import realistic


def render() -> dict[str, str]:
    summary = realistic()
    assert summary.comparison is not None
    return {"loss": plots.loss_curve(summary.steps), "bars": plots.step_time_bars(summary.comparison)}


@pytest.fixture(scope="module")
def svgs() -> dict[str, str]:
    return render()


def test_svg_is_valid_deterministic_and_has_no_date(svgs: dict[str, str]) -> None:
    assert render() == svgs
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
