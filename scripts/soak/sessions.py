"""Suspend sessions and resume them, on the same islands or with their islands exchanged."""

from __future__ import annotations

import random
from collections.abc import Callable

from scripts.soak.ground import Ground, report
from scripts.soak.users import SoakError, Users
from tests.machines.machine_clock import Deadline

KIND = "session suspended"
KIND_AND_KILLED = "session suspended, controller killed"
# For which a session waits for its proxy: the cluster's grace, and somewhat more. In seconds of a `MachineClock`.
_GONE_SECONDS = 75.0


def suspend(ground: Ground, users: Users, rng: random.Random, meanwhile: Callable[[], None]) -> bool:
    """Suspend a session, do something else, and resume it. Return False if there is no session."""
    status = report(ground)
    if not status["sessions"]:
        return False
    session = rng.choice(status["sessions"])["id"]
    to = rng.choice(["memory", "disk"])
    if not _asked(ground, users, session, "suspend", "--to", to):
        return False
    users.watch(rng.uniform(0.5, 4.0))
    meanwhile()
    islands = [str(island["id"]) for island in status["islands"]]
    on = [part for island in reversed(islands) for part in ("--on", island)] if rng.random() < 0.3 else []
    print(f"session {session} to {to}{', islands changed' * bool(on)} ", end="", flush=True)
    _asked(ground, users, session, "resume", *on)
    return True


def _asked(ground: Ground, users: Users, session: int, what: str, *options: str) -> bool:
    """Return whether it succeeded. If not, the session has ended or is ending, since its proxy was lost before."""
    try:
        ground.atoll(what, str(session), *options)
    except SoakError as error:
        deadline = Deadline(_GONE_SECONDS)
        while any(each["id"] == session for each in report(ground)["sessions"]):
            if deadline.is_over:
                raise
            users.watch(1.0)
        print(f"({error}) ", end="", flush=True)
        return False
    return True
