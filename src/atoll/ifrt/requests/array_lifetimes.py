"""The ends of arrays: deleted, queried, destructed.

The client batches deletions and destructions, and is never done with their responses, nor with that of the future that
it asks about after a deletion: these are sent out of sequence (see `responses`).
"""

from __future__ import annotations

from typing import Any

from atoll.errors import OK, StatusError, not_found
from atoll.ifrt.pending_request import Handler, PendingRequest


def _delete_array(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    status = OK
    alive = []
    for handle in request.arrays:
        try:
            session.arrays.get(handle).memory.delete()
            alive.append(handle)
        except StatusError as error:
            status = error.status
    if alive:
        session.cluster.release(alive, delete=True)
    future = session.cluster.mint()
    session.deletions[future] = status
    response = pending.response()
    response.delete_array.deletion_future_handle = future
    pending.reply_out_of_sequence(response)


def _is_array_deleted(pending: PendingRequest, request: Any) -> None:
    response = pending.response()
    response.is_array_deleted.deleted = pending.session.arrays.get(request.array).memory.is_deleted
    pending.reply(response)


def _destruct_array(pending: PendingRequest, request: Any) -> None:
    session = pending.session
    missing = []
    known = []
    for handle in request.arrays:
        record = session.arrays.remove(handle)
        if record is None:
            missing.append(handle)
        elif record.error is None:
            known.append(handle)
    if known:
        session.cluster.release(known)
    if missing:
        raise not_found(f"unknown array handles {missing[:10]}")
    response = pending.response()
    response.destruct_array.SetInParent()
    pending.reply_out_of_sequence(response)


HANDLERS: dict[str, Handler] = {
    "delete_array": _delete_array,
    "is_array_deleted": _is_array_deleted,
    "destruct_array": _destruct_array,
}
