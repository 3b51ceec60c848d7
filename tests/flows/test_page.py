from __future__ import annotations

import asyncio
import dataclasses
import time
import types
import uuid
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, temporary_settings

from dflop.jobs.watching import JobProgress, ShowsJobs
from dflop.launch import JobHandle, JobState, JobStatus
from tests.flows.loading import artifacts, flow_run_id, module, run_flow

page_module = module("page")
Page, bar_key, bar_text = page_module.Page, page_module.bar_key, page_module.bar_text


def progress(name: str, state: JobState, step: int = 0, num_steps: int = 0, reason: str = "") -> JobProgress:
    handle = JobHandle("slurm", f"id-{name}", f"demo-{name}", name, Path("/jobs"), 1, 5.0)
    return JobProgress(name, handle, JobStatus(state, reason), step, num_steps)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("train", "dflop-job-train"),
        ("data-3", "dflop-job-data-3"),
        ("data-16", "dflop-job-data-others"),
        ("data-499", "dflop-job-data-others"),
        ("profile-tp2-vision", "dflop-job-profile-tp2-vision"),
        ("reprofile-doubts-7-tp1", "dflop-job-reprofile"),
        ("Odd_name.1", "dflop-job-odd-name-1"),
    ],
)
def test_a_job_has_a_bar(name, key):
    assert bar_key(name) == key


def test_there_are_few_keys_however_many_jobs():
    names = [f"data-{i}" for i in range(500)] + [f"reprofile-{i}-tp{tp}" for i in range(99) for tp in (1, 2)]
    assert len({bar_key(name) for name in names}) == page_module.MAX_BARS + 2


def test_a_bar_says_how_its_job_or_its_jobs_stand():
    one = progress("train", JobState.RUNNING, 12, 40)
    assert bar_text([one]) == "running, step 12 of 40 (train, slurm id-train)"
    waiting = progress("train", JobState.QUEUED, reason="Resources\nand more")
    assert bar_text([waiting]) == "queued, Resources (train, slurm id-train)"
    states = [JobState.DONE, JobState.RUNNING, JobState.DONE]
    assert bar_text([progress(f"data-{20 + i}", s) for i, s in enumerate(states)]) == "2 done, 1 running"


def on_page(work: Any, lines: list[str]) -> tuple[Any, dict[str, list[Any]]]:
    """What a page shows after `work(page)` in a flow, and what is on the page of a flow inside."""

    @flow
    async def outer() -> None:
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        page = Page(context.flow_run.id, lines.append, every_s=0.01)
        assert isinstance(page, ShowsJobs)

        @flow
        async def inner() -> None:
            await work(page)

        await inner()
        await page.close()

    state = run_flow(outer)
    return state, artifacts(flow_run_id(state))


def test_everything_is_on_the_page_of_the_flow_that_was_started(server):
    async def work(page: Any) -> None:
        await page.table("costs", [{"module": "llm", "noise": float("nan")}], "what modules cost")
        await page.table("nothing", [])
        await page.markdown("plan", "first", "why", keeps_old=True)
        await page.markdown("plan", "second", "why not", keeps_old=True)
        await page.markdown("history", "nothing yet")
        await page.markdown("history", "a plan")
        for step in range(0, 41, 10):
            page.job(progress("train", JobState.RUNNING, step, 40))
            await asyncio.sleep(0.05)
        page.job(progress("train", JobState.DONE, 40, 40))
        for i in range(20):
            page.job(progress(f"data-{i}", JobState.DONE if i < 18 else JobState.RUNNING))

    lines: list[str] = []
    _, shown = on_page(work, lines)
    assert lines == []
    assert {"dflop-costs", "dflop-plan", "dflop-job-train", "dflop-job-data-others"} <= set(shown)
    assert len(shown) == 4 + 16 + 1
    assert [a.data for a in shown["dflop-plan"]] == ["first", "second"]
    assert [a.data for a in shown["dflop-history"]] == ["a plan"], "in place of what was shown before"
    assert shown["dflop-costs"][0].data == '[{"module": "llm", "noise": null}]'
    assert [(a.type, a.data, a.description) for a in shown["dflop-job-train"]] == [
        ("progress", 100.0, "done, step 40 of 40 (train, slurm id-train)")
    ], "a bar is changed in place"
    assert (shown["dflop-job-data-others"][0].data, shown["dflop-job-data-others"][0].description) == (
        50.0,
        "2 done, 2 running",
    )


def test_jobs_that_had_not_ended_are_shown_as_cancelled(server):
    async def work(page: Any) -> None:
        page.job(progress("data-0", JobState.DONE))
        page.job(progress("train", JobState.RUNNING, 3, 9))
        await page.cancelled()

    _, shown = on_page(work, [])
    assert shown["dflop-job-data-0"][0].description.startswith("done (")
    assert shown["dflop-job-train"][0].description.startswith("cancelled, step 3 of 9, with its flow run (")


def test_a_server_that_is_gone_costs_the_page_and_is_said_once(server):
    async def work(page: Any) -> None:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            await page.markdown("plan", "first")
            await page.table("costs", [{"module": "llm"}])
            page.job(progress("train", JobState.RUNNING))
            await page.introduce("name", {"tag"}, {})
            await page.close()
        await page.markdown("plan", "second")
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            await page.markdown("plan", "third")

    lines: list[str] = []
    state, shown = on_page(work, lines)
    assert state.is_completed()
    assert [a.data for a in shown["dflop-plan"]] == ["second"]
    assert len(lines) == 2, "said again when it had worked in between"
    assert all("the run goes on" in line for line in lines)


def test_without_a_flow_run_there_is_no_page():
    lines: list[str] = []

    async def main() -> None:
        page = Page(None, lines.append)
        page.job(progress("train", JobState.RUNNING))
        await page.markdown("plan", "text")
        page("a line")
        with page.said_by(lambda line: lines.append(f"task: {line}")):
            page("another")
        await page.close()

    asyncio.run(main())
    assert lines == ["a line", "task: another"]


class SlowServer:
    """Makes an artifact before it answers, as a busy server does."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.changes: list[Any] = []

    async def __aenter__(self) -> SlowServer:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def create_artifact(self, wanted: Any) -> Any:
        self.made.append(wanted)
        await asyncio.sleep(0.3)
        return types.SimpleNamespace(id=uuid.uuid4())

    async def update_artifact(self, _: Any, change: Any) -> None:
        self.changes.append(change)


@pytest.mark.parametrize("end", ["close", "cancelled"])
def test_a_bar_that_is_being_made_when_the_page_ends_is_not_made_again(monkeypatch, end):
    slow = SlowServer()
    monkeypatch.setattr(page_module, "get_client", lambda **_: slow)

    async def main() -> None:
        page, began = Page(uuid.uuid4(), print, every_s=60), time.monotonic()
        page.job(progress("train", JobState.RUNNING, 1, 40))
        await asyncio.sleep(0.1)
        page.job(progress("train", JobState.RUNNING, 9, 40))
        await getattr(page, end)()
        assert time.monotonic() - began < 10, "the pause between two pictures is not waited for"

    asyncio.run(main())
    assert len(slow.made) == 1
    assert slow.changes[-1].description.startswith("running, step 9" if end == "close" else "cancelled")


def test_a_job_that_is_followed_again_keeps_its_bar(server):
    async def work(page: Any) -> None:
        first = progress("train", JobState.INTERRUPTED, 20, 40)
        page.job(first)
        await asyncio.sleep(0.1)
        again = dataclasses.replace(first.handle, job_id="again")
        page.job(JobProgress("train", again, JobStatus(JobState.QUEUED)))

    _, shown = on_page(work, [])
    assert [a.description for a in shown["dflop-job-train"]] == ["queued (train, slurm again)"]
