"""A run in which everything was noticed and decided once, for the tests of what tells it."""

import dataclasses
from typing import Any

from dflop.records import LLM, JobRecord, Plan, RunEvent, RunInput, RunRecord
from tests.builders import make_corrections, make_decision, make_plan, make_rank_factor, make_table

EDGES = (100, 900)


def plans_of_story(run_id: str = "run") -> list[Plan]:
    """Of two searches: the best plan and the runner-up of each; the second search turns them round."""
    layouts = {"plan0": ({"vision": 2, LLM: 1}, 2), "plan1": ({"vision": 1, LLM: 3}, 1)}
    found = []
    for search, seconds in enumerate([{"plan0": 2.0, "plan1": 2.2}, {"plan1": 1.5, "plan0": 2.4}]):
        for rank, (plan_id, predicted_s) in enumerate(seconds.items()):
            dp, llm_pp = layouts[plan_id]
            changes = {"plan_id": plan_id, "candidate_rank": rank, "predicted_step_s": predicted_s, "run_id": run_id}
            plan = make_plan(dp, llm_pp=llm_pp)
            found.append(dataclasses.replace(plan, baseline_step_s=3.0, snapshot_seq=1 + search, **changes))
    return found


def story(run_id: str = "run") -> list[Any]:
    """Records of the run, in no order of time; it begins at 1000 s and ends at 1100 s."""

    def state(name: str, at_s: float) -> RunRecord:
        return RunRecord(run_id, "demo", "key", name, "8x test", "torch", "abc", f"/runs/{run_id}", at_s)

    def read(seq: int, at_s: float) -> RunInput:
        return RunInput(run_id, "plan", 0, seq, "rev", "data", "model", (f"{LLM}-tp1",), at_s)

    def job(name: str, at_s: float, *, attempt: int = 0, job_name: str = "train", reason: str = "") -> JobRecord:
        return JobRecord(run_id, job_name, "k", "slurm", f"1{attempt}", name, reason, "/runs", 4, attempt, at_s)

    def decided(kind: str, verdict: str, subject: str, at_s: float, step: int, detail: str, **changes: Any) -> Any:
        told = {"run_id": run_id, "observed_at_s": at_s, "detail": detail, **changes}
        return make_decision(kind, verdict, subject, step=step, **told)

    reckoned = {"num_steps_left": 60, "cost_s": 20.0}
    return [
        state("done", 1100.0), state("running", 1000.0), *(read(seq, at_s) for seq, at_s in ((1, 1001.0), (2, 1073.0))),
        *plans_of_story(run_id), make_table(LLM), job("running", 1012.0), job("running", 1012.0),
        job("running", 1003.0, job_name="data"), job("interrupted", 1072.0, reason="asked to stop"),
        job("running", 1075.0, attempt=1), *corrected(run_id, (1.0, 1.0, 1.0), 1020.0, 5, level=1.0, is_in_force=False),
        *corrected(run_id, (1.0, 1.1, 2.2), 1030.0, 10, level=1.1),
        *corrected(run_id, (1.002, 1.1, 2.21), 1031.0, 11, level=1.101),
        decided("rescale", "done", "llm", 1030.0, 10, "llm: cost correction x1.10 measured / predicted, before: x1.00"),
        RunEvent(run_id, "train", 0, 12, "scheduler_late", "quick plan after 80 ms", 1035.0),
        make_rank_factor(2, 1.3, run_id=run_id), make_rank_factor(3, 1.01, run_id=run_id),
        decided("slow_rank", "noticed", "rank 2", 1040.0, 20, "30 % slower than its peers on host1", measured=1.3),
        decided("drift_shapes", "noticed", "vision", 1050.0, 30, "1.9 s a batch, 0.8 s when planned", measured=1.9),
        decided("replan", "stay", "plan1", 1055.0, 32, "12 s to gain", gain_s=12.0, new_plan_id="plan1", **reckoned),
        decided("replan", "done", "plan1", 1070.0, 40, "54 s to gain", gain_s=54.0, new_plan_id="plan1", **reckoned),
    ]  # fmt: skip


def corrected(run_id: str, factors: tuple[float, ...], at_s: float, step: int, **changes: Any) -> list[Any]:
    """A set of corrections of the LLM's three buckets."""
    return make_corrections(LLM, factors, EDGES, run_id=run_id, observed_at_s=at_s, effective_step=step, **changes)
