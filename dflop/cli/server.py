"""The Prefect server behind `dflop run` and `dflop serve`: our settings for its clients, and whether it answers.

It is asked once, in seconds and before anything else: a client of Prefect's own meets a wrong password with pages of
traceback, and tries for minutes to reach a server that is not there.
"""

from __future__ import annotations

import os
import secrets
import ssl
from typing import TYPE_CHECKING, Any

from dflop.errors import ConfigError, DflopError, LaunchError

if TYPE_CHECKING:
    from dflop.doctor.flow_server import FlowServer

DEFAULTS = {
    # Nothing is told to anybody.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    # Pauses double: 8 retries outlast a server that is gone for eight minutes, 5 do not outlast two.
    "PREFECT_CLIENT_MAX_RETRIES": "8",
    # A temporary server is started with `python -m`, and is not to import modules of the working directory.
    "PYTHONSAFEPATH": "1",
    # A temporary server needs up to half a minute on a busy login node.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s %(task_run_name)s: %(message)s",
}
"""Settings, where the user has not chosen; to be in the environment before Prefect is imported."""
_FOREIGN = ("httpx", "httpcore", "prefect", "websockets", "anyio")


def prepare() -> None:
    """Put our settings into the environment, from which jobs and temporary servers have theirs, too."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def load_flow(file: str, name: str) -> Any:
    """A flow out of the folder `flows/`, by path as Prefect loads deployments."""
    from prefect.flows import load_flow_from_entrypoint

    from dflop import resources

    return load_flow_from_entrypoint(f"{resources.path('flows') / file}:{name}", use_placeholder_flow=False)


async def watch_for_silent_flows() -> None:
    """Have the server note as crashed what runs of flows gave no sign of life for long; asked for once per server."""
    from prefect.client.orchestration import get_client
    from prefect.events.schemas.automations import AutomationCore

    from dflop import resources

    wanted = AutomationCore.model_validate_json((resources.path("flows") / "silent_flows.json").read_text())
    async with get_client() as client:
        if not await client.read_automations_by_name(wanted.name):
            await client.create_automation(wanted)


def configured_server() -> FlowServer:
    """The server that Prefect's own settings name, from variables, files and profiles; no address: a temporary one."""
    from prefect.settings import get_current_settings

    from dflop.doctor.flow_server import FlowServer

    api = get_current_settings().api
    auth, key = (secret.get_secret_value() if secret else "" for secret in (api.auth_string, api.key))
    tls = None
    if str(api.url).startswith("https"):
        tls = ssl.create_default_context(cafile=api.ssl_cert_file)
        if api.tls_insecure_skip_verify:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return FlowServer.of((api.url or "").rstrip("/"), auth_string=auth, api_key=key, tls=tls)


def check_server() -> str:
    """Address of the server's API, once it has answered; empty where a temporary one will be started.

    Raises:
        ConfigError: it wants another password, or the address is none.
        LaunchError: it does not answer, or is none.
    """
    from dflop.doctor.flow_server import get

    server = configured_server()
    if not server.url:
        return ""
    try:
        status, _ = get(server, "/admin/version")  # /health answers without a password
    except ValueError as error:
        raise ConfigError(f"not an address: {error}", where="PREFECT_API_URL", hint=_HINT) from None
    except OSError as error:
        raise LaunchError(
            f"the Prefect server at {server.url} does not answer: {getattr(error, 'reason', error)}",
            where="PREFECT_API_URL",
            hint="start it (prefect server start), or unset the variable for a temporary one; dflop train needs none",
        ) from None
    if status in (401, 403):
        given = "it refuses ours" if server.auth else "no password is given"
        raise ConfigError(
            f"the Prefect server at {server.url} wants a password, {given}",
            where="PREFECT_API_AUTH_STRING",
            hint="export PREFECT_API_AUTH_STRING, name:password as in the server's PREFECT_SERVER_API_AUTH_STRING",
        )
    if status != 200:
        what = f"what answers at {server.url} is no Prefect server: HTTP {status}"
        raise LaunchError(what, where="PREFECT_API_URL", hint=_HINT)
    return server.url


def lock_temporary_server() -> None:
    """Give the temporary server that Prefect is about to start a password of its own, which only this process knows.

    It listens on the loopback device, where everybody on a login node can reach it. Whoever has chosen a password in
    Prefect's settings keeps it.
    """
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    if settings.api.auth_string is None and settings.server.api.auth_string is None:
        password = f"dflop:{secrets.token_urlsafe(32)}"
        names = ("PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING")
        os.environ |= dict.fromkeys(names, password)
        refresh_global_settings_context()
        for name in names:  # Prefect hands it on to its server by its settings; nobody else needs it
            del os.environ[name]


_HINT = "PREFECT_API_URL=http://127.0.0.1:4200/api for a server on this machine"


def as_error_of_ours(error: Exception) -> DflopError | None:
    """What a flow's exception means that came out of Prefect's client; None of any other exception."""
    if type(error).__module__.partition(".")[0] not in _FOREIGN:
        return None
    told = " ".join(str(error).split())
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(f"the Prefect server refuses us: {told}", where="PREFECT_API_AUTH_STRING")
    return LaunchError(
        f"the Prefect server went away: {type(error).__name__}: {told}",
        where=os.environ.get("PREFECT_API_URL", "temporary server"),
        hint="jobs go on without it: dflop run again, or dflop train RUN, which needs no server",
    )


def mark_as_driver() -> None:
    """Let a temporary server be known as ours: killed with -9, this process leaves it behind for `dflop reap`."""
    from dflop.run.stray_servers import driver_mark

    os.environ |= driver_mark()
