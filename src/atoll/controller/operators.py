"""What operators ask a running cluster to do: to move what is on its devices.

Each request gets one answer, `Told`, when it is done or refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.controller.moves import Moves
from atoll.controller.outbox import Outbox
from atoll.controller.placement import Slices
from atoll.controller.resources import ResourceManager
from atoll.controller.session import Session
from atoll.errors import OK, Status, StatusError, invalid, not_found
from atoll.ir.lowering import Seat
from atoll.transport import messages as m


class Operators:
    """Hears operators, by number."""

    def __init__(
        self,
        sessions: Mapping[int, Session],
        resources: ResourceManager,
        slices: Slices,
        moves: Moves,
        outbox: Outbox,
    ) -> None:
        self._sessions = sessions
        self._resources = resources
        self._slices = slices
        self._moves = moves
        self._outbox = outbox

    def hear(self, operator: int, message: m.AskRemap) -> None:
        try:
            self._remap(operator, message)
        except StatusError as error:
            self._tell(operator, error.status, "")

    def _remap(self, operator: int, ask: m.AskRemap) -> None:
        session = self._sessions.get(ask.session)
        if session is None:
            raise not_found(f"session {ask.session} does not exist (atoll status lists them)")
        session.devices.get(ask.slice)
        record = self._resources.islands.get(ask.island)
        if record is None or record.state == "starting":
            raise not_found(f"island {ask.island} does not exist (atoll status lists them)")
        wanted = tuple(self._seat(number, ask.island) for number in ask.devices)

        def plan() -> dict[int, Seat]:
            return self._slices.target(ask.session, ask.slice, self._resources.devices(ask.island), wanted)

        def then(status: Status) -> None:
            if not status.ok:
                self._tell(operator, status, f"slice {ask.slice} of session {ask.session} stays where it is: ")
                return
            places = (session.devices.seats[device] for device in session.devices.slices[ask.slice].devices)
            numbers = ", ".join(str(self._resources.number_of(seat)) for seat in places)
            self._tell(operator, OK, f"slice {ask.slice} of session {ask.session} is on devices {numbers} now")

        self._moves.begin(session, plan, then)

    def _seat(self, number: int, island: int) -> Seat:
        for seat in self._resources.devices(island).seats:
            if self._resources.number_of(seat) == number:
                return seat
        raise invalid(f"device {number} is not one of island {island}")

    def _tell(self, operator: int, status: Status, text: str) -> None:
        if not status.ok:
            status = Status(status.code, f"{text}{status.message}")
            text = ""
        self._outbox.to_operator(operator, m.Told(status, text))

