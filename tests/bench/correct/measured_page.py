"""Corrections and re-planning in real jobs, for documents; all of it is measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.bench.markdown import percent, ratio, table


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """`correct-measured`: step time without over with, a row per job; what it takes."""
    rows = [*_sizes(content["real"]), *_ranks(content["slow_rank"]), _replanned(content["replan"])]
    head = ("what is wrong", "step time without / with, paired", "more")
    return {"correct-measured": f"{table(head, rows)}\n\n{_costs(content['overhead'])}"}


def _sizes(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    slow = found["slow"]
    share = percent(slow["shares"][1] - slow["shares"][0])
    for one in found["seeds"]:
        gain = one["wall"]["off_over"]
        stderr = gain["auto"]["sd"] / (found["num_steps"] - found["first_counted_step"]) ** 0.5
        yield (
            f"items of {share} of the LLM's seconds take {slow['factor']:g}x, seed {one['seed']}",
            f"{ratio(gain['auto']['mean'])} ±{stderr:.2f}",
            f"an oracle's plans {ratio(gain['oracle']['mean'])}; acted on from step {one['gate_first_on']}",
        )  # fmt: skip


def _ranks(found: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for job in found["jobs"]:
        if "off_over_auto" in job:
            named = [note["step"] - found["slow_from_step"] for note in job["named"]]
            share = job["token_share_of_slow_rank"]
            yield (
                f"one rank of two {job['case']}, seed {job['seed']}",
                _paired(job["off_over_auto"]["wall"]["mean"], job["off_over_auto"]["wall"]["stderr_frac"]),
                f"named {f'{min(named)} steps later' if named else 'never'}; its share of the tokens "
                f"{percent(share['before'])} -> {percent(share['at_last'])}",
            )  # fmt: skip


def _replanned(found: Mapping[str, Any]) -> tuple[str, ...]:
    both = found["act_and_off"]
    first, last = both["paired_steps"]
    decisions = [d for d in found["runs"]["act"]["decisions"] if d["kind"] == "replan" and d["verdict"] == "done"]
    costs = f"; a restart was reckoned at {decisions[0]['cost_s']:.1f} s" if decisions else ""
    return (
        "a mixture that turns from texts to clips, another plan, one run",
        _paired(both["off_over_act"], both["stderr_frac"]),
        f"steps {first} to {last} of {both['step_s']['off']:.1f} s and {both['step_s']['act']:.1f} s; losses differ by "
        f"{both['largest_relative_difference_of_losses']:.1g}{costs}",
    )


def _paired(mean: float, stderr_frac: float) -> str:
    return f"{ratio(mean)} ±{mean * stderr_frac:.2f}"


def _costs(found: Mapping[str, Any]) -> str:
    jobs = [job for job in found["jobs"] if job["corrections"] == "auto"]
    seconds = found["scheduler_s"]
    return (
        f"± is the standard error over steps. Watching takes {1e6 * found['rank_s']:.0f} us of a rank's step, learning "
        f"{100 * jobs[0]['learning_frac']:.1f} % of a step in the process beside training; with 16 ranks of 32 "
        f"microbatches {1e3 * seconds['observe']:.1f} ms a step, and {1e3 * seconds['read_gate']:.0f} ms for a reading "
        "of the gate."
    )  # fmt: skip
