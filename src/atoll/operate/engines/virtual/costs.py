"""What messages and gangs cost the processes of a cluster, as measured on real ones."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """In seconds. Registering and compiling cost nothing: they happen once, before anything is measured.

    The controller's and the hosts' are those of the real processes on a machine of 2 cores (`python -m benchmarks fig5
    --null`
    tells them). Clients cost nothing but their messages' way.
    """

    # One way, of a control message, on a machine's network.
    latency: float = 50e-6
    # The controller, for a gang and each of its hosts: half when it tells the host, half when it hears of the end.
    controller_gang_host: float = 10e-6
    # And for the gang as such: half when its launch comes, half when it starts.
    controller_gang: float = 15e-6
    # A host, for its part in a gang: it walks the leg, enqueues, and reports the end.
    host_gang: float = 50e-6
    # Anybody, for any other message; a host also for the arrival of what a parked leg has waited for.
    message: float = 5e-6


MEASURED = Costs()
