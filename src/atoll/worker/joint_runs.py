"""Joint runs: runs of functions that compute together with other hosts. One starts only after the former has succeeded.

XLA does not number its collectives. If a run ends with an error on one host, other hosts may still wait for it in a
collective. In such a collective, they would meet the next run that this host starts: XLA would end the process, or
compute a wrong value. So this host starts a joint run only if the former one in the same world has succeeded here, or
if the new run needs a result of the former one, since XLA then fails it as well. After a failure, this host waits
until the failed run has ended on all hosts.

If a run fails on one device, other devices of the same host may wait for that device forever. XLA reports only the end
of the run on all of them. So if a run takes long, this host looks at each shard of its first output.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Executor as Pool
from contextlib import suppress
from enum import Enum
from typing import Any

from atoll.cluster.processes.bugs import start_in
from atoll.devices.device import DeviceArray, RunToken
from atoll.errors import OK, Status
from atoll.host_services.calls.client_calls import status_of_device_error
from atoll.worker.completions import DeletionGuard
from atoll.worker.store import Buffer


class RunState(Enum):
    """The state of a joint run on this host."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class JointRun:
    """The token of a joint run, which records the outcome when a thread waits for it.

    `closing_status` returns why a run of a world ended with it; OK if the world is open. If the run's world was closed,
    that is the cause of the run's error, which otherwise only says that a connection was closed.

    `former` is the run before this one in the same world, until this one is known to have ended. Runs of a world end in
    their order, so the former one has then ended as well.
    """

    def __init__(
        self,
        world: int,
        sequence: int,
        ordinals: tuple[int, ...],
        token: RunToken,
        outputs: Sequence[DeviceArray],
        closing_status: Callable[[int, int], Status],
        former: JointRun | None,
    ) -> None:
        self._closing_status = closing_status
        self.world = world
        self.sequence = sequence
        self.ordinals = ordinals
        self.state = RunState.RUNNING
        self.is_awaited = False  # a later run waits for it
        self.output = outputs[0] if outputs else None  # until the run has ended
        self.former = former
        self._token = token

    def block_until_ready(self) -> None:
        """Wait for the run on all devices of this host. Raise its error. Any thread."""
        try:
            self._token.block_until_ready()
        except BaseException:
            self.state = RunState.FAILED
            self.raise_cause()
            raise
        else:
            self.state = RunState.SUCCEEDED
        finally:
            former, self.output, self.former = self.former, None, None
            while former is not None and former.state is RunState.RUNNING:  # no thread has waited for it
                following, former.output, former.former = former.former, None, None
                former = following

    def raise_cause(self) -> None:
        """Raise the error for which the run's world was closed, if it was. Call this if a result has an error."""
        self._closing_status(self.world, self.sequence).raise_if_error()

    def unended(self) -> list[JointRun]:
        """Return this run and those before it in its world that are not known to have ended, in order. Any thread."""
        found: list[JointRun] = []
        run: JointRun | None = self
        while run is not None and run.state is RunState.RUNNING:
            found.append(run)
            run = run.former
        found.reverse()
        return found


class JointRuns:
    """The joint runs of this host. Used on the executor's thread, except if a method says otherwise.

    Args:
        threads: Wait for runs.
        shards: Returns the shards of an array.
        guard: Protects arrays from being deleted while they are examined.
        closing_status: Returns why a run of a world ended with it; OK if the world is open.
    """

    def __init__(
        self,
        threads: Pool,
        shards: Callable[[Any], Sequence[DeviceArray]],
        guard: DeletionGuard,
        closing_status: Callable[[int, int], Status] = lambda world, sequence: OK,
    ) -> None:
        self._threads = threads
        self._shards = shards
        self._guard = guard
        self._closing_status = closing_status
        self._last: dict[int, JointRun] = {}  # by world; 0 is the island
        self._seen: set[JointRun] = set()  # those that had not ended at the last call of `failed_on_devices`
        self._reported: set[JointRun] = set()  # those of them that have failed on a device

    def start(
        self, world: int, sequence: int, ordinals: tuple[int, ...], token: RunToken, outputs: Sequence[DeviceArray]
    ) -> JointRun:
        """Return the record of a run that has started."""
        former = self._last.get(world)
        if former is None:  # worlds come and go
            self._last = {world: last for world, last in self._last.items() if last.state is not RunState.SUCCEEDED}
        run = self._last[world] = JointRun(world, sequence, ordinals, token, outputs, self._closing_status, former)
        return run

    def awaits(self, world: int, ordinals: tuple[int, ...], inputs: Iterable[Buffer], wake: Callable[[], None]) -> bool:
        """Return whether a run with these inputs has to wait for the former one. If so, call `wake` when that ends.

        `wake` is called on any thread. After a failure, `ended` reports that the wait is over.
        """
        last = self._last.get(world)
        if last is None:
            return False
        state = last.state  # read once, since other threads set it; a wait for a run that has ended is over at once
        if state is RunState.SUCCEEDED:
            return False
        if ordinals == last.ordinals and any(each.run is last for each in inputs):
            return False
        if state is RunState.RUNNING and not last.is_awaited:
            last.is_awaited = True
            start_in(self._threads, _wait, last, wake)
        return True

    def ended(self, sequence: int) -> bool:
        """Record that a run has ended on all hosts. Return whether a later run may have waited for that."""
        for world, run in self._last.items():
            if run.sequence == sequence:
                del self._last[world]
                return True
        return False

    def raise_cause(self, world: int, sequence: int) -> None:
        """Raise the error for which a world was closed, if it was. Call this if a run there fails while it starts."""
        self._closing_status(world, sequence).raise_if_error()

    def closed(self, world: int, successor: int, ended: Container[int]) -> None:
        """Note that a world was closed, and that its functions move to a `successor`, if that is not 0.

        Other hosts may not have begun the last run that this host began in the world, and then begin it in the
        successor. So runs wait there for its end, except if it is one of those that have `ended`, which no host begins.
        """
        last = self._last.get(world)
        if last is not None and successor and last.sequence not in ended:
            del self._last[world]
            self._last[successor] = last

    def failed_on_devices(self) -> list[tuple[int, Status]]:
        """Return the runs that have failed on a device and may never end on others, with their errors.

        Call this once a second, on any one thread. A run is examined from the second call on, and reported once. Does
        not block.
        """
        running = [run for last in list(self._last.values()) for run in last.unended() if len(run.ordinals) > 1]
        long = [run for run in running if run in self._seen and run not in self._reported]
        failed = {run: error for run in long if (error := self._error_of(run)) is not None}
        self._seen = set(running)
        self._reported = (self._reported & self._seen) | failed.keys()
        return [(run.sequence, error) for run, error in failed.items()]

    def _error_of(self, run: JointRun) -> Status | None:
        """Return the error of a run on one of its devices, if it has failed there and that can be found without a wait.

        A run that donates arrays may execute inside the call that starts it, and wait there for other hosts.
        """
        if not self._guard.lock.acquire(blocking=False):
            return None
        try:
            output = run.output
            if output is None or output.is_deleted():
                return None
            for shard in self._shards(output):
                if shard.is_ready():
                    try:
                        shard.block_until_ready()  # does not wait
                    except Exception as error:
                        return status_of_device_error(error)
        finally:
            self._guard.lock.release()
        return None


def _wait(run: JointRun, wake: Callable[[], None]) -> None:
    with suppress(Exception):  # the watcher of its unit reports it
        run.block_until_ready()
    wake()
