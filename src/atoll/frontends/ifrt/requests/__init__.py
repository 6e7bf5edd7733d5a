"""What each kind of request does. A handler takes the exchange and the request's message, and answers or raises."""

from __future__ import annotations

from atoll.frontends.ifrt.requests import array_ends, array_views, executables, host_transfers, transfers, values
from atoll.frontends.ifrt.session import Handler

HANDLERS: dict[str, Handler] = {
    **values.HANDLERS,
    **host_transfers.HANDLERS,
    **array_views.HANDLERS,
    **transfers.HANDLERS,
    **array_ends.HANDLERS,
    **executables.HANDLERS,
}
