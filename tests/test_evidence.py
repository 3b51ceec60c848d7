"""The command that gathers evidence on a GPU, as far as a CPU can tell: how parts end, and the page of a run."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.gpu.drawn import ROOT
from tests.gpu.page import text


def test_parts_that_cannot_run_are_named_on_the_page(tmp_path):
    command = [sys.executable, "-m", "tests.gpu.evidence", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    done = subprocess.run([*command, "--minutes", "0.1", "--part", "copies", "--part", "loop"], cwd=ROOT, check=False)
    ended = {row["part"]: row["outcome"] for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())}
    assert (ended, done.returncode) == ({"copies": "needs CUDA", "loop": "skipped"}, 0)
    assert "| loop | skipped |" in (tmp_path / "page.md").read_text()


def test_a_page_has_predictions_beside_what_was_measured(tmp_path):
    facts = {"hardware": "cuda: NVIDIA H200", "commit": "abc", "command": "python -m tests.gpu.evidence"}
    layer = {"status": "ok", "module": "vision", "forward_s": 2.0, "sheet_forward_s": 1.0, "backward_s": 3.0,
             "sheet_backward_s": 3.0, "activation_bytes": 0, "sheet_activation_bytes": 1.0}  # fmt: skip
    rows = [
        {"part": "tables", **layer}, {"part": "tables", "outcome": "done", "wall_s": 3.0},
        {"part": "layouts", "layout": "inline pp2", "error": "loss of step 0 | differs"},
        {"part": "layouts", "outcome": "failed", "wall_s": 1.0, "last": ["Traceback", "KeyError: 'a'"]},
    ]  # fmt: skip
    (tmp_path / "circumstances.json").write_text(json.dumps(facts))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = text(tmp_path)
    assert "# Evidence: cuda: NVIDIA H200" in page
    assert "| vision layers, forward_s | 1 | 2 | 2.00 | 1 |" in page
    assert "| layouts | failed | 1 | 1 | 1 | Traceback / KeyError: 'a' |" in page
    assert "| inline pp2 | loss of step 0 \\| differs |" in page
