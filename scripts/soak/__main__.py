"""A cluster under load while its processes are killed, and with `--machines` its machines and links fail.

Clients run random programs and transfers and check every result; meanwhile, every few seconds, a fault is injected. In
the end nothing may be wrong, hang, or be left behind.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from atoll.cluster.settings import check_known
from scripts.soak.ground import Ground, describe_hang, report
from scripts.soak.machines import ManyMachines
from scripts.soak.one_machine import OneMachine
from scripts.soak.users import HangError, SoakError, Users
from tests.machines.machine_clock import Deadline

SETTLE_SECONDS = 60.0  # of a `MachineClock`
# No fault is injected in the last seconds, since nobody would see the end of it.
LAST_SECONDS = 5.0
console = Console(soft_wrap=True)


def inject(ground: Ground, users: Users, rng: random.Random) -> str:
    """Inject a fault. If a victim is out of reach, take another. Return the kind."""
    kinds, weights = list(ground.kinds), list(ground.kinds.values())
    while not ground.inject(kind := rng.choices(kinds, weights)[0], users, rng):
        pass
    return kind


def settle(ground: Ground) -> dict[str, Any]:
    """The report once all is quiet: no session, nothing in flight, no byte in use. Raises SoakError if it never is."""
    deadline = Deadline(SETTLE_SECONDS)
    while True:
        status = report(ground)
        devices = [device for island in status["islands"] for host in island["hosts"] for device in host["devices"]]
        held = [device for device in devices if device["used_bytes"]]
        busy = [i for i in status["islands"] if i["state"] != "ready" or i["in_flight"] or i["waiting"]]
        if not status["sessions"] and not held and not busy:
            ground.atoll("check")  # the controller's books, and the hosts'
            return status
        if deadline.is_over:
            raise SoakError(f"not all is back where it began: {json.dumps(status)}")
        time.sleep(0.5)


def check_log(ground: Ground) -> None:
    """Raise SoakError if a process of the cluster met an error that it did not expect."""
    log = ground.log()
    if "Traceback" in log:
        at = log.index("Traceback")
        raise SoakError(f"a process of the cluster met an unexpected error:\n{log[max(0, at - 1000) : at + 4000]}")


def run(ground: Ground, minutes: float, clients: int, trainings: int, every: float, seed: int, logs: Path) -> None:
    """Raises SoakError where anything goes wrong."""
    rng = random.Random(seed)
    ground.begin()
    users = Users(clients, trainings, minutes * 60, seed, ground.start_user, logs)
    injected: Counter[str] = Counter()
    spared = 0  # faults that were not injected
    try:
        end = time.monotonic() + minutes * 60
        users.watch(min(20.0, minutes * 20))
        while time.monotonic() < end:
            if users.are_spared:
                spared += 1
            elif users.alive and time.monotonic() < end - LAST_SECONDS:
                with users.fault():
                    injected[inject(ground, users, rng)] += 1
            users.watch(rng.expovariate(1 / every))
        while users.alive:
            users.watch(1.0)
        status = settle(ground)
        check_log(ground)
        left = ground.end()
    except HangError as hang:
        raise SoakError(f"{hang}\n{describe_hang(ground, hang.user)}") from None
    finally:
        users.kill()
    if left:
        raise SoakError(f"left behind: {left}")
    done = ", ".join(f"{count} {name}" for name, count in sorted(users.steps().items()))
    console.print(f"no wrong result, no hang, nothing left: {done}")
    console.print(f"the longest time of a user without a step was {users.longest:.1f} s, which spared {spared} faults")
    console.print(f"injected: {dict(injected)}; restarts: {[i['restarts'] for i in status['islands']]}")
    if isinstance(ground, ManyMachines) and ground.back:
        middle, most = statistics.median(ground.back), max(ground.back)
        console.print(f"all islands were ready again after {middle:.1f} s (median), {most:.1f} s at most")
        for kind, seconds in ground.answered.items():
            middle, most = statistics.median(seconds), max(seconds)
            console.print(f"{kind}: an answer after {middle:.1f} s (median of {len(seconds)}), {most:.1f} s at most")
    if not sum(injected.values()):
        raise SoakError("nothing was injected: this proves nothing")


def main(
    minutes: Annotated[float, typer.Option(help="How long.")] = 10.0,
    clients: Annotated[int, typer.Option(help="How many at a time.")] = 3,
    trainings: Annotated[int, typer.Option(help="How many elastic trainings beside them.")] = 1,
    every: Annotated[float, typer.Option(help="Seconds between two faults, on average.")] = 5.0,
    islands: Annotated[str, typer.Option(help="The cluster.")] = "",
    seed: Annotated[int, typer.Option(help="Of all that is random; 0: of the clock.")] = 0,
    only: Annotated[str, typer.Option(help="Faults of this kind and no other, such as 'link cut'.")] = "",
    machines: Annotated[int, typer.Option(help="Over so many machines, which are namespaces (as root); 0: here.")] = 0,
) -> None:
    """Run it; exits with 1 and says why where anything went wrong."""
    seed = seed or int(time.time())
    islands = islands or ("2x2x1" if machines else "2x2x2")
    where = f"{islands} over {machines} machines" if machines else islands
    console.print(f"seed {seed}, {minutes:g} minutes, {clients} clients and {trainings} trainings on {where}")
    logs = Path(tempfile.mkdtemp(prefix="soak-users-"))
    ground: Ground = ManyMachines(machines, islands) if machines else OneMachine(islands)
    if only:
        check_known("kind of fault", only, ground.kinds)
        ground.kinds = {only: 1}
    try:
        run(ground, minutes, clients, trainings, every, seed, logs)
    except SoakError as error:
        (logs / "cluster").write_text(ground.log())
        console.print(f"\n[bold red]the soak failed[/] (seed {seed}; what all have said is in {logs}):", markup=True)
        console.print(str(error), markup=False)
        raise typer.Exit(1) from None
    else:
        shutil.rmtree(logs, ignore_errors=True)
    finally:
        ground.close()


if __name__ == "__main__":
    typer.run(main)
