import json

import pytest

from dflop.config import dump_config
from dflop.errors import ConfigError
from dflop.records import LLM, Plan, from_dict
from dflop.run.directory import RunDir, open_run
from tests.builders import make_plan, make_table, random_batch
from tests.jobs.configs import make_config


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run-1")
    run.path.mkdir()
    return run


def test_what_is_written_is_read_back(run):
    plan, tables = make_plan({"vision": 2, LLM: 1}, llm_pp=2), [make_table("vision"), make_table(LLM)]
    shapes = random_batch(7, seed=1)
    assert not run.has_plan()
    run.write_plan(plan, tables)
    run.write_shapes(shapes)
    run.write_state({"state": "running"})
    assert run.has_plan()
    assert run.plan() == plan
    assert run.cost_tables() == tables
    assert run.shapes() == list(shapes)
    assert run.profile_key() == "data"
    assert run.state() == {"state": "running"}
    assert [p.name for p in run.path.iterdir() if p.name.startswith(".")] == []
    (run.path / "cost_tables.json").unlink()
    assert not run.has_plan(), "it was made from them"


def test_plans_that_ran_before_are_kept(run):
    plans = [make_plan({"vision": 1, LLM: 1}, num_microbatches=n) for n in (2, 4, 8)]
    for plan in (plans[0], plans[0], *plans[1:]):
        run.write_plan(plan, [])
    assert run.plan() == plans[2]
    kept = sorted((run.path / "plans").iterdir())
    assert [p.name for p in kept] == ["plan-1.json", "plan-2.json"]
    assert [from_dict(Plan, json.loads(p.read_text())) for p in kept] == plans[:2]


def test_only_a_run_directory_is_opened(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"config\.resolved\.yaml is missing") as caught:
        open_run(tmp_path / "nothing")
    assert caught.value.where == str(tmp_path / "nothing")
    (tmp_path / "run").mkdir()
    config = make_config(tmp_path)
    (tmp_path / "run" / "config.resolved.yaml").write_text(dump_config(config))
    monkeypatch.chdir(tmp_path)
    opened = open_run("run")
    assert opened.path == tmp_path / "run"
    assert opened.run_id == "run"
    assert opened.config() == config


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("plan.json", RunDir.plan), ("cost_tables.json", RunDir.cost_tables), ("shapes.parquet", RunDir.shapes),
        ("shapes.parquet", RunDir.profile_key),
    ],
)  # fmt: skip
def test_a_missing_or_damaged_file_is_named_with_what_to_do(run, name, read):
    with pytest.raises(ConfigError, match="the run has no ") as caught:
        read(run)
    assert caught.value.hint.startswith("start the run again: ")
    for content in (b"", b"\xff\x00noise", b"[{}]" if name == "cost_tables.json" else b"{}", b"[1]", b"PAR1"):
        (run.path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"{name} of the run is damaged: .") as caught:
            read(run)
        assert caught.value.where == str(run.path / name)
        assert caught.value.hint.startswith("remove it: ")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Expecting value"), ("{half", "Expecting property name"), ("[]", "an object is expected"),
        ('{"by": 3}', "`by` is 3"), ('{"state": null}', "`state` is None"), ('{"trains": "no"}', "`trains` is 'no'"),
    ],
)  # fmt: skip
def test_a_damaged_state_is_named_and_an_old_one_may_lack_fields(run, content, problem):
    for lacking in ({}, {"state": "done"}):
        run.write_state(lacking)
        assert run.state() == lacking
    (run.path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=f"run.json is damaged: .*{problem}") as caught:
        run.state()
    assert caught.value.where == str(run.path / "run.json")


def test_a_run_may_have_no_samples(run):
    assert run.state() == {}
    run.write_shapes([])
    assert (run.shapes(), run.profile_key()) == ([], "")
