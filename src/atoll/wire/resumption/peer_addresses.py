"""Where somebody may be who goes on elsewhere when it is lost, and in which order these addresses are dialed. Pure."""

from __future__ import annotations

from atoll.wire.address import Address, parse_address
from atoll.wire.resumption.link_messages import AlternateAddresses
from atoll.wire.tls.identity import Identity


class PeerAddresses:
    """The addresses of a peer: those that this process was started with, and those that it was told of."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._elsewhere: tuple[Address, ...] = ()
        self._answered: tuple[Address, ...] = ()

    @property
    def in_turn(self) -> tuple[Address, ...]:
        """Each of them once: first where somebody has answered last, then in the order in which they were told."""
        return tuple(dict.fromkeys((*self._answered, *self._address.each, *self._elsewhere)))

    def of_one(self, address: Address) -> Address:
        """All addresses of the process that has this one: it may be on several networks."""
        return self._address if address in self._address.each else address

    def answered(self, address: Address) -> None:
        self._answered = (address,)

    def told(self, message: AlternateAddresses, identity: Identity | None) -> None:
        """Whoever is there renews the certificate, too."""
        self._elsewhere = tuple(map(parse_address, message.addresses))
        if identity is not None:
            identity.elsewhere = self._elsewhere
