"""Sessions that are put aside, and go on: where they were, or with their islands changed for one another."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from scripts.soak.ground import Ground, report
from scripts.soak.users import SoakError, Users

KIND = "session suspended"
KIND_AND_KILLED = "session suspended, controller killed"


def suspend(ground: Ground, users: Users, rng: random.Random, meanwhile: Callable[[], None]) -> bool:
    """Suspends a session, does something else, and resumes it. False where there is none."""
    status = report(ground)
    if not status["sessions"]:
        return False
    session = rng.choice(status["sessions"])["id"]
    to = rng.choice(["memory", "disk"])
    if not _asked(ground, session, "suspend", "--to", to):
        return False
    users.watch(rng.uniform(0.5, 4.0))
    meanwhile()
    islands = [str(island["id"]) for island in status["islands"]]
    on = [part for island in reversed(islands) for part in ("--on", island)] if rng.random() < 0.3 else []
    print(f"session {session} to {to}{', islands changed' * bool(on)} ", end="", flush=True)
    _asked(ground, session, "resume", *on)
    return True


def _asked(ground: Ground, session: int, what: str, *options: str) -> bool:
    """Whether it has been done; else the session has ended meanwhile."""
    try:
        ground.atoll(what, str(session), *options)
    except SoakError as error:
        sessions: list[dict[str, Any]] = report(ground)["sessions"]
        if any(each["id"] == session for each in sessions):
            raise
        print(f"({error}) ", end="", flush=True)
        return False
    return True
