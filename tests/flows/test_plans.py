from __future__ import annotations

import pytest

from dflop.jobs import parts
from tests.flows.loading import artifacts, flow_run_id, load, run_flow


def test_a_plan_is_shown_with_its_costs_and_a_picture_in_its_text(server, fake, run):
    state = run_flow(load("plan"), run=str(run.path))
    shown = artifacts(flow_run_id(state))
    (plan,) = shown["dflop-plan"]
    assert (plan.type, plan.description) == ("markdown", "it is the best")
    assert "![a step](data:image/png;base64,AAAA)" in plan.data
    assert shown["dflop-model-profile"][0].data == '[{"module": "llm", "noise": null}]'
    assert not any(a.type == "image" for versions in shown.values() for a in versions), "its page prints its address"


def test_a_run_that_stays_with_its_plan_shows_none(server, fake, run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parts, "plan", fake.part("plan", ()))
    state = run_flow(load("plan"), run=str(run.path))
    assert state.is_completed()
    assert "dflop-plan" not in artifacts(flow_run_id(state))
