"""Machines of a cluster: `atoll host`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from atoll.operate.command.terminal import say


def host(
    address: Annotated[
        str,
        typer.Option("--address", help="Where the controller listens: HOST:PORT. ATOLL_ADDRESS if not given."),
    ] = "",
    join: Annotated[
        str,
        typer.Option(
            "--join",
            metavar="FILE",
            help="The file with the cluster's join token for hosts: `atoll up --host-join-file FILE` writes it. "
            "ATOLL_JOIN if not given.",
        ),
    ] = "",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="The cluster was started with --insecure: there is no TLS.")
    ] = False,
    island: Annotated[
        int | None, typer.Option(min=0, help="The island that this machine is for; any if not given.")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Which host of the island it is; without --island, of the whole cluster. As the launcher says in "
            "the environment if not given, else any.",
        ),
    ] = None,
    advertise: Annotated[
        str,
        typer.Option(
            help="The name or address under which the cluster's other machines and clients reach this one. The one "
            "from which it reaches the controller, if not given.",
            metavar="HOST",
        ),
    ] = "",
    listen: Annotated[
        str,
        typer.Option(
            help="The address at which its worker listens. The advertised one; all of the machine's where --advertise "
            "is given.",
            metavar="HOST",
        ),
    ] = "",
    coordinator_address: Annotated[
        str,
        typer.Option(
            help="This machine's address on the network that the hosts of an island compute over. The advertised one "
            "if not given.",
            metavar="HOST",
        ),
    ] = "",
    group: Annotated[
        str, typer.Option(help="A name for machines that are near one another: an island is made of such first.")
    ] = "",
    grace: Annotated[
        float,
        typer.Option(help="Seconds from SIGTERM on in which the cluster may move what is here to other machines."),
    ] = 25.0,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for the next cluster at this address where one has ended.")
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            help="How many hosts of the cluster this machine is, each with a worker of its own and its part of the "
            "GPUs. Each rank then stands for so many.",
        ),
    ] = 1,
    parent: Annotated[int, typer.Option(help="End with the process that has this pid.", metavar="PID")] = 0,
) -> None:
    """Give this machine to a cluster that was started with `atoll up --engine hosts`.

    It dials the controller, again and again, and holds one worker there for as long as the cluster asks for it; it ends
    with the cluster. Start it on each machine by whatever starts commands there:

    - `ssh machine ATOLL_JOIN=FILE atoll host`, where FILE is a copy of what `atoll up --host-join-file` has written

    - `srun atoll host --join FILE`: each task has the rank that Slurm gives it. The same for Open MPI's
    `mpirun`, and for the pods of an indexed Job or a JobSet.

    A machine that asks for no rank takes any that is free. One that is left over is a spare, and takes the place of the
    first that is lost.
    """
    from atoll.cluster.directories import default_cache_directory
    from atoll.cluster.processes.process_runtime import run_loop, start_logging
    from atoll.engines.agent.agent import run_agents
    from atoll.engines.agent.agent_options import AgentOptions, options_of_workers, rank_slot_of
    from atoll.errors import SettingsError
    from atoll.operate.joining import reach
    from atoll.security.access import INSECURE_VARIABLE
    from atoll.security.join_token import JOIN_VARIABLE

    if not (address or join):
        address, join = os.environ.get("ATOLL_ADDRESS", ""), os.environ.get(JOIN_VARIABLE, "")
    if not (address or join):
        raise SettingsError("where is the controller? Give --join or --address, or set ATOLL_JOIN or ATOLL_ADDRESS")
    if insecure:
        os.environ[INSECURE_VARIABLE] = "1"
    reached = reach(address, join, for_hosts=True)
    controller = reached.address
    # For this process, which reads a file anew each time it has to join, and for its worker.
    if join and not join.startswith("atoll://"):
        os.environ[JOIN_VARIABLE] = os.path.abspath(join)
    elif reached.join is not None:
        os.environ[JOIN_VARIABLE] = join or str(reached.join)
    if controller.is_unix:
        raise SettingsError(f"{address}: a host agent reaches its controller over TCP: expected HOST:PORT")
    rank_slot = rank_slot_of(os.environ, island, rank)
    options = AgentOptions(controller, rank_slot, advertise, listen, coordinator_address, group, grace, stay, parent)
    agents = options_of_workers(options, workers)
    start_logging("host")

    def joined(agent: AgentOptions) -> None:
        who = "this host" if workers == 1 else agent.machine
        say(f"{who} has joined the cluster at {controller}: it takes {agent.rank_slot}")

    def happened(agent: AgentOptions, text: str) -> None:
        say(text if workers == 1 else f"{agent.machine}: {text}")

    run_loop(lambda stop: run_agents(agents, default_cache_directory(), joined, stop, happened))
