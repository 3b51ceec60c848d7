"""The Prefect server behind `dflop run` and `dflop serve`: our settings for its clients, whether it answers, flow runs.

It is asked once, in seconds and before anything else: a flow meets a wrong password with pages of traceback, and tries
for minutes to reach a server that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from dflop.errors import ConfigError, DflopError, LaunchError

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.client.schemas.objects import State

    from dflop.run.directory import RunDir


class ServerAway(LaunchError):
    """There is no answer from the server."""


DEFAULTS = {
    # Nothing is reported.
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "PREFECT_TELEMETRY_ENABLE_RESOURCE_METRICS": "false",
    # Only the beginning and the end of a flow wait for a server: with pauses that double, for half a minute after the
    # last request had no answer.
    "PREFECT_CLIENT_MAX_RETRIES": "4",
    "PREFECT_API_REQUEST_TIMEOUT": "15",
    # Seconds between heartbeats; flows/silent_flows.json waits for them for longer than a server may be gone.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "180",
    # A temporary server is started with `python -m`, and is not to import modules of the working directory.
    "PYTHONSAFEPATH": "1",
    # A temporary server needs up to half a minute on a busy login node.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Events that find no server are sent when it is back.
    "PREFECT_INTERNAL_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FORMAT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "%(asctime)s %(message)s",
    "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "%(asctime)s %(task_run_name)s: %(message)s",
}
"""Settings, where the user has not chosen; to be in the environment before Prefect is imported."""
TIMEOUT_S = 10
DEPLOYMENTS = "here"
"""Name of deployments that `dflop serve` serves by default; flow runs of `dflop run` belong to them."""
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


async def create_automations(notify: str = "") -> None:
    """Have the server mark silent flow runs as crashed, and notify people through a block (`TYPE/NAME`), if named.

    Automations that the server has by their names are left as they are.

    Raises:
        ConfigError: the server has no such block.
    """
    from prefect.client.orchestration import get_client
    from prefect.events.schemas.automations import AutomationCore
    from prefect.exceptions import ObjectNotFound

    from dflop import resources

    flows = resources.path("flows")
    wanted = [json.loads((flows / "silent_flows.json").read_text())]
    async with get_client() as client:
        if notify:
            block_type, _, name = notify.partition("/")
            try:
                block = await client.read_block_document_by_name(name, block_type)
            except ObjectNotFound:
                what, hint = (
                    f"the Prefect server has no block `{notify}`",
                    "prefect block ls; TYPE/NAME, as slack-webhook/ops",
                )
                raise ConfigError(what, where="--notify", hint=hint) from None
            text = (flows / "notifications.json").read_text().replace("BLOCK_ID", str(block.id))
            wanted += json.loads(text)["automations"]
        for automation in map(AutomationCore.model_validate, wanted):
            if not await client.read_automations_by_name(automation.name):
                await client.create_automation(automation)


def check_server() -> tuple[str, str]:
    """Address of the server's API and its version, once it has answered; empty where a temporary one will be started.

    Raises:
        ConfigError: it wants another password, or the address is none.
        ServerAway: it does not answer.
        LaunchError: what answers is none.
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
        what = f"the Prefect server at {url} does not respond: {error or type(error).__name__}"
        hint = "start it (prefect server start), or unset the variable for a temporary one; dflop train needs none"
        raise ServerAway(what, where="PREFECT_API_URL", hint=hint) from None
    if status in (401, 403):
        what = f"the Prefect server at {url} requires a password, "
        what += "it refuses the one that is set" if api.auth_string or api.key else "none is set"
        hint = "export PREFECT_API_AUTH_STRING, name:password as in the server's PREFECT_SERVER_API_AUTH_STRING"
        raise ConfigError(what, where="PREFECT_API_AUTH_STRING", hint=hint)
    what = f"what answers at {url} is no Prefect server: HTTP {status}"
    raise LaunchError(what, where="PREFECT_API_URL", hint=_HINT)


def lock_temporary_server() -> None:
    """Give the temporary server that Prefect is about to start a password that only this process knows.

    It listens on the loopback device, which every user of a login node can reach. A password in Prefect's settings is
    kept.
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


async def run_pipeline(run: RunDir) -> None:
    """Drive a run by the flow, in this process, as a flow run of a deployment: buttons in the UI need one.

    Raises:
        Exception: as the flow did; see `lost_server`.
    """
    from prefect import flow_engine
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import get_current_settings
    from prefect.states import Pending

    flow, parameters = load_flow("pipeline"), {"run": str(run.path)}
    if get_current_settings().api.url:  # a temporary one ends with this process
        await create_automations()
    async with get_client() as client:
        try:
            deployment_id = (await client.read_deployment_by_name(f"{flow.name}/{DEPLOYMENTS}")).id
        except ObjectNotFound:
            deployment_id = await (await flow.ato_deployment(name=DEPLOYMENTS, tags=["dflop"])).aapply()
        flow_run = await client.create_flow_run_from_deployment(
            deployment_id, parameters=parameters, state=Pending(), name=run.run_id
        )
    await flow_engine.run_flow_async(flow, flow_run=flow_run, parameters=parameters)


async def close_flow_runs(client: PrefectClient, ids: Iterable[str], state: State[Any]) -> None:
    """Set a final state for flow runs without a driver; finished ones and those of other servers stay as they are."""
    from prefect.exceptions import ObjectNotFound

    for flow_run_id in ids:
        with contextlib.suppress(ObjectNotFound):
            found = await client.read_flow_run(UUID(flow_run_id))
            if found.state is None or not found.state.is_final():
                await client.set_flow_run_state(found.id, state, force=True)


def close_left(run: RunDir, state: str, why: str) -> None:
    """Close the flow runs that killed drivers left running, without a flow, if their server answers."""
    if not (ids := run.state().get("flow_runs")):
        return
    prepare()

    async def close() -> None:
        from prefect import states
        from prefect.client.orchestration import get_client

        async with asyncio.timeout(TIMEOUT_S), get_client() as client:
            await close_flow_runs(client, ids, getattr(states, state)(message=why))

    with contextlib.suppress(Exception):  # no Prefect, no server, a temporary one: the page of a run, not the run
        if check_server()[0]:
            asyncio.run(close())
            run.write_state({key: value for key, value in run.state().items() if key != "flow_runs"})


def lost_server(error: BaseException) -> DflopError | None:
    """What it means that a flow ended in an error of Prefect's, or of what it is made of; None for any other.

    The error of ours that it could not send is returned itself.
    """
    frame, where = error.__traceback__, ""
    while frame is not None:
        where, frame = str(frame.tb_frame.f_globals.get("__name__")), frame.tb_next
    is_foreign = any(name.partition(".")[0] in _FOREIGN for name in (type(error).__module__, where))
    if isinstance(error, DflopError) or not is_foreign:
        return None
    before: BaseException | None = error
    while before is not None:
        if isinstance(before, DflopError):
            return before
        before = before.__context__
    reason = " ".join(str(error).split()) or type(error).__name__
    return ServerAway(f"connection to the Prefect server lost: {reason}")
