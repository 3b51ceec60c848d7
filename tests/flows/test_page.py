"""What a page shows, and what a server that is slow or away costs it; on a real one: `test_flows.py`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import types
import uuid
from pathlib import Path
from typing import Any

import pytest

from dflop.launch import JobHandle, JobState, JobStatus
from dflop.steps.watching import JobProgress, ShowsJobs
from tests.flows.loading import module


def progress(name: str, state: JobState, step: int = 0, num_steps: int = 0) -> JobProgress:
    handle = JobHandle("slurm", f"id-{name}", f"demo-{name}", name, Path("/jobs"), 1, 5.0)
    return JobProgress(name, handle, JobStatus(state), step, num_steps)


def test_there_are_few_keys_however_many_jobs():
    names = [f"data-{i}" for i in range(500)] + [f"reprofile-{i}-tp{tp}" for i in range(99) for tp in (1, 2)]
    page = module("page")
    assert len({page.bar_key(name) for name in names}) == page.MAX_BARS + 2


class Shown:
    """A server that keeps what is on a page; it may be away, and makes an artifact before it answers."""

    def __init__(self) -> None:
        self.is_away, self.answers_after_s = False, 0.0
        self.artifacts: dict[uuid.UUID, dict[str, Any]] = {}

    async def update_flow_run(self, *_: Any, **__: Any) -> None:
        self.answer()

    def answer(self) -> None:
        if self.is_away:
            raise OSError("nobody answers")

    async def create_artifact(self, wanted: Any) -> Any:
        self.answer()
        made = uuid.uuid4()
        self.artifacts[made] = {"key": wanted.key, "data": wanted.data, "description": wanted.description}
        await asyncio.sleep(self.answers_after_s)
        return types.SimpleNamespace(id=made)

    async def update_artifact(self, which: uuid.UUID, change: Any) -> None:
        self.answer()
        self.artifacts[which] |= {"data": change.data, "description": change.description}

    def of(self, key: str) -> list[tuple[Any, str]]:
        return [(a["data"], a["description"]) for a in self.artifacts.values() if a["key"] == key]


@pytest.fixture
def shown(monkeypatch) -> Shown:
    found = Shown()
    monkeypatch.setattr(module("page"), "get_client", lambda **_: contextlib.nullcontext(found))
    return found


def on_page(work: Any, every_s: float = 0.001) -> list[str]:
    """What is said while `work(page)` is done and the page closed."""
    lines: list[str] = []

    async def main() -> None:
        page = module("page").Page(uuid.uuid4(), lines.append, every_s=every_s)
        assert isinstance(page, ShowsJobs)
        await work(page)
        await page.close()

    asyncio.run(main())
    return lines


def test_jobs_of_a_kind_share_a_bar_beyond_the_first_and_no_table_is_empty(shown):
    async def work(page: Any) -> None:
        await page.table("nothing", [])
        for i in range(20):
            page.job(progress(f"data-{i}", JobState.DONE if i < 18 else JobState.RUNNING))

    assert on_page(work) == []
    assert len(shown.artifacts) == 16 + 1
    assert shown.of("dflop-job-data-others") == [(50.0, "2 done, 2 running")]


def test_jobs_that_had_not_ended_are_shown_as_cancelled(shown):
    async def work(page: Any) -> None:
        page.job(progress("data-0", JobState.DONE))
        page.job(progress("train", JobState.RUNNING, 3, 9))
        await page.cancelled()

    on_page(work)
    assert shown.of("dflop-job-data-0")[0][1].startswith("done (")
    assert shown.of("dflop-job-train")[0][1].startswith("cancelled, step 3 of 9, with its flow run (")


def test_a_server_that_is_gone_costs_the_page_and_is_said_once(shown):
    async def work(page: Any) -> None:
        shown.is_away = True
        await page.markdown("plan", "first")
        await page.table("costs", [{"module": "llm"}])
        page.job(progress("train", JobState.RUNNING))
        await page.introduce("name", {"tag"}, {})
        await page.close()
        shown.is_away = False
        await page.markdown("plan", "second")
        shown.is_away = True
        await page.markdown("plan", "third")

    lines = on_page(work)
    assert shown.of("dflop-plan") == [("second", "")]
    assert len(lines) == 2, "said again when it had worked in between"
    assert all("the run goes on" in line for line in lines)


@pytest.mark.parametrize("end", ["close", "cancelled"])
def test_a_bar_that_is_being_made_when_the_page_ends_is_not_made_again(shown, end):
    shown.answers_after_s, began = 0.3, time.monotonic()

    async def work(page: Any) -> None:
        page.job(progress("train", JobState.RUNNING, 1, 40))
        while not shown.artifacts:
            await asyncio.sleep(0)
        page.job(progress("train", JobState.RUNNING, 9, 40))
        await getattr(page, end)()

    on_page(work, every_s=60)
    assert time.monotonic() - began < 10, "the pause between two pictures is not waited for"
    ((_, text),) = shown.of("dflop-job-train")
    assert text.startswith("running, step 9" if end == "close" else "cancelled")


def test_a_job_that_is_followed_again_keeps_its_bar(shown):
    async def work(page: Any) -> None:
        first = progress("train", JobState.INTERRUPTED, 20, 40)
        page.job(first)
        while not shown.artifacts:
            await asyncio.sleep(0)
        again = dataclasses.replace(first.handle, job_id="again")
        page.job(JobProgress("train", again, JobStatus(JobState.QUEUED)))

    on_page(work)
    assert [text for _, text in shown.of("dflop-job-train")] == ["queued (train, slurm again)"]
