"""x = f(x) on all devices of a cluster of null devices, many times: what the micro-benchmarks of dispatch do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atoll.devices.null.null_program import NullProgram
from atoll.session.bare import BareClient, call, program, sharded


class Steps:
    """A program of `nodes` computations, each feeding the next, that a client calls again and again."""

    def __init__(self, client: BareClient, made: int, program: int) -> None:
        self._client = client
        self._made = made
        self._program = program

    @classmethod
    async def prepare(
        cls, client: BareClient, seconds: float, nodes: int = 1, devices: Sequence[int] | None = None
    ) -> Steps:
        """Each computation takes so long on all of these devices together; on all there are, if none are given."""
        everywhere = client.devices if devices is None else devices
        scalar, spec = ("uint8", (4,)), sharded(everywhere)
        first = await client.compile(NullProgram("first", 0.0, (), (scalar,)), everywhere)
        step = await client.compile(NullProgram("step", seconds, (scalar,), (scalar,)), everywhere)
        chain = [call(step, (i,), (spec,), everywhere) for i in range(nodes)]
        return cls(
            client,
            client.register(program("first", (), [call(first, (), (spec,), everywhere)], (0,))),
            client.register(program("steps", (spec,), chain, (nodes,))),
        )

    async def begin(self) -> list[int]:
        """The value of which the first call is made: its handle, which the caller releases."""
        return await self._client.launch(self._made, (), 1)

    async def run(self, calls: int, fill: int = 0) -> float:
        """So many calls after `fill` others, each of the result of the one before; seconds for them."""
        (began, _), (ended, _) = await self.progress(calls, fill)
        return ended - began

    async def run_for(self, seconds: float) -> None:
        """Calls, for so long, as fast as the session's window allows."""
        client, loop = self._client, asyncio.get_running_loop()
        (x,) = await self.begin()
        until = loop.time() + seconds
        while loop.time() < until:
            (y,) = await client.launch(self._program, (x,), 1)
            client.release((x,))
            x = y
            await asyncio.sleep(0)  # for what arrives meanwhile
        await client.wait((x,))
        client.release((x,))

    async def progress(self, calls: int, fill: int = 0, parts: int = 1) -> list[tuple[float, float]]:
        """As `run`: (when, how many of the calls had ended), at the beginning and after each of so many parts.

        The clock starts when the others have ended, by when these are on their way: what it takes to fill the pipeline
        is left out.
        """
        client = self._client
        counts = sorted({round(calls * part / parts) for part in range(1, parts + 1)} - {0})
        (x,) = await self.begin()
        asked = [] if fill else [(0, client.when_ready((x,)))]
        for number in range(fill + calls):
            (y,) = await client.launch(self._program, (x,), 1)
            if (count := number + 1 - fill) in (0, *counts):
                asked.append((count, client.when_ready((y,))))
            client.release((x,))
            x = y
            await asyncio.sleep(0)  # for what arrives meanwhile
        client.release((x,))
        return [(await at, float(count)) for count, at in asked]
