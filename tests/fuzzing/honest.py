"""Run an honest session beside a fuzzer, in a separate process: `python -m tests.fuzzing.honest ADDRESS`.

Each step is one launch on null devices. For each input line, the process prints the number of steps since the previous
line, and the milliseconds of the longest step. It ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

from atoll.devices.null.null_program import NullProgram
from atoll.session.bare import BareClient, call, program, sharded
from tests.fuzzing.requests import read_requests

SHARD = ("uint8", (4,))
_PAUSE = 0.002  # between two steps, so that it notices stalls without keeping the machine busy


async def steps(address: str, token: str, asked: threading.Event, over: threading.Event) -> None:
    client = await BareClient.open(address, "an honest session", token)
    devices = client.islands[0][:1]
    zeros = await client.compile(NullProgram("zeros", 0.0, (), (SHARD,)), devices)
    made = client.register(program("zeros", (), [call(zeros, (), (sharded(devices),), devices)], (0,)))
    count, longest = 0, 0.0
    print("ready", flush=True)
    while not over.is_set():
        begin = time.monotonic()
        handles = await client.launch(made, (), 1)
        await client.wait(handles)
        client.release(handles)
        count, longest = count + 1, max(longest, time.monotonic() - begin)
        if asked.is_set():
            asked.clear()
            print(count, f"{1000 * longest:.1f}", flush=True)
            count, longest = 0, 0.0
        await asyncio.sleep(_PAUSE)
    client.close()


def main() -> None:
    asked, over = read_requests()
    asyncio.run(steps(sys.argv[1], os.environ["ATOLL_TOKEN"], asked, over))


if __name__ == "__main__":
    main()
