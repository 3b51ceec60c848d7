"""A headless Chromium over the DevTools protocol, on a pipe: enough to open a page, ask it and hear what it says.

No package is needed for that; the browser is Debian's `chromium` (or any of `NAMES`).
"""

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-extensions",
    "--disable-sync", "--hide-scrollbars", "--mute-audio", "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip
LIMIT_S = 60.0


def browser_path() -> str | None:
    """The browser of this machine; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One browser process; pages are opened one after the other, each in a tab of its own."""

    def __init__(self, folder: Path) -> None:
        path = browser_path()
        assert path is not None
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads file descriptor 3 and writes 4; only a shell puts them there.
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        command = ["bash", "-c", shell, "-", path, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_read, to_write), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(folder)},
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._number = 0
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._events: dict[str, list[dict[str, Any]]] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer; what happens meanwhile is kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + LIMIT_S
        while True:
            found = self._next(deadline)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                result: dict[str, Any] = found["result"]
                return result

    def events(self, session: str) -> list[dict[str, Any]]:
        """What a page has said so far."""
        return self._events.setdefault(session, [])

    def wait_for(self, session: str, method: str) -> None:
        """Waits until a page has said something of a kind."""
        deadline = time.monotonic() + LIMIT_S
        while not any(e["method"] == method for e in self.events(session)):
            self._next(deadline)

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)

    def _next(self, deadline: float) -> dict[str, Any]:
        message = self._messages.get(timeout=max(0.01, deadline - time.monotonic()))
        assert message is not None, f"the browser ended with code {self._process.wait(10)}"
        if "method" in message:
            self.events(message.get("sessionId", "")).append(message)
        return message

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 16):
            *whole, rest = (rest + chunk).split(b"\0")
            for text in whole:
                self._messages.put(json.loads(text))
        os.close(self._read)
        self._messages.put(None)


class Page:
    """One tab with one document."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command to this tab."""
        return self._browser.call(method, self._session, **params)

    def eval(self, expression: str) -> Any:
        """The value of a JavaScript expression; an exception in it fails the test."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def said(self) -> list[str]:
        """Everything that the page has put on the console, and every exception that nobody caught."""
        self.eval("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        kinds = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Audits.issueAdded")
        return [json.dumps(e["params"]) for e in self._browser.events(self._session) if e["method"] in kinds]

    def requests(self) -> list[str]:
        """Addresses that were asked for."""
        events = self._browser.events(self._session)
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


@contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, dark: bool = False, printed: bool = False
) -> Iterator[Page]:
    """A document from disk in a tab of its own.

    Args:
        browser: Shows it.
        path: The document.
        width: Of the window, px; up to 500 it is a phone's.
        dark: Whether the reader prefers dark colours.
        printed: Whether it is shown as on paper.
    """
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page = Page(browser, session)
    for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
        page.call(f"{domain}.enable")
    is_phone = width <= 500
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=is_phone)
    page.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    page.call("Emulation.setEmulatedMedia", media="print" if printed else "screen", features=features)
    browser.events(session).clear()
    page.call("Page.navigate", url=path.absolute().as_uri())
    browser.wait_for(session, "Page.loadEventFired")
    try:
        yield page
    finally:
        browser.call("Target.closeTarget", targetId=target)
