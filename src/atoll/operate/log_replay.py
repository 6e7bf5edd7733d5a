"""Replay an event log: the same events produce the same actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from atoll.controller.core import Controller
from atoll.journal.event_log import RIGHT_TOKEN, Header, Line, replayed
from atoll.journal.records import decode_event
from atoll.protocol.actions import AnyAction
from atoll.protocol.events import AnyEvent


def replay(lines: Iterable[bytes]) -> Iterator[tuple[AnyEvent, list[AnyAction]]]:
    """Yield each event of a dump, and the actions of a controller that handles it.

    Raises ValueError if the log is invalid, or if its beginning is missing.
    """
    rows = iter(lines)
    try:
        header = msgspec.json.decode(next(rows), type=Header)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise ValueError(f"this is not an event log: {error}") from None
    if header.missing:
        raise ValueError(f"the first {header.missing} events are missing: such a log can be read, but not replayed")
    token, host_token = (RIGHT_TOKEN if each else "" for each in (header.has_token, header.has_host_token))
    controller = Controller(header.settings, token, header.version, host_token)
    events = (decode_event(msgspec.json.decode(row, type=Line).encoded) for row in rows)
    yield from replayed(controller.handle, events)
