"""The Prefect server behind `dflop run` and `dflop serve`: our settings for its clients, and whether it answers.

It is asked once, in seconds and before anything else: a flow meets a wrong password with pages of traceback, and tries
for minutes to reach a server that is not there.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

from dflop.errors import ConfigError, DflopError, LaunchError

DEFAULTS = {
    # Nothing is reported.
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
TIMEOUT_S = 10
_HINT = "PREFECT_API_URL=http://127.0.0.1:4200/api for a server on this machine"
_FOREIGN = ("httpx", "httpcore", "prefect", "websockets", "anyio")


def prepare() -> None:
    """Put our settings into the environment, from which jobs and temporary servers have theirs, too."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)


def load_flow(name: str) -> Any:
    """A flow of `flows/pipeline.py`, by path as Prefect loads deployments."""
    from prefect.flows import load_flow_from_entrypoint

    from dflop import resources

    return load_flow_from_entrypoint(f"{resources.path('flows')}/pipeline.py:{name}", use_placeholder_flow=False)


async def watch_for_silent_flows() -> None:
    """Have the server note as crashed what runs of flows gave no sign of life for long; asked for once per server."""
    from prefect.client.orchestration import get_client
    from prefect.events.schemas.automations import AutomationCore

    from dflop import resources

    wanted = AutomationCore.model_validate_json((resources.path("flows") / "silent_flows.json").read_text())
    async with get_client() as client:
        if not await client.read_automations_by_name(wanted.name):
            await client.create_automation(wanted)


def check_server() -> tuple[str, str]:
    """Address of the server's API and its version, once it has answered; empty where a temporary one will be started.

    Raises:
        ConfigError: it wants another password, or the address is none.
        LaunchError: it does not answer, or is none.
    """
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, get_current_settings, temporary_settings

    api = get_current_settings().api
    if not (url := (api.url or "").rstrip("/")):
        return "", ""
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with (
            temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),
            get_client(httpx_settings={"timeout": TIMEOUT_S}, sync_client=True) as client,
        ):
            return url, str(client.api_version())  # /health answers without a password
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, ValueError) as error:
        what = f"`{url}` is no address of a Prefect server: {error}"
        raise ConfigError(what, where="PREFECT_API_URL", hint=_HINT) from None
    except httpx.HTTPError as error:
        what = f"the Prefect server at {url} does not respond: {error}"
        hint = "start it (prefect server start), or unset the variable for a temporary one; dflop train needs none"
        raise LaunchError(what, where="PREFECT_API_URL", hint=hint) from None
    if status in (401, 403):
        what = f"the Prefect server at {url} requires a password, "
        what += "it refuses the one that is set" if api.auth_string or api.key else "none is set"
        hint = "export PREFECT_API_AUTH_STRING, name:password as in the server's PREFECT_SERVER_API_AUTH_STRING"
        raise ConfigError(what, where="PREFECT_API_AUTH_STRING", hint=hint)
    what = f"what answers at {url} is no Prefect server: HTTP {status}"
    raise LaunchError(what, where="PREFECT_API_URL", hint=_HINT)


def lock_temporary_server() -> None:
    """Give the temporary server that Prefect is about to start a password that only this process knows.

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


def as_error_of_ours(error: Exception) -> DflopError | None:
    """What a flow's exception means that came out of Prefect's client; None of any other exception."""
    if type(error).__module__.partition(".")[0] not in _FOREIGN:
        return None
    reason = " ".join(str(error).split())
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return ConfigError(f"the Prefect server refused the request: {reason}", where="PREFECT_API_AUTH_STRING")
    return LaunchError(
        f"connection to the Prefect server lost: {type(error).__name__}: {reason}",
        where=os.environ.get("PREFECT_API_URL", "temporary server"),
        hint="jobs continue without it: start dflop run again, or dflop train RUN, which needs no server",
    )
