"""Control a headless Chromium with the parts of its DevTools protocol that the page's tests need.

Debian's own Chromium, and no driver besides: nothing is downloaded, and the browser itself resolves no names.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SECONDS = 300.0

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or not find_spec("websockets") or not find_spec("nicegui"),
    reason="a browser's test needs Chromium (Debian has it), and the extras web and test",
)


class Page:
    """A tab. `asked` contains the URLs of all its requests, and `said` the messages of its console."""

    def __init__(self, socket: Any) -> None:
        self.asked: list[str] = []
        self.output: list[str] = []
        self._socket = socket
        self._next = 1
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""

    async def read(self) -> None:
        """Read the browser's messages until it ends."""
        import websockets

        with contextlib.suppress(websockets.ConnectionClosed):
            await self._read()

    async def _read(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                self._replies.pop(message["id"]).set_result(message)
            elif message["method"] == "Network.requestWillBeSent":
                self.asked.append(message["params"]["request"]["url"])
            elif message["method"] == "Runtime.exceptionThrown":
                self.output.append(str(message["params"]["exceptionDetails"]))

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number, self._next = self._next, self._next + 1
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "method": method, "params": parameters}
        await self._socket.send(json.dumps(request | ({"sessionId": self._session} if self._session else {})))
        message = await asyncio.wait_for(reply, _SECONDS)
        assert "error" not in message, message
        found: dict[str, Any] = message["result"]
        return found

    async def attach(self) -> None:
        target = await self.ask("Target.createTarget", url="about:blank")
        attached = await self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            await self.ask(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until the expression is true. Fail the test if that takes long."""
        async with asyncio.timeout(_SECONDS):
            while not await self.value(f"Boolean({expression})"):
                await asyncio.sleep(0.05)

    async def rows(self, table: str) -> list[dict[str, str]]:
        """Return the displayed cells of a table, by heading."""
        found: list[dict[str, str]] = await self.value(
            f"""(() => {{
                const table = document.querySelector('[data-table="{table}"]');
                const isText = node => node.nodeType === 3;
                const text = each => [...each.childNodes].filter(isText).map(node => node.data).join('');
                const heads = [...table.querySelectorAll('thead th')].map(text);
                return [...table.querySelectorAll('tbody tr')].map(row => Object.fromEntries(
                    [...row.querySelectorAll('td')].map((cell, i) => [heads[i], cell.innerText.trim()])));
            }})()"""
        )
        return found

    async def click(self, text: str, within: str = "body", row: str = "") -> None:
        """Click the button with this text as soon as it exists; in a table, that of the row whose first cell
        is `row`.
        """
        in_row = f" && each.closest('tr').cells[0].innerText.trim() === {json.dumps(row)}" if row else ""
        button = (
            f"[...document.querySelectorAll('{within} button')]"
            f".find(each => each.innerText.trim() === {json.dumps(text)} && each.offsetParent !== null{in_row})"
        )
        await self.until(button)
        await self.value(f"{button}.click()")

    async def fill(self, field: str, text: str) -> None:
        """Replace the value of an input, as if somebody had typed it."""
        found, output = f"document.querySelector({json.dumps(field)})", json.dumps(text)
        await self.until(found)
        await self.value(
            f"""(() => {{
                const input = {found};
                Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value').set.call(input, {output});
                input.dispatchEvent(new Event('input', {{bubbles: true}}));
            }})()"""
        )
        await self.until(f"{found}.value === {output}")

    async def resize(self, width: int, height: int) -> None:
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )


@asynccontextmanager
async def browser(directory: Path, *options: str) -> AsyncIterator[Page]:
    """Yield a page in a new browser, whose files are in `directory`. The browser ends with the block."""
    # Chromium does not remove its temporary files when it is ended. The path of a socket has to be short.
    with TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        async with _started(directory, temporary, *options) as page:
            yield page


@asynccontextmanager
async def _started(directory: Path, temporary: str, *options: str) -> AsyncIterator[Page]:
    import websockets

    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={directory}",
        "--remote-debugging-port=0",
        *options,
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HOME": str(directory), "TMPDIR": temporary},
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        address = ""
        async with asyncio.timeout(_SECONDS):
            while not address:
                line = (await process.stderr.readline()).decode()
                assert line, "Chromium has ended"
                address = line.partition("DevTools listening on ")[2].strip()
        drain = asyncio.create_task(process.stderr.read())
        async with websockets.connect(address, max_size=1 << 26) as socket:
            page = Page(socket)
            reading = asyncio.create_task(page.read())
            await page.attach()
            yield page
            await page.ask("Page.close")
            reading.cancel()
        drain.cancel()
    finally:
        try:
            os.killpg(process.pid, 15)
            await asyncio.wait_for(process.wait(), 10)
        except ProcessLookupError:
            pass
        except TimeoutError:
            os.killpg(process.pid, 9)
            await process.wait()
