"""Who uses how much: accounts, which what happens to gangs and to memory is charged to.

An account is that of a program of a session; registered programs of one name share it. Charging is on the path of each
gang, and so is a few additions; once a second what has come together is taken, for the shell to keep.

Device time is what workers report, charged where a gang ends on a host; of gangs that take long, `long_gangs` charges
a part before.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from atoll.cluster.usage.usage_records import Usage


class Meter:
    """All accounts. `now` is the time of the event that is being handled: memory is charged for how long it is held."""

    def __init__(self) -> None:
        self.now = 0.0
        self._accounts: dict[int, WeakValueDictionary[str, Account]] = {}  # by session, those that something refers to
        self._active: dict[Account, None] = {}  # charged since they were taken, or with memory
        self._taken = -1.0  # when

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_accounts": {session: dict(each) for session, each in self._accounts.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():  # not its dictionary: see `journal.snapshots`
            setattr(self, name, value)
        self._accounts = {session: WeakValueDictionary(each) for session, each in self._accounts.items()}

    def account(self, tenant: str, session: int, label: str, program: str) -> Account:
        """That of the program; who gets it keeps it."""
        of_session = self._accounts.setdefault(session, WeakValueDictionary())
        account = of_session.get(program)
        if account is None:
            account = of_session[program] = Account(self, tenant, session, label, program)
        return account

    def session_closed(self, session: int) -> None:
        """What it still has is charged to its accounts until the last of it goes."""
        self._accounts.pop(session, None)

    def wake(self, account: Account) -> None:
        account.is_idle = False
        self._active[account] = None

    def take(self, devices: int) -> tuple[int, tuple[Usage, ...]]:
        """What was used since the last time; before it, how much device time there was, of so many devices."""
        now = self.now
        present = round((now - self._taken) * devices * 1e9) if self._taken >= 0 else 0
        self._taken = now
        taken = []
        for account in list(self._active):
            usage = account.take(now)
            if usage is not None:
                taken.append(usage)
            elif not account.nbytes:
                account.is_idle = True
                del self._active[account]
        return present, tuple(taken)


class Account:
    """What was used since it was taken last. Who adds to a counter itself wakes it where it `is_idle`."""

    __slots__ = (
        "__weakref__",
        "_byte_seconds",
        "_meter",
        "bytes_moved",
        "compile_seconds",
        "device_ns",
        "is_idle",
        "label",
        "nbytes",
        "program",
        "session",
        "tenant",
    )

    def __init__(
        self, meter: Meter | None = None, tenant: str = "", session: int = 0, label: str = "", program: str = ""
    ) -> None:
        self._meter = meter or Meter()
        self.tenant = tenant
        self.session = session
        self.label = label
        self.program = program
        self.is_idle = True
        self.device_ns = 0
        self.bytes_moved = 0
        self.compile_seconds = 0.0
        self.nbytes = 0  # that it has now
        self._byte_seconds = 0.0  # what it had, less what it has times when that began

    def wake(self) -> None:
        self._meter.wake(self)

    def compiled(self, seconds: float) -> None:
        """A host has compiled for so long."""
        self.compile_seconds += seconds
        self.wake()

    def hold(self, nbytes: int) -> None:
        """It has so many bytes more from now on; fewer where negative."""
        self.nbytes += nbytes
        self._byte_seconds -= nbytes * self._meter.now
        if self.is_idle:
            self._meter.wake(self)

    def take(self, now: float) -> Usage | None:
        """What was used; None where nothing was."""
        byte_seconds = self._byte_seconds + self.nbytes * now
        if not (self.device_ns or self.bytes_moved or self.compile_seconds or self.nbytes or byte_seconds > 0.5):
            self._byte_seconds = 0.0
            return None
        usage = Usage(
            self.tenant,
            self.session,
            self.label,
            self.program,
            self.device_ns,
            max(0.0, byte_seconds),
            self.bytes_moved,
            self.compile_seconds,
        )
        self.device_ns = self.bytes_moved = 0
        self.compile_seconds = 0.0
        self._byte_seconds = -self.nbytes * now
        return usage
