"""Replay an event log: the same events produce the same actions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from atoll.controller.controller_dumps import load_controller
from atoll.controller.core import Controller
from atoll.decodable import decodable
from atoll.journal.event_log import RIGHT_TOKEN, Header, Line, replayed
from atoll.journal.records import decode_event
from atoll.journal.stored_settings import StoredSettings
from atoll.protocol.actions import AnyAction
from atoll.protocol.events import AnyEvent
from atoll.quantities import counted


class _StoredHeader(Header, frozen=True, kw_only=True):
    settings: StoredSettings


def replay(lines: Iterable[bytes], skips: bool = True) -> Iterator[tuple[AnyEvent, list[AnyAction]]]:
    """Yield each event of a dump, and the actions of a controller that handles it.

    Events at which the controller failed are skipped, as by the next controller. Without `skips`, the first one raises
    its exception. Raises ValueError if the log is invalid or its beginning is missing, and JournalError if this version
    cannot read its state.
    """
    rows = iter(lines)
    try:
        header = msgspec.json.decode(next(rows), type=decodable(_StoredHeader))
    except (StopIteration, msgspec.MsgspecError) as error:
        raise ValueError(f"this is not an event log: {error}") from None
    if header.missing:
        raise ValueError(
            f"the log lacks {counted(header.missing, 'event')} at its start: it can be read, but not replayed"
        )
    controller = load_controller(header.base, header.version) if header.base else _new(header)
    events = (decode_event(msgspec.json.decode(row, type=decodable(Line)).encoded) for row in rows)
    yield from replayed(controller.handle, events, skips)


def _new(header: _StoredHeader) -> Controller:
    token, host_token = (RIGHT_TOKEN if each else "" for each in (header.has_token, header.has_host_token))
    return Controller(header.settings.current(), token, header.version, host_token)
