"""Accounts to which device time, memory, moved bytes and compile time are charged.

There is one account per session and program name. Charging is on the path of each gang, so it takes only a few
additions. Once a second, the controller's process takes and stores the usage since the last time.

Device time is charged when a gang ends on a host, as workers report it. `long_gangs` charges a part of it in advance.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from atoll.cluster.usage.usage_records import Usage


class Meter:
    """All accounts. `now` is the time of the current event: memory is charged by the time for which it is held."""

    def __init__(self) -> None:
        self.now = 0.0
        self._accounts: dict[int, WeakValueDictionary[str, Account]] = {}  # accounts that are referenced, by session
        self._active: dict[Account, None] = {}  # accounts that hold memory or were charged since the last `take`
        self._taken = -1.0  # time of the last `take`

    def account(self, tenant: str, session: int, label: str, program: str) -> Account:
        """Return the account of a program. It exists as long as the caller refers to it."""
        of_session = self._accounts.setdefault(session, WeakValueDictionary())
        account = of_session.get(program)
        if account is None:
            account = of_session[program] = Account(self, tenant, session, label, program)
        return account

    def session_closed(self, session: int) -> None:
        """Forget the session. Its accounts are charged for memory until the memory is released."""
        self._accounts.pop(session, None)

    def wake(self, account: Account) -> None:
        account.is_idle = False
        self._active[account] = None

    def take(self, devices: int) -> tuple[int, tuple[Usage, ...]]:
        """Return the device time of `devices` devices since the last call, and the usage of each account since then."""
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
    """The usage of a program since it was last taken. Code that adds to a counter calls `wake` if `is_idle` is set."""

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
        self.nbytes = 0  # held now
        # Byte-seconds since the last `take`, if `nbytes` times the current time is added.
        self._byte_seconds = 0.0

    def wake(self) -> None:
        self._meter.wake(self)

    def compiled(self, seconds: float) -> None:
        """Charge compile time of a host."""
        self.compile_seconds += seconds
        self.wake()

    def hold(self, nbytes: int) -> None:
        """Change the number of bytes held by `nbytes`, which may be negative."""
        self.nbytes += nbytes
        self._byte_seconds -= nbytes * self._meter.now
        if self.is_idle:
            self._meter.wake(self)

    def hold_all(self, nbytes: int, times: int) -> None:
        """Change the number of bytes held by `nbytes` so many times."""
        self.nbytes += times * nbytes
        change = nbytes * self._meter.now
        for _ in range(times):  # rounded as by so many calls, since a journal may be replayed that counted like that
            self._byte_seconds -= change
        if self.is_idle:
            self._meter.wake(self)

    def take(self, now: float) -> Usage | None:
        """Return the usage since the last call, or None if nothing was used."""
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
