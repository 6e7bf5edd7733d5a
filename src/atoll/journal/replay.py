"""Replays events: the same events lead to the same actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from atoll.errors import AtollError
from atoll.protocol.actions import AnyAction
from atoll.protocol.events import AnyEvent, Skipped


def skipped_of(events: Sequence[AnyEvent]) -> frozenset[int]:
    """Return the positions of the events of a turn that are not handled, since the controller failed at them."""
    return frozenset(each - 1 for each, event in enumerate(events) if isinstance(event, Skipped) and each)


def replayed(
    handle: Callable[[AnyEvent], list[AnyAction]], events: Iterable[AnyEvent]
) -> Iterator[tuple[AnyEvent, list[AnyAction]]]:
    """Each event, and what a controller decides that handles it."""
    before: AnyEvent | None = None
    for event in events:
        if before is not None:
            yield before, [] if isinstance(event, Skipped) else _handled(handle, before)
        before = event
    if before is not None:
        yield before, _handled(handle, before)


def _handled(handle: Callable[[AnyEvent], list[AnyAction]], event: AnyEvent) -> list[AnyAction]:
    try:
        return handle(event)
    except AtollError:
        return []  # as it was: the shell has lost the connection then, which is the next event
