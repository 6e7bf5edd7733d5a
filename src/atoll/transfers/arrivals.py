"""What takes the pieces that come on a channel, on whichever of its threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from atoll.errors import Code, Status, StatusError
from atoll.transfers.transfer_engine import Piece

# The piece, its bytes, and what to call when they have been read.
OnPiece = Callable[[Piece, Any, Callable[[], None]], None]
# A piece that cannot be had, and why. The channel goes on.
OnFailure = Callable[[Piece, Status], None]


class ReceiveBudget(Protocol):
    """Decides when the bytes of large pieces may come. For any thread; must not block."""

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None]) -> None:
        """Calls `grant` once the bytes may come, now or later; the piece, its failure, or `withdraw` follows."""

    def withdraw(self, piece: Piece) -> None:
        """A piece that was announced to `admit` will not come."""


class Unlimited:
    """A budget without a bound."""

    def admit(self, piece: Piece, launch: int, grant: Callable[[], None]) -> None:
        grant()

    def withdraw(self, piece: Piece) -> None:
        pass


class ChannelArrivals:
    """`engine.Arrivals` by callbacks. Without `on_failure`, a piece that cannot be had ends the channel."""

    def __init__(self, on_piece: OnPiece, on_failure: OnFailure | None, budget: ReceiveBudget | None) -> None:
        self.take = on_piece
        self._on_failure = on_failure
        self._budget = budget or Unlimited()
        self.admit = self._budget.admit
        self.withdraw = self._budget.withdraw

    def fail(self, piece: Piece, status: Status) -> None:
        if self._on_failure is None:
            raise StatusError(Code(status.code), status.message, status.payloads)
        self._on_failure(piece, status)
