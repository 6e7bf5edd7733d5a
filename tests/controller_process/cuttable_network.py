"""A network between two processes that a test can interrupt or delay."""

from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.wire.address import Address


class Relay:
    """Relay that forwards all connections to `address` to the process that listens at `there`."""

    def __init__(self, path: Path, there: Address) -> None:
        self.address = Address(path=str(path))
        self._there = there
        self._passes, self._passes_back = asyncio.Event(), asyncio.Event()
        self.pass_on()
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server

    @property
    def is_used(self) -> bool:
        """Return whether a peer has connected since the last cut."""
        return bool(self._writers)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._carry, self.address.path)

    def cut(self) -> None:
        """End all connections, and refuse new ones until `start`."""
        self._server.close()
        Path(self.address.path).unlink(missing_ok=True)  # from Python 3.13 on, the server removes it
        self._abort()

    def drop(self) -> None:
        """End all connections. New ones work."""
        self._abort()

    def hold(self) -> None:
        """Hold back all bytes to the listening process until `pass_on`."""
        self._passes.clear()

    def hold_back(self) -> None:
        """Hold back all bytes from the listening process until `pass_on`."""
        self._passes_back.clear()

    def pass_on(self) -> None:
        self._passes.set()
        self._passes_back.set()

    def end(self) -> None:
        self._server.close()
        self._abort()
        for pump in self._pumps:
            pump.cancel()

    def _abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            there, to_there = await asyncio.open_unix_connection(self._there.path)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(to_there)
        for pump in (self._pump(reader, to_there, self._passes), self._pump(there, writer, self._passes_back)):
            task = asyncio.get_running_loop().create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
        try:
            while data := await reader.read(1 << 16):
                await passes.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            """The other connection is aborted as well."""
        writer.close()
