"""Explain what a session waits for: `atoll why`."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.errors import ClusterError
from atoll.quantities import human_seconds
from atoll.telemetry.snapshot import AheadSnapshot, SessionSnapshot, Snapshot, WaitSnapshot

_MAX_EVENTS = 5


def explanation(snapshot: Snapshot, session: int | None = None) -> list[str]:
    """Return lines that say what a session waits for, for how long, and which process must act next.

    `session` may be None if the snapshot has one session. Raises ClusterError if the snapshot has no such session.
    """
    found = _chosen(snapshot, session)
    session = found.id
    waits = [each for each in snapshot.waits if each.session == session]
    owed = [each for each in snapshot.owed if each.session == session]
    lines = [_headline(found, snapshot)]
    for wait in waits:
        lines.extend(_wait(wait, snapshot))
    if owed:
        lines.append("its unfinished work:")
        lines.extend(f"  {each.text}" for each in owed)
    behind = [each for each in snapshot.ahead if each.session == session and each.gangs]
    for each in behind:
        lines.extend(_behind(each))
    if waits:
        lines.extend(_ahead(snapshot, session, {each.island for each in waits}))
    if not waits and not owed and not behind:
        lines.append(
            "nothing of it waits in the cluster: its next step is up to its script"
            if not found.state
            else "its launches wait until it is resumed: `atoll resume`"
        )
    lines.extend(_events(snapshot, session))
    return lines


def _chosen(snapshot: Snapshot, session: int | None) -> SessionSnapshot:
    known = {each.id: each for each in snapshot.sessions}
    if session is None and len(known) == 1:
        return next(iter(known.values()))
    if session in known:
        return known[session]
    problem = "choose a session" if session is None else f"session {session} does not exist"
    if not known:
        raise ClusterError("no session is open" if session is None else f"{problem}, and no session is open")
    open_ones = ", ".join(f"{number} ({each.label or f'process {each.pid}'})" for number, each in known.items())
    raise ClusterError(f"{problem}; the open sessions are: {open_ones}")


def _headline(session: SessionSnapshot, snapshot: Snapshot) -> str:
    waiting = sum(each.gangs for each in snapshot.waits if each.session == session.id)
    return (
        f"session {session.id} ({session.label or f'process {session.pid}'}) of tenant {session.tenant}: "
        f"{session.state or 'runs'}, {session.in_flight} launches in flight, {waiting} gangs wait"
    )


def _wait(wait: WaitSnapshot, snapshot: Snapshot) -> Iterator[str]:
    age = human_seconds(max(0.0, snapshot.seconds - wait.since))
    more = f" and {wait.gangs - 1} more gangs" if wait.gangs > 1 else ""
    yield f"on island {wait.island}, {wait.program}{more}: launched {age} ago, waits for {wait.text}"
    for step, then in zip(wait.steps, (*(each.seconds for each in wait.steps[1:]), snapshot.seconds), strict=True):
        reason = f" for {step.reason}" if step.state == "waiting" else ""
        yield f"  {step.state}{reason} for {max(0.0, then - step.seconds):.1f} s"


def _behind(ahead: AheadSnapshot) -> Iterator[str]:
    more = f" and {ahead.gangs - 1} more gangs" if ahead.gangs > 1 else ""
    yield f"on island {ahead.island}, {ahead.program}{more}: sent to its hosts, and waits there for a gang ahead of it"
    yield f"  {_whose(ahead.other)}: {ahead.text}"


def _whose(session: int) -> str:
    return f"session {session}" if session else "another tenant"


def _ahead(snapshot: Snapshot, session: int, islands: set[int]) -> Iterator[str]:
    """Yield what occupies the islands on which the session waits."""
    gangs = [each for each in snapshot.ahead if each.session == session and not each.gangs]
    owed = [each for each in snapshot.owed if each.session != session and each.island in islands]
    # A gang that spans islands is ahead on all of them, and is named once.
    texts = [f"{_whose(each.other)}: {each.text}" for each in gangs]
    texts += [f"{_whose(each.session)}: {each.text}" for each in owed]
    if texts:
        yield "ahead of it on these islands:"
        yield from (f"  {text}" for text in dict.fromkeys(texts))
    for island in snapshot.islands:
        if island.id in islands and island.state != "ready":
            yield f"island {island.id} is {island.state}" + (f": {island.waits_for}" if island.waits_for else "")


def _events(snapshot: Snapshot, session: int) -> Iterator[str]:
    events = [each for each in snapshot.events if each.session == session][-_MAX_EVENTS:]
    if events:
        yield "its last events:"
    for each in events:
        yield f"  {human_seconds(max(0.0, snapshot.seconds - each.seconds))} ago, {each.kind}: {each.text}"
