"""The ends of arrays: deleted, asked about, forgotten."""

from __future__ import annotations

from typing import Any

from atoll.errors import OK, StatusError, not_found
from atoll.frontends.ifrt.session import Exchange, Handler
from atoll.protocol import messages as m


def _delete_array(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    status = OK
    alive = []
    for handle in request.arrays:
        try:
            session.arrays.get(handle).memory.delete()
            alive.append(handle)
        except StatusError as error:
            status = error.status
    if alive:
        session.link.send(m.Release(tuple(alive), delete=True))
    response = exchange.response()
    response.delete_array.deletion_future_handle = session.add_future(status)
    exchange.reply(response)


def _is_array_deleted(exchange: Exchange, request: Any) -> None:
    response = exchange.response()
    response.is_array_deleted.deleted = exchange.session.arrays.get(request.array).memory.is_deleted
    exchange.reply(response)


def _destruct_array(exchange: Exchange, request: Any) -> None:
    session = exchange.session
    missing = []
    known = []
    for handle in request.arrays:
        record = session.arrays.remove(handle)
        if record is None:
            missing.append(handle)
        elif record.error is None:
            known.append(handle)
    if known:
        session.link.send(m.Release(tuple(known)))
    if missing:
        raise not_found(f"unknown array handles {missing[:10]}")
    response = exchange.response()
    response.destruct_array.SetInParent()
    exchange.reply(response)


HANDLERS: dict[str, Handler] = {
    "delete_array": _delete_array,
    "is_array_deleted": _is_array_deleted,
    "destruct_array": _destruct_array,
}
