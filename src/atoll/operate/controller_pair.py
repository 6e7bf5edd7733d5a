"""One of two equal controllers of a cluster: `atoll up --standby OTHER --continue --leader-lease LEASE`.

Each machine follows the other one if that serves the cluster. Otherwise it serves the cluster itself: it continues that
of its journal, or begins a new one. Both may try to serve at the same time, because only the holder of the lease does.
When a turn ends without the cluster, for example because the other machine has taken over, the next turn begins.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from atoll.cluster.settings import GRACE_SECONDS
from atoll.engines.engine_options import EngineEnd
from atoll.errors import AtollError, ConnectError, LeaseError
from atoll.journal.persisted_state import has_killed_cluster
from atoll.leadership.lease_record import LeaseRecord, LeaseStore
from atoll.operate.standing import StandingCluster, StandingOnRay, StandingOptions, start_cluster
from atoll.retries import Retry
from atoll.security.start_security import advertised
from atoll.wire.address import Address, parse_address
from atoll.wire.sockets import dial

_DIAL_SECONDS = 2.0
_FIRST_PAUSE, _MAX_PAUSE = 0.5, 5.0


class BeginRule:
    """When a controller without a journal begins a new cluster. Pure: callers pass times in seconds of one clock.

    If the record of the lease names a holder, its standby or its journal, the present cluster may be continued. So a
    new one begins only `patience` seconds after the last change of the record.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._seen: LeaseRecord | None = None
        self._since = math.inf  # when the record was seen first

    def may_begin(self, now: float, record: LeaseRecord | None) -> bool:
        """Whether to begin a new cluster, with this record of the lease."""
        if record is None or not (record.holder or record.standby):
            return True
        if record != self._seen:
            self._seen, self._since = record, now
        return now - self._since >= self._patience


class ControllerPair:
    """This machine's half of a pair, whose other half is at `options.standby`. It needs `options.journal`.

    `lease` is the lease of both. `on_start(standing)` is called when a turn begins, `on_up(standing, follows)` when
    this machine serves the cluster, or `follows` the other one, and `on_problem(text)` when neither is possible.
    """

    def __init__(
        self,
        options: StandingOptions,
        lease: LeaseStore,
        on_start: Callable[[StandingCluster | StandingOnRay], None],
        on_up: Callable[[StandingCluster | StandingOnRay, bool], None],
        on_problem: Callable[[str], None],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        assert options.journal is not None
        self._journal: Path = options.journal
        self._other = parse_address(options.standby)
        self._lease = lease
        self._on_start = on_start
        self._on_up = on_up
        self._on_problem = on_problem
        self._sleep = sleep
        self._rule = BeginRule(options.settings.grace_seconds or GRACE_SECONDS)
        listen = parse_address(options.listen)
        own = advertised(listen, options.advertise).each[0]
        self._following = dataclasses.replace(options, advertise=own.host_and_port, leaves=True)
        both = msgspec.structs.replace(own, others=tuple(each for each in self._other.each if not _is_same(each, own)))
        self._serving = dataclasses.replace(options, advertise=both.host_and_port, standby="", leaves=True)

    def run(self) -> EngineEnd:
        """Return when somebody has ended the cluster. An exception of a signal handler leaves it to the other half."""
        retry = Retry(_FIRST_PAUSE, _MAX_PAUSE)
        while True:
            end = self._turn(self._following) if self._reaches_other() else None
            if end is None and self._may_serve():
                end = self._turn(self._serving)
            if end is None:
                self._sleep(retry.next_pause())
                continue
            if end.expected:
                return end
            self._on_problem(end.reason)
            retry.reset()

    def _turn(self, options: StandingOptions) -> EngineEnd | None:
        """Follow or serve until that ends, and return why. Return None if it does not begin."""
        try:
            standing = start_cluster(options)
            try:
                self._on_start(standing)
            except BaseException:
                standing.end()
                raise
            standing.wait()
        except AtollError as error:
            self._on_problem(str(error))
            return None
        try:
            self._on_up(standing, bool(options.standby))
            return standing.wait_for_end()
        finally:
            standing.end()

    def _reaches_other(self) -> bool:
        try:
            dial(self._other, timeout=_DIAL_SECONDS).close()
        except ConnectError:
            return False
        return True

    def _may_serve(self) -> bool:
        """Whether to try to serve. The lease refuses a journal that is outdated."""
        if has_killed_cluster(self._journal):
            return True
        try:
            stored = self._lease.read()
        except LeaseError as error:
            self._on_problem(str(error))
            return False
        return self._rule.may_begin(time.monotonic(), stored.record if stored is not None else None)


def _is_same(one: Address, other: Address) -> bool:
    return (one.host, one.port) == (other.host, other.port)
