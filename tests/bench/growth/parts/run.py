"""A run's books: journal, watcher, report, trace."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dflop.launch.job import JobHandle, JobState, JobStatus
from dflop.launch.journal import Journal
from dflop.launch.watch import SlurmWatcher
from dflop.records import LLM, Plan, StepObservation
from dflop.report.html import render_report
from dflop.report.steps import measured_steps
from dflop.report.summary import summarise
from dflop.report.trace import TracedStep, chrome_trace
from tests.bench.growth.part import Part, Work
from tests.builders import make_cluster, make_plan
from tests.report.detailed import SPLIT, batch_of, observe_step, plan_step, spans_of
from tests.report.runs import make_run

NOW_S = 1.79e9


def handles(size: int, folder: Path) -> list[JobHandle]:
    """The elements of an array."""
    return [JobHandle("slurm", f"7_{i}", "job", f"key-{i}", folder, 1, NOW_S) for i in range(size)]


def noted_together(size: int, folder: Path) -> Work:
    jobs = handles(size, folder)

    def work() -> None:
        journal = Journal(folder, "run")
        journal.submitted(*jobs)
        journal.changes([(job, JobStatus(JobState.RUNNING)) for job in jobs])

    return work


def noted_one_by_one(size: int, folder: Path) -> Work:
    """Changes of state that are seen one after the other, as those of a long run are."""
    jobs = handles(size, folder)

    def work() -> None:
        journal = Journal(folder, "run")
        journal.submitted(*jobs)
        for job in jobs:
            journal.changed(job, JobStatus(JobState.RUNNING))

    return work


def read_journal(size: int, folder: Path) -> Work:
    Journal(folder, "run").submitted(*handles(size, folder))

    def work() -> None:
        journal = Journal(folder, "run")
        for job in handles(size, folder):
            journal.live(job.key)

    return work


def watched(size: int, folder: Path) -> Work:
    jobs = handles(size, folder)
    submitted = time.strftime("%s", time.localtime(NOW_S))
    text = "\n".join(f"{job.job_id}|RUNNING|{submitted}|N/A|None|job" for job in jobs)

    def command(args: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 0, text, "")

    def work() -> None:
        found = SlurmWatcher(poll_interval_s=0.0, command=command, now=lambda: NOW_S)
        found.submitted(jobs)
        found.statuses(jobs)

    return work


def steps_of(plan: Plan, num_steps: int) -> list[list[StepObservation]]:
    """Observations of steps; a few are simulated, and then come again."""
    batches = [batch_of(number, 4 * plan.num_microbatches) for number in range(4)]
    known = [observe_step(plan, plan_step(plan, b, i, "quick", "run"), b) for i, b in enumerate(batches)]
    return [
        [replace(seen, step=i, observed_at_s=1000.0 + i) for seen in known[i % len(known)]] for i in range(num_steps)
    ]


def report(plan: Plan, num_steps: int) -> Work:
    seen = [row for step in steps_of(plan, num_steps) for row in step]

    def work() -> None:
        summary = summarise(
            run=make_run(), cluster=make_cluster(plan.num_processes, num_cores=64), plan=plan, candidates=[plan],
            train=seen, compare=[], compare_plans=[], corrections=[],
        )  # fmt: skip
        render_report(summary)

    return work


def report_by_steps(size: int, _folder: Path) -> Work:
    return report(SPLIT, size)


def report_by_ranks(size: int, _folder: Path) -> Work:
    return report(replace(SPLIT, modules=make_plan({"vision": size, LLM: size}).modules), 20)


def trace_by_steps(size: int, _folder: Path) -> Work:
    batch = batch_of(0)
    given = plan_step(SPLIT, batch, 0, "quick", "run")
    seen = observe_step(SPLIT, given, batch)
    spans = tuple(span for rank in seen for span in spans_of(SPLIT, rank))
    steps = []
    for number in range(size):
        ranks = [replace(rank, step=number, observed_at_s=1000.0 + number) for rank in seen]
        (step,) = measured_steps(ranks)
        steps.append(TracedStep(step, SPLIT, replace(given, step=number), spans))
    return lambda: chrome_trace("run", steps)


def trace_by_ranks(size: int, _folder: Path) -> Work:
    plan = replace(SPLIT, modules=make_plan({"vision": size, LLM: size}).modules)
    batch = batch_of(0, 4 * size)
    given = plan_step(plan, batch, 0, "quick", "run")
    seen = observe_step(plan, given, batch)
    (step,) = measured_steps(seen)
    traced = TracedStep(step, plan, given, tuple(span for rank in seen for span in spans_of(plan, rank)))
    return lambda: chrome_trace("run", [traced])


PARTS = (
    Part("journal of jobs noted together by jobs", (50, 500, 5_000), noted_together, 1.0, "a line per job", 1.0, True),
    Part("journal of jobs noted one by one by jobs", (50, 500, 5_000), noted_one_by_one, 1.0,
         "a line per change; what was read is kept", 1.0, True),
    Part("journal read by jobs", (50, 500, 5_000), read_journal, 1.0, "a line per job"),
    Part("watcher by jobs", (50, 500, 5_000), watched, 1.0, "a row per job"),
    Part("report by steps", (20, 200, 2_000), report_by_steps, 1.0, "a point per step"),
    Part("report by ranks", (2, 20, 200), report_by_ranks, 1.0, "a row per rank"),
    Part("trace by steps", (2, 20, 200), trace_by_steps, 1.0, "an event per span"),
    Part("trace by replicas", (2, 20, 200), trace_by_ranks, 1.0, "an event per span"),
)  # fmt: skip
