"""The bench of the engine runs, and says of made-up seconds what they mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.engine import __main__ as bench
from tests.bench.engine.overhead import COPIES, MODULES, RECEIVE, SEND, Ledger, Step, overhead
from tests.bench.engine.race import Seen, mean_step_s, ratio
from tests.bench.engine.samples import drawn
from tests.bench.engine.stall import Stall, figures

ROOT = Path(__file__).parents[3]


def _rounds(engine_s: float, *, loss: float = 3.0) -> list:
    """Two processes, two batches, an uncounted and two counted rounds: `plain` takes 1 s and 2 s."""

    def ranks(wall_s: float, losses: tuple[float, float]) -> list[Seen]:
        return [Seen(wall_s, wall_s / 2, losses[0]), Seen(0.9 * wall_s, wall_s, losses[1])]

    batches = [{"plain": ranks(s, (1.0, 2.0)), "engine": ranks(s * engine_s, (loss, 0.0))} for s in (1.0, 2.0)]
    uncounted = [{name: [Seen(99.0, 1.0, s.loss) for s in seen] for name, seen in b.items()} for b in batches]
    return [uncounted, batches, batches]


def test_a_ratio_is_that_of_the_slowest_processes() -> None:
    found = ratio(_rounds(0.5), "plain", "engine")
    assert (found.wall, found.cpu) == pytest.approx((2.0, 2.0))
    assert (found.wall_spread, found.noise_frac) == pytest.approx((1.0, 0.0))
    assert mean_step_s(_rounds(0.5), "engine") == pytest.approx(0.75)


def test_ways_that_compute_something_else_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"`plain` has loss 3\.000000, `engine` 3\.100000"):
        ratio(_rounds(0.5, loss=3.1), "plain", "engine")


def test_the_engines_own_seconds_are_what_no_call_accounts_for() -> None:
    cpu_s = {MODULES: 8.0, RECEIVE: 0.2, SEND: 0.4, COPIES: 0.6}
    step = Step(2, 20.0, 10.0, 11.0, {}, cpu_s, {RECEIVE: 4, SEND: 8})
    found = overhead("vision", [step])
    assert (found.modules_s, found.bookkeeping_s, found.copies_s, found.python_s) == pytest.approx((4, 0.3, 0.3, 0.4))
    assert (found.overhead_frac, found.num_messages) == pytest.approx((0.25, 4.0))


def test_calls_within_calls_are_counted_once() -> None:
    ledger = Ledger()
    copy = ledger.wrap(COPIES, torch.clone)
    module = ledger.wrap(MODULES, lambda x: copy(copy(x)))
    copy(module(torch.zeros(2)))
    assert ledger.num_calls == {MODULES: 1, COPIES: 1}
    assert ledger.cpu_s[MODULES] > 0


def test_a_checkpoints_ratio_is_over_pairs() -> None:
    found = figures(Stall(100, [1.0, 2.0], [4.0, 8.0], [1.0, 1.0], [1.5, 1.5]))
    assert found["synchronous / asynchronous"] == pytest.approx(4.0)
    assert (found["asynchronous_s"], found["step_beside_write_s"]) == (1.5, 1.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_run(tmp_path: Path) -> None:
    """In a process of its own: the allocator's settings count from a process's start, and so for all it starts."""
    figures = tmp_path / "engine.json"
    command = [sys.executable, "-m", "tests.bench.engine", "--tiny", f"--json={figures}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(figures.read_text())
    assert set(bench.PARTS) < set(found)
    for module in found["overhead"]["modules"]:
        assert 0 < module["overhead_s"] < module["modules_s"]
        assert module["num_messages"] > 0
    assert len(found["race"]["ratios"]) == 8
    assert all(r["wall"] > 0 for r in found["race"]["ratios"])
    assert found["stall"]["asynchronous_s"] > 0
    assert "engine overhead per microbatch" in ended.stdout


def test_generated_rows_are_the_same_every_time() -> None:
    first, again = (drawn(None, 2, 4).batches for _ in range(2))
    assert first == again
    assert len({s.sample_index for batch in first for s in batch}) == 8
