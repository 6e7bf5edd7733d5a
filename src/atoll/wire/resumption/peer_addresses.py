"""The addresses at which the dialer of a connection can reach the acceptor or its successor."""

from __future__ import annotations

from atoll.errors import AddressError, FrameError
from atoll.wire.address import Address, parse_address
from atoll.wire.resumption.link_messages import AlternateAddresses
from atoll.wire.tls.identity import Identity


class PeerAddresses:
    """The addresses of a peer: those that this process was configured with, and the alternates that the peer sent."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._elsewhere: tuple[Address, ...] = ()
        self._answered: tuple[Address, ...] = ()

    @property
    def in_turn(self) -> tuple[Address, ...]:
        """All addresses in the order in which to dial them, first the one that answered last."""
        return tuple(dict.fromkeys((*self._answered, *self._address.each, *self._elsewhere)))

    def of_one(self, address: Address) -> Address:
        """Return all addresses of the process that has `address`, which may be on several networks."""
        return self._address if address in self._address.each else address

    def answered(self, address: Address) -> None:
        self._answered = (address,)

    def replace_alternates(self, message: AlternateAddresses, identity: Identity | None) -> None:
        """Replace the alternate addresses, at which `identity` can also be renewed.

        Raise FrameError if one of them is invalid.
        """
        try:
            self._elsewhere = tuple(map(parse_address, message.addresses))
        except AddressError as error:
            raise FrameError(f"invalid alternate address: {error}") from None
        if identity is not None:
            identity.elsewhere = self._elsewhere
