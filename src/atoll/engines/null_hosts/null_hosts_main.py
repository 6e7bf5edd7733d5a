"""The process of one island of null devices."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `run_loop`, since the objects of modules are permanent

import asyncio
import logging
import os
from functools import partial

from atoll.cluster.processes.lifeline import watch_in_thread
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import freeze_gc, read_options, run_loop
from atoll.cluster.processes.startup_heartbeat import StartupHeartbeat
from atoll.engines.null_hosts.null_island import NullIsland, NullProcess, hosts_of, raise_limits
from atoll.worker.worker_options import IslandOptions

_log = logging.getLogger(__name__)


async def serve(options: IslandOptions, signs: StartupHeartbeat, stop: asyncio.Event) -> None:
    process = NullProcess.open(f"the process of {hosts_of(options)}")
    with signs.waiting("connected to the controller"):
        await NullIsland(options, process, stop).start()
    signs.ready()
    freeze_gc()
    await stop.wait()


def main() -> None:
    options = read_options(IslandOptions)
    signs = StartupHeartbeat.of_arguments()
    start_logging("null island")
    watch_in_thread(options.parent, lambda: os._exit(0))
    raise_limits()
    try:
        run_loop(partial(serve, options, signs))
    except Exception:
        _log.exception("this island fails")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
