"""The external lease of a controller's process, from before the controller begins until after its end."""

from __future__ import annotations

import asyncio

from atoll.controller_process.controller_options import CANNOT, ControllerOptions, SupersededError, report
from atoll.controller_process.takeover import first_term
from atoll.leadership.election import Claim
from atoll.leadership.lease_address import open_lease
from atoll.leadership.lease_keeper import LeaseKeeper, LeaseTakenError


def keeper_of(options: ControllerOptions) -> LeaseKeeper | None:
    """Return the keeper of the lease, which makes no requests yet, or None without a lease. Raises LeaseError."""
    return LeaseKeeper(open_lease(options.lease), options.lease_holder) if options.lease else None


async def acquire_lease(keeper: LeaseKeeper, claim: Claim, options: ControllerOptions, stop: asyncio.Event) -> None:
    """Return when this process holds the lease. Raises LeaseError, also if `stop` is set before.

    Raises SupersededError if another controller has held it since the time of the claim.
    """
    acquiring = asyncio.ensure_future(asyncio.to_thread(keeper.acquire, claim))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((acquiring, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not stopping.cancel():
        await release(keeper, is_free=True)
    try:
        await acquiring
    except LeaseTakenError as error:
        report(options.ready_fd, CANNOT + f"{error}\n".encode())
        raise SupersededError(
            f"the controller of term {first_term(error.transitions)} has taken over: {error}"
        ) from None


async def release(keeper: LeaseKeeper | None, *, is_free: bool) -> None:
    """Renew the lease no longer. If it `is_free`, others can acquire it at once."""
    if keeper is not None:
        await asyncio.to_thread(keeper.close, release=is_free)
