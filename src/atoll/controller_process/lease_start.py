"""The external lease of a controller's process, from before the controller begins until after its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from atoll.controller_process.controller_options import (
    CANNOT,
    ControllerFailedError,
    ControllerOptions,
    report,
)
from atoll.controller_process.takeover import first_term
from atoll.errors import SupersededError
from atoll.leadership.election import Claim
from atoll.leadership.lease_address import open_lease
from atoll.leadership.lease_keeper import LeaseKeeper, LeaseTakenError


@contextlib.asynccontextmanager
async def lease_of(options: ControllerOptions) -> AsyncIterator[LeaseKeeper | None]:
    """Yield the keeper of the lease, which makes no requests yet, or None without a lease. Raises LeaseError.

    At the end, or if this process cannot begin, the lease is released. It is not released if another process of this
    cluster continues: after a failure, or under a later term.
    """
    keeper = LeaseKeeper(open_lease(options.lease), options.lease_holder) if options.lease else None
    is_free = True
    try:
        yield keeper
    except (ControllerFailedError, SupersededError):
        is_free = False
        raise
    finally:
        if keeper is not None:
            await asyncio.to_thread(keeper.close, release=is_free)


async def acquire_lease(keeper: LeaseKeeper, claim: Claim, options: ControllerOptions, stop: asyncio.Event) -> None:
    """Return when this process holds the lease. Raises LeaseError, also if `stop` is set before.

    Raises SupersededError if another controller has held it since the time of the claim.
    """
    acquiring = asyncio.ensure_future(asyncio.to_thread(keeper.acquire, claim))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.cancel():
        await asyncio.to_thread(keeper.close, release=True)
    try:
        await acquiring
    except LeaseTakenError as error:
        report(options.ready_fd, CANNOT + f"{error}\n".encode())
        raise SupersededError(
            f"the controller of term {first_term(error.transitions)} has taken over: {error}"
        ) from None
