"""What a run still has to tell its Prefect server. The run never waits for it: a server that is away costs the page."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Self

import httpx

from dflop.errors import Cancelled
from dflop.run.messages import Say

TIMEOUT_S = 15.0
"""Of a request: a server that accepts and does not answer is away."""
RETRY_S = 5.0
END_S, SHORT_END_S = 60.0, 5.0
"""How long the end of a flow waits for a server that is away; the short one where somebody has stopped it."""
_RETRIED = (401, 403, 408, 429)
"""Of the answers 4xx, those that another time may not be given."""

Send = Callable[[], Coroutine[Any, Any, Any]]


class Outbox:
    """Sends in order, one after the other and in the background, and again until the server has answered.

    For the length of a block, in which it is `OUTBOX`; the end of the block waits for what is not sent yet. `say` hears
    that the server does not respond, that it does again, and at the end what its page lacks.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._waiting: dict[str, tuple[Context, Send]] = {}
        self._sender: asyncio.Task[None] | None = None
        self.is_away = False
        """Whether the last request had no answer."""

    def put(self, name: str, send: Send) -> None:
        """Send this, in the context of the caller, in place of what waits under the same name."""
        self._waiting[name] = copy_context(), send
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send(), name="outbox")

    async def __aenter__(self) -> Self:
        OUTBOX.set(self)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        is_stopped = isinstance(error, Cancelled) or not isinstance(error, Exception | None)
        if self._sender is not None:
            await asyncio.wait({self._sender}, timeout=SHORT_END_S if is_stopped else END_S)
            self._sender.cancel()
        if self._waiting:
            self._say(f"the Prefect server did not respond until the end; its page lacks {', '.join(self._waiting)}")

    async def _send(self) -> None:
        while self._waiting:
            name, (context, send) = next(iter(self._waiting.items()))
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await asyncio.get_running_loop().create_task(send(), context=context)
            except Exception as error:  # whatever a client, a proxy or a server comes up with
                if _is_away(error):
                    if not self.is_away:
                        what = f"{type(error).__name__}: {error}".rstrip(": ")
                        self._say(f"the Prefect server does not respond, the run continues without it: {what}")
                    self.is_away = True
                    await asyncio.sleep(RETRY_S)
                    continue
                self._say(f"cannot be shown: {name}: {type(error).__name__}: {error}")
            else:
                if self.is_away:
                    self._say("the Prefect server responds again")
                self.is_away = False
            if self._waiting[name][1] is send:
                del self._waiting[name]


def _is_away(error: Exception) -> bool:
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500 or error.response.status_code in _RETRIED
    return isinstance(error, httpx.TransportError | OSError)


OUTBOX: ContextVar[Outbox] = ContextVar("outbox")
"""That of the flow run in whose context this is."""
