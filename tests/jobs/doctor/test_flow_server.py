"""What is said of a Prefect server that is there, is not, is old, or wants a password."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from dflop.jobs.doctor import flow_server
from dflop.jobs.doctor.findings import FAIL, OK, SKIP, WARN
from dflop.jobs.doctor.flow_server import FlowServer


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    monkeypatch.setattr(flow_server, "installed_version", lambda package: "3.8.8")


class Server(http.server.BaseHTTPRequestHandler):
    version, password = "3.8.8", ""

    def do_GET(self) -> None:
        is_open = self.path == "/api/health" or self.headers.get("Authorization", "") == self.password
        known = {"/api/health": "true", "/api/admin/version": f'"{self.version}"'}
        status = 401 if not is_open else 200 if self.path in known else 404
        self.send_response(status)
        self.end_headers()
        if status == 200:
            self.wfile.write(known[self.path].encode())

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator:
    started = []

    def start(version: str = "3.8.8", password: str = "") -> str:
        handler = type("Handler", (Server,), {"version": version, "password": password})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}/api"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def of(server: FlowServer | None, problem: str = ""):
    package, *rest = flow_server.flow_server(server, problem)
    assert package.status == OK
    (finding,) = rest
    return finding


def test_a_server_that_answers_and_none_are_no_fault(serve):
    finding = of(FlowServer.of(url := serve()))
    assert (finding.status, finding.detail) == (OK, f"{url}, Prefect 3.8.8")
    assert of(FlowServer.of("")).status == OK


def test_a_password(serve):
    url = serve(password=FlowServer.of("", auth_string="admin:secret").auth)
    refused = of(FlowServer.of(url))
    assert (refused.status, refused.detail) == (FAIL, f"{url} refuses us: HTTP 401")
    assert "PREFECT_API_AUTH_STRING" in refused.advice
    assert of(FlowServer.of(url, auth_string="admin:secret")).status == OK


def test_nobody_there_something_else_at_that_address_and_an_older_server(serve):
    finding = of(FlowServer.of("http://127.0.0.1:9/api"))
    assert finding.status == FAIL
    assert "http://127.0.0.1:9/api does not answer: [Errno 111] Connection refused" in finding.detail
    assert "prefect server start" in finding.advice
    assert of(FlowServer.of("localhost:4200/api")).status == FAIL
    finding = of(FlowServer.of(serve().removesuffix("/api")))
    assert finding.status == FAIL
    assert "HTTP 404" in finding.detail
    finding = of(FlowServer.of(serve(version="3.2.1")))
    assert finding.status == WARN
    assert "Prefect 3.2.1; the client is 3.8.8" in finding.detail


def test_settings_that_cannot_be_read_and_no_prefect(monkeypatch):
    assert of(None, "PREFECT_API_URL: not a URL").detail == "PREFECT_API_URL: not a URL"
    monkeypatch.setattr(flow_server, "installed_version", lambda package: None)
    (finding,) = flow_server.flow_server(None)
    assert finding.status == SKIP
