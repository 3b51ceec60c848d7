"""The Prefect server that flows would use: none configured, reachable, of a fitting version, and open to us."""

from __future__ import annotations

import base64
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dflop.doctor.finding import FAIL, OK, SKIP, WARN, Finding
from dflop.doctor.installed import installed_version

AREA = "Prefect"
TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class FlowServer:
    """Where flows report to, as Prefect's own settings have it."""

    url: str
    """Ends in `/api`; empty: a temporary server per run."""
    auth: str = ""
    """Value of the `Authorization` header; empty: none."""
    tls: ssl.SSLContext | None = None
    """Whom to trust; None: as Python does."""

    @classmethod
    def of(cls, url: str, *, auth_string: str = "", api_key: str = "", tls: ssl.SSLContext | None = None) -> FlowServer:
        """The server that Prefect's settings name, with a password (`user:password`) or a key."""
        if auth_string:
            return cls(url, f"Basic {base64.b64encode(auth_string.encode()).decode()}", tls)
        return cls(url, f"Bearer {api_key}" if api_key else "", tls)


Get = Callable[[FlowServer, str], tuple[int, str]]


def get(server: FlowServer, path: str) -> tuple[int, str]:
    """(status, text) of what a server answers below its address; OSError where it does not."""
    headers = {"Authorization": server.auth} if server.auth else {}
    request = urllib.request.Request(server.url + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=server.tls) as answer:
            return answer.status, answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        return error.code, error.reason


def flow_server(server: FlowServer | None, problem: str = "", get: Get = get) -> Iterator[Finding]:
    """Findings about Prefect; without a server it is not installed, or `problem` says why its settings are not read."""
    version = installed_version("prefect")
    if version is None:
        yield Finding(AREA, "package", SKIP, "not installed", "for dflop run: pip install 'dflop[flows]'")
        return
    yield Finding(AREA, "package", OK, version)
    if server is None:
        yield Finding(AREA, "settings", FAIL, problem, "see prefect config view, and PREFECT_... variables")
        return
    if not server.url:
        yield Finding(AREA, "server", OK, "none configured: every dflop run starts a temporary one")
        return
    yield _server(server, version, get)


def _server(server: FlowServer, version: str, get: Get) -> Finding:
    try:
        status, body = get(server, "/admin/version")  # /health answers without a password
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        advice = "start it (prefect server start), or unset PREFECT_API_URL for a temporary server"
        return Finding(AREA, "server", FAIL, f"the Prefect server at {server.url} does not answer: {reason}", advice)
    if status in (401, 403):
        advice = "set PREFECT_API_AUTH_STRING (user:password) or PREFECT_API_KEY as the server wants it"
        return Finding(AREA, "server", FAIL, f"{server.url} refuses us: HTTP {status}", advice)
    if status != 200:
        advice = "PREFECT_API_URL ends in /api; is this a Prefect server?"
        return Finding(AREA, "server", FAIL, f"{server.url} answers with HTTP {status}", advice)
    theirs = body.strip().strip('"')
    if _minor(theirs) < _minor(version):
        advice = "a client newer than its server is refused at times: upgrade the server"
        return Finding(AREA, "server", WARN, f"{server.url}, Prefect {theirs}; the client is {version}", advice)
    return Finding(AREA, "server", OK, f"{server.url}, Prefect {theirs}")


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
