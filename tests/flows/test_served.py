"""Flows on a server of their own: served, started by its API, killed under them, cancelled; and by prefect.yaml."""

import contextlib
import http
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dflop.launch import JobState, Journal
from dflop.run import lifecycle
from dflop.run.directory import RunDir
from dflop.run.queue import servers_left_behind
from dflop.run.status import jobs_of
from tests.jobs.training import fresh, planned_run, profiled, set_config
from tests.launch.helpers import Background, is_gone, live, until
from tests.test_cli import dflop, python_path
from tests.test_cli_train import training

ROOT = Path(__file__).parents[2]
NUM_STEPS = 60

pytestmark = [pytest.mark.lane("served"), pytest.mark.timeout(900)]


class Server:
    """`prefect server start`, which can be killed and started again on the same database."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.folder = folder
        self.env = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "prefect", "server", "start", "--port", str(self.port)]
        with (self.folder / "server.log").open("a") as out:
            self.process = subprocess.Popen(command, env=self.env, stdout=out, stderr=out, start_new_session=True)
        until(self.is_up, what="the server", limit_s=180)

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.call("/health"))
        return False

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def call(self, path: str, method: str = "GET", **body: Any) -> Any:
        return self.post(path, body, method)

    def post(self, path: str, body: Any, method: str = "POST") -> Any:
        data = json.dumps(body).encode() if method != "GET" else None
        request = urllib.request.Request(f"{self.api}{path}", data=data, method=method)
        request.add_header("Content-Type", "application/json")
        for is_last in (False, False, True):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.loads(answer.read() or b"null")
            except urllib.error.HTTPError as error:
                # SQLite was locked for longer than the server waits: Prefect's own client asks again, too.
                if error.code != http.HTTPStatus.SERVICE_UNAVAILABLE or is_last:
                    raise
                time.sleep(3)
        raise AssertionError("the last answer is returned or raised")

    def prefect(self, *args: str) -> None:
        """A command of Prefect's, which succeeds."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *args]
        done = subprocess.run(command, cwd=ROOT, env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def flow_run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call(f"/flow_runs/{run_id}")
        return found

    def artifacts(self, run_id: str) -> dict[str, Any]:
        """Newest artifact by key, on the page of a flow run."""
        wanted = {"flow_runs": {"id": {"any_": [run_id]}}, "sort": "UPDATED_DESC"}
        found = self.call("/artifacts/filter", "POST", **wanted)
        return {artifact["key"]: artifact for artifact in reversed(found)}

    def begin(self, deployment: str, **parameters: Any) -> str:
        """Id of a new flow run of a deployment."""
        found = self.call(f"/deployments/name/{deployment}")
        path, state = f"/deployments/{found['id']}/create_flow_run", {"type": "SCHEDULED"}
        return str(self.call(path, "POST", parameters=parameters, state=state)["id"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    found = Server(tmp_path_factory.mktemp("server"))
    yield found
    with contextlib.suppress(ProcessLookupError):
        found.kill()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    overrides = (f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=5", "compare.num_batches=0")
    return profiled(planned_run(tmp_path_factory.mktemp("planned"), *overrides))


@pytest.fixture
def run(planned: RunDir, tmp_path: Path) -> RunDir:
    return fresh(planned, tmp_path)


@pytest.fixture
def served(server: Server, tmp_path: Path) -> Iterator[Path]:
    """Log of `dflop serve`, once the flows are there."""
    log = tmp_path / "serve.log"
    with Background("dflop.cli", "serve", "--name", tmp_path.name, log=log, **server.env):
        until(lambda: has_deployment(server, f"dflop-report/{tmp_path.name}"), what="deployments", limit_s=180)
        yield log


def has_deployment(server: Server, name: str) -> bool:
    try:
        return bool(server.call(f"/deployments/name/{name}"))
    except urllib.error.HTTPError:
        return False


def ended(server: Server, run_id: str, log: Path, limit_s: float = 300) -> str:
    final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")

    def look() -> str | None:
        with contextlib.suppress(OSError):  # the server may be down
            return found if (found := str(server.flow_run(run_id)["state_type"])) in final else None
        return None

    try:
        return until(look, what="the end of the flow run", limit_s=limit_s)
    except pytest.fail.Exception:
        pytest.fail(log.read_text())


def test_cancel_from_the_api_empties_the_queue(server, served, run, tmp_path):
    flow_run = server.begin(f"dflop-pipeline/{tmp_path.name}", run=str(run.path))
    pids = training(run)
    until(lambda: "running" in str(server.artifacts(flow_run).get("dflop-train-progress")), what="the bar of the job")
    began = time.monotonic()
    server.call(f"/flow_runs/{flow_run}/set_state", "POST", state={"type": "CANCELLING"}, force=True)
    until(lambda: all(is_gone(pid) for pid in pids), what="an empty queue", limit_s=60)
    print(f"queue empty after {time.monotonic() - began:.1f} s")
    assert ended(server, flow_run, served) == "CANCELLED", served.read_text()
    assert [job.state for job in jobs_of(run)][-1] is not JobState.RUNNING
    until(lambda: run.state()["state"] in (lifecycle.CANCELLED, lifecycle.INTERRUPTED), what="the state of the run")


def test_a_server_that_is_killed_and_comes_back_does_not_end_the_run(server, served, run, tmp_path):
    flow_run = server.begin(f"dflop-pipeline/{tmp_path.name}", run=str(run.path))
    training(run, from_step=5)
    server.kill()
    time.sleep(20)  # an outage has a length; nothing is waited for
    server.start()
    assert ended(server, flow_run, served) == "COMPLETED", served.read_text()
    assert run.state()["state"] == lifecycle.DONE
    trained = [job.state for job in jobs_of(run) if job.name == "train"]
    assert trained == [JobState.DONE], "no job was submitted again"
    shown = server.artifacts(flow_run)
    assert shown["dflop-train-progress"]["data"] == 100
    assert {"dflop-jobs", "dflop-summary", "dflop-history", "dflop-plan"} <= set(shown)
    assert server.flow_run(flow_run)["name"] == run.run_id
    (automation,) = server.call("/automations/filter", "POST")
    assert automation["name"] == "dflop: flow runs that fell silent"
    assert automation["actions"][0]["state"] == "CRASHED"


def configured(run: RunDir, folder: Path, *settings: str) -> Path:
    """A configuration file whose unfinished run is this one."""
    set_config(run, *settings)
    config = folder / "run.yaml"
    config.write_text(json.dumps(run.config().model_dump(mode="json")))
    run.write_state({**run.state(), "config_key": run.config().key, "state": lifecycle.READY})
    return config


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_for_good_costs_dflop_run_its_page(run, tmp_path, number):
    config, own = configured(run, tmp_path, "train.num_steps=15"), Server(tmp_path)
    try:
        with Background("dflop.cli", "run", str(config), log=tmp_path / "run.log", cwd=tmp_path, **own.env) as driver:
            training(run)
            os.killpg(own.process.pid, number)
            said = driver.ends(0, 600)
    finally:
        own.kill()
    assert said.count("the Prefect server does not respond, the run continues without it") == 1, said
    assert "the Prefect server did not respond until the end; its page lacks" in said
    assert run.state()["state"] == lifecycle.DONE
    assert run.report_file.is_file()
    assert [job.state for job in jobs_of(run) if job.name == "train"] == [JobState.DONE], "no job was submitted again"


def test_a_server_that_is_away_from_the_start_costs_dflop_run_its_page(run, tmp_path):
    """One that refuses, and one that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        for port, num_steps in ((9, 6), (hanging.getsockname()[1], 9)):
            config = configured(run, tmp_path, f"train.num_steps={num_steps}")
            env = {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "PREFECT_HOME": str(tmp_path / "prefect")}
            done = dflop("run", str(config), cwd=tmp_path, **env)
            assert done.returncode == 0, done.stderr
            assert f":{port}/api does not respond" in done.stderr
            assert f"run {run.run_id} continues without a page" in done.stderr
            assert run.state()["state"] == lifecycle.DONE
            assert run.next_step() == num_steps
    assert run.report_file.is_file()


class Hook(BaseHTTPRequestHandler):
    """A webhook, which keeps what it is told."""

    told: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests are quiet."""


def test_people_are_notified_of_a_mistyped_parameter_and_of_a_plan_that_would_pay(server, tmp_path):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.settings import PREFECT_API_URL, temporary_settings

    hook = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=hook.serve_forever, daemon=True).start()
    with temporary_settings({PREFECT_API_URL: server.api}):
        url = f"http://127.0.0.1:{hook.server_port}"
        CustomWebhookNotificationBlock(name="ops", url=url, json_data={"text": "{{subject}} {{body}}"}).save("ops")
    log, words = tmp_path / "serve.log", ("serve", "--name", tmp_path.name, "--notify", "custom-webhook/ops")
    with Background("dflop.cli", *words, log=log, **server.env):
        until(lambda: has_deployment(server, f"dflop-report/{tmp_path.name}"), what="deployments", limit_s=180)
        mistyped = server.begin(f"dflop-pipeline/{tmp_path.name}", confg_path="run.yaml")
        until(lambda: server.flow_run(mistyped)["state_type"] == "FAILED", what="a failed flow run", limit_s=180)
    message = server.flow_run(mistyped)["state"]["message"]
    assert "unknown parameter `confg_path`" in message
    assert "valid: config, config_path, overrides, run" in message
    advised = {
        "id": str(uuid.uuid4()), "occurred": datetime.now(UTC).isoformat(), "event": "dflop.replan.advised",
        "resource": {"prefect.resource.id": "dflop.run.small-1", "prefect.resource.name": "small-1"},
        "payload": {"step": 7, "detail": "a new plan would pay off"},
    }  # fmt: skip
    server.post("/events", [advised])
    for text in ("another plan would pay for run small-1 step 7: a new plan would pay off", "unknown parameter"):
        until(lambda text=text: any(text in told for told in Hook.told), what=f"{text}: {Hook.told}", limit_s=180)
    hook.shutdown()
    hook.server_close()


def test_deployments_of_prefect_yaml_run_in_a_process_worker(server, run, tmp_path):
    set_config(run, "train.num_steps=12")

    server.prefect("work-pool", "create", "dflop", "--type", "process")
    server.prefect("deploy", "--all")
    server.prefect("work-queue", "set-concurrency-limit", "runs", "1", "--pool", "dflop")
    found = server.call("/deployments/name/dflop-pipeline/team")
    assert found["parameters"] == {}, "a default path would leave the form for `config` without effect"
    assert found["work_queue_name"] == "runs"
    assert found["pull_steps"][0]["prefect.deployments.steps.set_working_directory"]["directory"] == str(ROOT)
    (schedule,) = found["schedules"]
    assert (schedule["active"], schedule["parameters"]) == (False, {"config_path": "configs/demo.yaml"})
    assert "Config" in found["parameter_openapi_schema"]["definitions"]
    log = tmp_path / "worker.log"
    with Background("prefect", "worker", "start", "--pool", "dflop", log=log, **server.env):
        first = server.begin("dflop-pipeline/team", run=str(run.path))
        training(run)
        second = server.begin("dflop-report/team", run=str(run.path))  # in no queue behind the run it is about
        assert ended(server, second, log) == "COMPLETED", log.read_text()
        assert ended(server, first, log) == "COMPLETED", log.read_text()
    assert run.state()["state"] == lifecycle.DONE


def test_a_killed_dflop_run_leaves_a_temporary_server_for_reap(run, tmp_path):
    """And its job goes on, which `dflop train` adopts."""
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps(run.config().model_dump(mode="json")))
    run.write_state({**run.state(), "config_key": run.config().key, "state": lifecycle.READY})
    env = {**os.environ, "PYTHONPATH": python_path(), "PREFECT_HOME": str(tmp_path / "prefect")}
    env.pop("PREFECT_API_URL", None)
    with (tmp_path / "run.log").open("w") as out:
        driver = subprocess.Popen(
            [sys.executable, "-m", "dflop.cli", "run", str(config)], cwd=tmp_path, env=env, stdout=out, stderr=out
        )
    try:
        pids = training(run)
    finally:
        driver.kill()
        driver.wait()
    home = f"PREFECT_HOME={tmp_path}/prefect"
    (left,) = [p for p in servers_left_behind() if home in Path(f"/proc/{p.pid}/environ").read_text()]
    assert not any(is_gone(pid) for pid in pids)
    handle = live(Journal(run.path, run.run_id), f"{run.run_id}/train")
    assert handle is not None
    command = [sys.executable, "-m", "dflop.cli", "reap"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert str(left.pid) in done.stderr
    assert is_gone(left.pid)
    assert all(is_gone(pid) for pid in pids)
