import io
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dflop.errors import ConfigError
from dflop.report.data_plots import Profile, print_plots, save_plots

RNG = np.random.default_rng(0)
GROUPS = ["text", "single_image", "video"]


def profile(num_samples: int = 300, *encoders: str) -> Profile:
    group = [GROUPS[i % 3] for i in range(num_samples)]
    llm = np.maximum(1, RNG.lognormal(5, 1, num_samples)).astype(np.int64)
    work = {e: np.where(np.arange(num_samples) % 3 > 0, llm * 4, 0) for e in encoders}
    return Profile("rows.jsonl, a family", group, {**work, "llm": llm}, np.ones(num_samples))


def shown(drawn: Profile) -> list[str]:
    out = io.StringIO()
    print_plots(drawn, Console(file=out, width=100))
    return out.getvalue().splitlines()


def test_bars_hold_every_sample_once() -> None:
    drawn = profile(300, "vision")
    lines = shown(drawn)
    llm = lines[lines.index(next(line for line in lines if line.startswith("llm:"))) + 1 :]
    bars = llm[: llm.index("")]
    assert sum(int(line.split()[-1]) for line in bars) == 300
    assert max(line.count("█") for line in bars) == 40
    assert any(line.startswith("vision: 200 samples") for line in lines)


def test_bars_are_as_long_as_the_mixture_draws() -> None:
    llm = np.array([100] * 4 + [1000])
    lines = shown(Profile("t", ["text"] * 5, {"llm": llm}, np.array([0.25] * 4 + [4.0])))
    assert [line.split()[-1] for line in lines if " - " in line] == ["1", "0", "0", "4"]


@pytest.mark.parametrize(("name", "drawn"), [("three.svg", profile(9, "audio", "vision")), ("none.png", profile(0))])
def test_files_are_drawn_whatever_there_is(name: str, drawn: Profile, tmp_path: Path) -> None:
    path = tmp_path / name
    save_plots(drawn, path)
    if path.suffix == ".svg":
        assert ET.parse(path).getroot().tag.endswith("svg")
    else:
        assert np.asarray(Image.open(path)).size
    shown(drawn)
    with pytest.raises(ConfigError, match=r"cannot draw a `\.docx` file"):
        save_plots(drawn, tmp_path / "x.docx")
