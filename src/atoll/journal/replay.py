"""Replays events: the same events lead to the same actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from atoll.protocol.actions import AnyAction
from atoll.protocol.events import AnyEvent


def replayed(
    handle: Callable[[AnyEvent], list[AnyAction]], events: Iterable[AnyEvent]
) -> Iterator[tuple[AnyEvent, list[AnyAction]]]:
    """Each event, and what a controller decides that handles it."""
    for event in events:
        try:
            actions = handle(event)
        except Exception:
            actions = []  # as it was: the shell has lost the connection then, which is the next event
        yield event, actions
