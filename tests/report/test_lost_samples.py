import io

import pytest
from rich.console import Console

from dflop.records import QuarantinedSample
from dflop.report.summary import RunSummary
from dflop.report.terminal import markdown_summary, print_summary
from tests.builders import make_cluster, make_plan
from tests.report.runs import make_run


def bad(index: int, phase: str, path: str = "a.mp4") -> QuarantinedSample:
    return QuarantinedSample(
        profile_key="k", sample_index=index, sample_id=f"s{index}", phase=phase, path=path, reason="ends after 9 frames"
    )


@pytest.mark.parametrize(
    ("quarantined", "num_lost"),
    [
        ([], 0), ([bad(1, "profile"), bad(2, "profile")], 0), ([bad(1, "profile"), bad(7, "train")], 1),
        ([bad(7, "train", "b.mp4"), bad(3, "train"), bad(7, "train", "c.mp4")], 2),
    ],
)  # fmt: skip
def test_a_run_that_lost_what_the_profile_called_good_says_so_and_warns(quarantined, num_lost) -> None:
    plan = make_plan({"vision": 2, "llm": 1})
    found = RunSummary(run=make_run(), cluster=make_cluster(), plan=plan, train=[], quarantined=quarantined)
    out = io.StringIO()
    print_summary(found, Console(file=out, width=300, no_color=True))
    assert ("that the data profile had accepted" in found.verdict) == bool(num_lost)
    assert bool(found.warning) == bool(num_lost)
    if num_lost:
        first = min(q.sample_index for q in quarantined if q.phase == "train")
        assert f"Training skipped {num_lost} sample(s)" in found.verdict
        for text in (out.getvalue(), markdown_summary(found).replace("\\", "")):
            assert f"Warning: {num_lost} sample(s) that the data profile had accepted" in text
            assert f"s{first}` (a.mp4): ends after 9 frames" in text
