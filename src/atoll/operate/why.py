"""Explain what a session waits for: `atoll why`."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.errors import ClusterError
from atoll.quantities import counted, human_seconds
from atoll.telemetry.snapshot import (
    AheadSnapshot,
    Event,
    IslandSnapshot,
    OwedSnapshot,
    SessionSnapshot,
    Snapshot,
    SnapshotStruct,
    WaitSnapshot,
)

_MAX_EVENTS = 5


class Explanation(SnapshotStruct, frozen=True):
    """The waits and the unfinished work of a session, and what is ahead of them."""

    seconds: float  # time of the report; all times are of the controller's clock
    session: SessionSnapshot
    waits: tuple[WaitSnapshot, ...]  # its gangs that wait for an island
    owed: tuple[OwedSnapshot, ...]  # its unfinished work, and the processes that must act next
    behind: tuple[AheadSnapshot, ...]  # its gangs on the hosts that wait there, with the gangs ahead of them
    ahead: tuple[AheadSnapshot, ...]  # gangs of other sessions that are ahead of its `waits`
    owed_ahead: tuple[OwedSnapshot, ...]  # unfinished work of other sessions on the islands of its `waits`
    islands: tuple[IslandSnapshot, ...]  # the islands of its `waits`
    events: tuple[Event, ...]  # its last events, the oldest first


def explain(snapshot: Snapshot, session: int | None = None) -> Explanation:
    """Return what a session waits for, for how long, and which process must act next.

    `session` may be None if the snapshot has one session. Raises ClusterError if the snapshot has no such session.
    """
    found = _chosen(snapshot, session)
    waits = tuple(each for each in snapshot.waits if each.session == found.id)
    islands = {each.island for each in waits}
    ahead = [each for each in snapshot.ahead if each.session == found.id]
    return Explanation(
        seconds=snapshot.seconds,
        session=found,
        waits=waits,
        owed=tuple(each for each in snapshot.owed if each.session == found.id),
        behind=tuple(each for each in ahead if each.gangs),
        ahead=tuple(each for each in ahead if waits and not each.gangs),
        owed_ahead=tuple(each for each in snapshot.owed if each.session != found.id and each.island in islands),
        islands=tuple(each for each in snapshot.islands if each.id in islands),
        events=tuple([each for each in snapshot.events if each.session == found.id][-_MAX_EVENTS:]),
    )


def explanation(snapshot: Snapshot, session: int | None = None) -> list[str]:
    """Return `explain` as lines of text. Raises ClusterError as that does."""
    found = explain(snapshot, session)
    lines = [_headline(found)]
    for wait in found.waits:
        lines.extend(_wait(wait, found.seconds))
    if found.owed:
        lines.append("its unfinished work:")
        lines.extend(f"  {each.text}" for each in found.owed)
    for each in found.behind:
        lines.extend(_behind(each))
    lines.extend(_ahead(found))
    if not found.waits and not found.owed and not found.behind:
        lines.append(
            "nothing of it waits in the cluster: its next step is up to its script"
            if not found.session.state
            else "its launches wait until it is resumed: `atoll resume`"
        )
    lines.extend(_events(found))
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


def _headline(found: Explanation) -> str:
    session, waiting = found.session, sum(each.gangs for each in found.waits)
    return (
        f"session {session.id} ({session.label or f'process {session.pid}'}) of tenant {session.tenant}: "
        f"{session.state or 'runs'}, {counted(session.in_flight, 'launch')} in flight, "
        f"{counted(waiting, 'gang')} {'waits' if waiting == 1 else 'wait'}"
    )


def _wait(wait: WaitSnapshot, now: float) -> Iterator[str]:
    age = human_seconds(max(0.0, now - wait.since))
    more = f" and {counted(wait.gangs - 1, 'more gang')}" if wait.gangs > 1 else ""
    yield f"on island {wait.island}, {wait.program}{more}: launched {age} ago, waits for {wait.text}"
    for step, then in zip(wait.steps, (*(each.seconds for each in wait.steps[1:]), now), strict=True):
        reason = f" for {step.reason}" if step.state == "waiting" else ""
        yield f"  {step.state}{reason} for {max(0.0, then - step.seconds):.1f} s"


def _behind(ahead: AheadSnapshot) -> Iterator[str]:
    more = f" and {counted(ahead.gangs - 1, 'more gang')}" if ahead.gangs > 1 else ""
    yield f"on island {ahead.island}, {ahead.program}{more}: sent to its hosts, and waits there for a gang ahead of it"
    yield f"  {_whose(ahead.other)}: {ahead.text}"


def _whose(session: int) -> str:
    return f"session {session}" if session else "another tenant"


def _ahead(found: Explanation) -> Iterator[str]:
    """Yield what occupies the islands on which the session waits."""
    # A gang that spans islands is ahead on all of them, and is named once.
    texts = [f"{_whose(each.other)}: {each.text}" for each in found.ahead]
    texts += [f"{_whose(each.session)}: {each.text}" for each in found.owed_ahead]
    if texts:
        yield "ahead of it on these islands:"
        yield from (f"  {text}" for text in dict.fromkeys(texts))
    for island in found.islands:
        if island.state != "ready":
            yield f"island {island.id} is {island.state}" + (f": {island.waits_for}" if island.waits_for else "")


def _events(found: Explanation) -> Iterator[str]:
    if found.events:
        yield "its last events:"
    for each in found.events:
        yield f"  {human_seconds(max(0.0, found.seconds - each.seconds))} ago, {each.kind}: {each.text}"
