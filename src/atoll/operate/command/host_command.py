"""The machines of a cluster: `atoll host`."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from atoll.cluster.environment_variables import ADDRESS, INSECURE, JOIN

_log = logging.getLogger(__name__)


def host(
    address: Annotated[
        str,
        typer.Option(
            "--address", help="Address of the controller: HOST:PORT. Defaults to ATOLL_ADDRESS.", metavar="ADDRESS"
        ),
    ] = "",
    join: Annotated[
        str,
        typer.Option(
            "--join",
            metavar="FILE",
            help="File with the cluster's join token of hosts, which `atoll up --host-join-file FILE` writes. Defaults "
            "to ATOLL_JOIN.",
        ),
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connect without TLS, to a cluster started with --insecure.")
    ] = False,
    island: Annotated[
        int | None, typer.Option(min=0, help="Island for this machine. Defaults to any.", metavar="ISLAND")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of this host in the island, or without --island in the whole cluster. Defaults to that of the "
            "launcher, from the environment, then to any.",
            metavar="RANK",
        ),
    ] = None,
    advertise: Annotated[
        str,
        typer.Option(
            help="Name or address at which other machines and clients reach this machine. Defaults to the address from "
            "which it reaches the controller.",
            metavar="HOST",
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            help="Address at which the worker listens. Defaults to the advertised one, or with --advertise to all "
            "addresses of the machine.",
            metavar="HOST",
        ),
    ] = "",
    coordinator_address: Annotated[
        str,
        typer.Option(
            help="Address of this machine on the network that the hosts of an island use for collectives. Defaults to "
            "the advertised one.",
            metavar="HOST",
        ),
    ] = "",
    group: Annotated[
        str,
        typer.Option(
            help="Name of a group of machines that are close to each other. Islands prefer machines of one group.",
            metavar="NAME",
        ),
    ] = "",
    grace: Annotated[
        float,
        typer.Option(
            help="Seconds after SIGTERM for the cluster to move work and arrays to other machines.", metavar="SECONDS"
        ),
    ] = 25.0,
    stay: Annotated[
        bool,
        typer.Option(
            "--stay", help="Wait for the next cluster at this address after one has ended, without a time limit."
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of hosts that this machine provides, each with a worker and a part of the GPUs. A rank then "
            "stands for this many hosts.",
            metavar="N",
        ),
    ] = 1,
    parent: Annotated[int, typer.Option(help="Exit when the process with this pid exits.", metavar="PID")] = 0,
) -> None:
    """Provide this machine to a cluster as a host.

    For a cluster that was started with `atoll up --engine hosts`. The command connects to the controller, retrying as
    needed, runs one worker while the cluster needs it, and exits when the cluster ends. If it was away at that time, it
    exits with status 1 after 10 minutes.

    Start it on each machine, for example with `ssh machine ATOLL_JOIN=FILE atoll host`, where FILE is a copy of the
    file that `atoll up --host-join-file` wrote. With `srun atoll host --join FILE`, each task has the rank that Slurm
    assigns. Ranks of Open MPI's `mpirun`, and of the pods of an indexed Job or a JobSet, work likewise.

    A machine without a rank takes any free one. A surplus machine is a spare, and replaces the first machine that is
    lost.
    """
    from atoll.cluster.directories import default_cache_directory
    from atoll.cluster.processes.process_logging import logging_environment, start_logging
    from atoll.cluster.processes.process_runtime import run_loop
    from atoll.engines.agent.agent import run_agents
    from atoll.engines.agent.agent_options import AgentOptions, options_of_workers, rank_slot_of
    from atoll.errors import SettingsError
    from atoll.operate.joining import reach

    if not (address or join):
        address, join = ADDRESS.text(), JOIN.text()
    if not (address or join):
        raise SettingsError("no cluster given: use --join or --address, or set ATOLL_JOIN or ATOLL_ADDRESS")
    if insecure:
        os.environ[INSECURE.variable] = "1"
    reached = reach(address, join, for_hosts=True)
    controller = reached.address
    # For this process, which reads the file each time it joins, and for its worker.
    if join and not join.startswith("atoll://"):
        os.environ[JOIN.variable] = os.path.abspath(join)
    elif reached.join is not None:
        os.environ[JOIN.variable] = join or str(reached.join)
    if controller.is_unix:
        raise SettingsError(f"{address}: a host agent connects to its controller over TCP; give HOST:PORT")
    rank_slot = rank_slot_of(os.environ, island, rank)
    options = AgentOptions(controller, rank_slot, advertise, listen, coordinator_address, group, grace, stay, parent)
    agents = options_of_workers(options, workers)
    os.environ.update(logging_environment())  # also for its worker
    start_logging("host")

    def joined(agent: AgentOptions) -> None:
        who = "this host" if workers == 1 else agent.machine
        _log.info("%s has joined the cluster at %s for %s", who, controller, agent.rank_slot)

    def happened(agent: AgentOptions, text: str) -> None:
        _log.info("%s", text if workers == 1 else f"{agent.machine}: {text}")

    run_loop(lambda stop: run_agents(agents, default_cache_directory(), joined, stop, happened))
