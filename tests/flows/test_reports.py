from __future__ import annotations

from dflop.errors import StoreError
from dflop.jobs import parts, runs
from dflop.jobs.driver import drive_alone
from tests.flows.loading import artifacts, flow_run_id, load, run_flow
from tests.jobs.made import make_run


def summarised(monkeypatch):
    monkeypatch.setattr("reports.markdown_summary", lambda found: f"# {found.verdict}")
    monkeypatch.setattr("driving.markdown_history", lambda found: "nothing happened")


def test_a_report_shows_summary_history_and_where_it_is(server, fake, tmp_path, monkeypatch):
    load("report")
    summarised(monkeypatch)
    run = make_run(tmp_path, state=runs.DONE)
    with drive_alone(run, print):  # somebody else may be driving it
        state = run_flow(load("report"), run=str(run.path))
    shown = artifacts(flow_run_id(state))
    assert shown["dflop-summary"][0].data == "# nothing was trained"
    assert shown["dflop-history"][0].data == "nothing happened"
    assert f"`{run.report_file}`" in shown["dflop-report"][0].data
    assert f"({run.report_file.as_uri()})" in shown["dflop-report"][0].data
    assert fake.calls == ["report again"]
    assert run.state()["state"] == runs.DONE


def test_a_run_that_the_store_does_not_know_is_an_error(server, fake, run, monkeypatch):
    def unknown(_run, _say):
        raise StoreError("run `small-1` is not in the store")

    monkeypatch.setattr(parts, "report_again", unknown)
    state = run_flow(load("report"), run=str(run.path))
    assert state.is_failed()
    assert state.message == "run `small-1` is not in the store"
