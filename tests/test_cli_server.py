"""What `dflop run` and `dflop serve` say of the Prefect server: one error, in seconds, without a traceback."""

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dflop.cli import server
from tests.jobs.configs import make_dataset, write_config
from tests.test_cli import assert_refused, dflop

PASSWORD = "admin:secret"


class Answers(BaseHTTPRequestHandler):
    """A server that wants a password for everything but its health, as Prefect's does."""

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(PASSWORD.encode()).decode()
        is_open = self.path.endswith("/health") or self.headers.get("Authorization") == wanted
        is_known = self.path.startswith("/api/")
        self.send_response(404 if not is_known else 200 if is_open else 401)
        self.end_headers()
        self.wfile.write(b'"3.8.8"')

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests are quiet."""


@pytest.fixture
def address() -> Iterator[str]:
    found = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dataset(tmp_path)
    write_config(tmp_path)
    return tmp_path


def refused(folder: Path, exit_code: int, *said: str, **env: str) -> None:
    done = dflop("run", "run.yaml", cwd=folder, PREFECT_HOME=str(folder / "prefect"), **env)
    assert_refused(done, exit_code, *said)
    assert not (folder / "runs").exists()


def test_a_missing_and_a_wrong_password_are_one_error(folder, address):
    url = f"{address}/api"
    refused(folder, 2, f"at {url} requires a password, none is set", PREFECT_API_URL=url)
    refused(
        folder,
        2,
        "requires a password, it refuses the one that is set",
        PREFECT_API_URL=url,
        PREFECT_API_AUTH_STRING="admin:wrong",
    )


def test_the_right_password_is_accepted(address, monkeypatch):
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"{address}/api", PREFECT_API_AUTH_STRING: PASSWORD}):
        assert server.check_server() == (f"{address}/api", "3.8.8")
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        assert server.check_server() == ("", ""), "a temporary one will do"


def test_flows_are_served_to_a_server(tmp_path):
    home = {"PREFECT_HOME": str(tmp_path / "prefect")}
    assert_refused(
        dflop("serve", cwd=tmp_path, **home), 2, "PREFECT_API_URL names no Prefect server", "prefect server start"
    )
    gone = dflop("serve", cwd=tmp_path, PREFECT_API_URL="http://127.0.0.1:9/api", **home)
    assert_refused(gone, 5, "does not respond")
    assert_refused(dflop("serve", "--limit", "0", cwd=tmp_path, **home), 2, "cannot run 0 flows")


def test_settings_leave_what_the_user_has_chosen(monkeypatch):
    for name in server.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PREFECT_CLIENT_MAX_RETRIES", "3")
    server.prepare()
    assert os.environ["PREFECT_CLIENT_MAX_RETRIES"] == "3"
    assert os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
    for name in server.DEFAULTS:
        monkeypatch.delenv(name, raising=False)


LOCKED = """
import asyncio, json, os, urllib.error, urllib.request
from dflop.cli import server
server.prepare()
assert server.check_server() == ("", "")
server.lock_temporary_server()
from prefect.client.orchestration import get_client
from prefect.settings import get_current_settings
from prefect.server.api.server import SubprocessASGIServer

async def main():
    async with get_client() as client:
        found = await client.read_flows()  # with the password
        url = str(client.api_url)
    try:
        asked = urllib.request.Request(f"{url}/flows/filter", b"{}", {"Content-Type": "application/json"})
        urllib.request.urlopen(asked)
        status = 200
    except urllib.error.HTTPError as error:
        status = error.code
    ours = get_current_settings().api.auth_string.get_secret_value()
    print(json.dumps([len(found), status, ours.startswith("dflop:"), any(ours in v for v in os.environ.values())]))

asyncio.run(main())
SubprocessASGIServer().stop()
"""


@pytest.mark.lane("served")
def test_a_temporary_server_lets_nobody_else_in(tmp_path):
    """It listens on the loopback device of a login node, which everybody there can reach."""
    (tmp_path / "json.py").write_text("raise SystemExit(9)")  # nor does it import from where it was started
    env = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    env |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOCKED], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 401, True, False], "and no job inherits it"


def test_a_password_of_ones_own_is_kept(monkeypatch):
    from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    with temporary_settings({PREFECT_API_AUTH_STRING: "me:mine"}):
        server.lock_temporary_server()
    assert "PREFECT_API_AUTH_STRING" not in os.environ


def test_a_dry_run_prints_configuration_and_jobs_and_writes_nothing(folder):
    before = sorted(folder.rglob("*"))
    done = dflop("run", "run.yaml", "--dry-run", cwd=folder, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert done.returncode == 0, done.stderr
    assert f"{folder}/runs" in done.stdout
    for job in ("data-0", "profile-tp1", "train", "compare"):
        assert f"-{job}" in done.stdout
    assert "would begin run small-" in done.stderr
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("path", ["", "/nowhere", "{folder}"])
def test_a_dry_run_for_a_cluster_needs_no_slurm_here(folder, path):
    (folder / "sbatch").write_text("no program")
    overrides = ("--set", "cluster.backend=slurm", "--set", "cluster.hardware=test")
    done = dflop("run", "run.yaml", "--dry-run", *overrides, cwd=folder, PATH=path.format(folder=folder))
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.count("#!/bin/bash\n") >= 4
    refused = dflop("run", "run.yaml", *overrides, cwd=folder, PATH=path.format(folder=folder))
    assert_refused(refused, 2, "backend `slurm` needs sbatch, which is not on PATH")
