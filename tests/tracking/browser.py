"""A page in a headless Chromium, driven over its debugging port: for tests of the report."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
_START_S, _CALL_S = 60.0, 60.0


class Page:
    """A tab: calls of the DevTools protocol, and the errors that the page has logged since it was opened."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._loop, self._socket, self._calls = loop, socket, 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        return self._loop.run_until_complete(asyncio.wait_for(self._call(method, parameters), _CALL_S))

    async def _call(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == self._calls:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, about: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"].get("exception", about)))
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])

    def show(self, address: str, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Open an address in a window of that size, and wait until it has drawn itself."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")
        self.frames()

    def frames(self) -> None:
        """Wait until what was changed is drawn."""
        self.value("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def value(self, expression: str) -> Any:
        """Evaluate an expression in the page; a promise is waited for."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression holds."""
        end = time.monotonic() + _CALL_S
        while not self.value(expression):
            assert time.monotonic() < end, f"waited {_CALL_S:.0f} s for {expression}"
            time.sleep(0.05)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at one point of the window, and release it at another."""
        for kind, (x, y) in (("mousePressed", start), ("mouseMoved", end), ("mouseReleased", end)):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=1)
        self.frames()

    def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def open_page() -> Iterator[Page]:
    """Start a browser with one page, and end it."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        process = subprocess.Popen(
            [BROWSER, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        loop = asyncio.new_event_loop()
        try:
            session = aiohttp.ClientSession(loop=loop)
            socket = loop.run_until_complete(_connect(session, Path(profile) / "DevToolsActivePort", process))
            yield Page(loop, socket)
            loop.run_until_complete(session.close())
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the program may be a script that starts the browser
            process.wait()
            loop.close()


async def _connect(
    session: aiohttp.ClientSession, file: Path, process: subprocess.Popen[bytes]
) -> aiohttp.ClientWebSocketResponse:
    end = time.monotonic() + _START_S
    while not (file.is_file() and len(file.read_text().splitlines()) == 2):
        assert process.poll() is None, f"{BROWSER} ended with {process.returncode}"
        assert time.monotonic() < end, f"{BROWSER} opened no port in {_START_S:.0f} s"
        await asyncio.sleep(0.05)
    port = file.read_text().split()[0]
    async with session.get(f"http://127.0.0.1:{port}/json") as answer:
        pages = [page for page in await answer.json(content_type=None) if page["type"] == "page"]
    return await session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=0)
