"""The main function of a controller process."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `run_loop`, since the objects of modules are permanent

import asyncio
import contextlib
import logging
import os
import sys
from functools import partial

from atoll.cluster.environment_variables import AUTHORITY_IS_KEPT, HOST_TOKEN, TOKEN
from atoll.cluster.processes.bugs import BugTrap
from atoll.cluster.processes.leases import FAILED_STATUS
from atoll.cluster.processes.lifeline import watch_in_loop
from atoll.cluster.processes.process_logging import start_logging
from atoll.cluster.processes.process_runtime import read_options, run_loop
from atoll.controller.core import Controller
from atoll.controller_process.controller_options import (
    CANNOT,
    CANNOT_RESTART,
    FAILED,
    FOLLOWED,
    RUNS,
    SUPERSEDED,
    ControllerFailedError,
    ControllerOptions,
    report,
)
from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.controller_process.killed_clusters import end_killed_cluster
from atoll.controller_process.lease_start import acquire_lease, lease_of
from atoll.controller_process.process_state import ProcessState
from atoll.controller_process.shell import ControllerShell, ShellState, new_controller
from atoll.controller_process.spilled_files import SpilledFiles
from atoll.controller_process.standby import Standby
from atoll.controller_process.successor_probe import later_controller
from atoll.controller_process.takeover import first_term, transitions_of
from atoll.errors import AtollError, IncompatibleJournalError, JournalError, SupersededError
from atoll.leadership.election import Claim
from atoll.leadership.lease_keeper import LeaseKeeper
from atoll.wire.address import check_may_listen, parse_address
from atoll.wire.endpoints import listen
from atoll.wire.unauthenticated import UnauthenticatedConnections

_log = logging.getLogger(__name__)


def bug_trap(options: ControllerOptions) -> BugTrap:
    return BugTrap("the controller", lambda text: report(options.ready_fd, FAILED + text.encode() + b"\n"))


async def serve(options: ControllerOptions, stop: asyncio.Event, bugs: BugTrap | None = None) -> None:
    """Serve a cluster until `stop` is set. `bugs` ends this process if a callback or a task of the loop has a bug."""
    async with lease_of(options) as keeper:
        await _ControllerProcess(options, stop, bugs or bug_trap(options), keeper).serve()


class _ControllerProcess:
    """A controller's process, from its options to its end.

    Args:
        stop: Ends the process when it is set.
        keeper: Keeps the lease of the cluster; None if it has none.
    """

    def __init__(
        self, options: ControllerOptions, stop: asyncio.Event, bugs: BugTrap, keeper: LeaseKeeper | None
    ) -> None:
        self._options = options
        self._stop = stop
        self._bugs = bugs
        self._keeper = keeper
        self._token = TOKEN.text()
        self._host_token = HOST_TOKEN.text()
        self._address = parse_address(options.listen)
        self._unauthenticated = UnauthenticatedConnections()
        self._is_orphaned = False
        # With TLS, peers trust the next cluster only if it has the same certificate authority.
        self._may_persist = not self._address.tls or bool(AUTHORITY_IS_KEPT.text())

    async def serve(self) -> None:
        """Serve the cluster until the process is stopped. Raises AtollError if it cannot begin, or has failed."""
        check_may_listen(self._address, self._token)
        watch_in_loop(self._options.parent, self._engine_ended)
        self._bugs.watch_loop(asyncio.get_running_loop())
        is_standby = self._options.standby and not self._options.restarts
        begun = await (self._take_over() if is_standby else self._begin())
        if begun is None:
            return
        shell, server = begun
        shell.collector.start()
        await self._stop.wait()
        server.close()
        await self._end(shell)

    def _engine_ended(self) -> None:
        self._is_orphaned = True
        self._stop.set()

    def _make_shell(
        self, state: ProcessState, ends: asyncio.Event | None = None, is_served: bool = True
    ) -> ControllerShell:
        return ControllerShell(
            self._options,
            state,
            ends or self._stop,
            has_tls=self._address.tls,
            unauthenticated=self._unauthenticated,
            lease=self._keeper if is_served else None,
        )

    def _make_controller(self) -> Controller:
        return new_controller(self._options, self._token, self._host_token)

    async def _take_over(self) -> tuple[ControllerShell, asyncio.Server] | None:
        """Follow another controller until it fails. Return None if this process is stopped before."""
        standby = Standby(self._options, self._make_shell, self._stop, self._unauthenticated, self._keeper)
        server, _ = await listen(self._address, standby.accept, standby.identity, self._unauthenticated)
        if self._keeper is not None:
            self._keeper.start()
        shell = await standby.run()
        if shell is None:
            server.close()
            return None
        return shell, server

    async def _begin(self) -> tuple[ControllerShell, asyncio.Server]:
        """Begin to serve: with what the journal says, if there is one."""
        restarted = JournalRecovery(self._options.journal, restarts=True) if self._options.restarts else None
        if self._keeper is not None:
            claim = Claim(transitions_of(restarted.last_term) if restarted is not None else None)
            await acquire_lease(self._keeper, claim, self._options, self._stop)
        if self._options.journal:
            shell = await self._recover(restarted)
        else:
            shell = self._make_shell(ProcessState(self._make_controller()))
            shell.start()
        identity = shell.joiners.identity if shell.joiners is not None else None
        server, _ = await listen(self._address, shell.accept, identity, self._unauthenticated)
        report(self._options.ready_fd, RUNS)
        return shell, server

    async def _recover(self, restarted: JournalRecovery | None) -> ControllerShell:
        """Begin with the state of the journal, in which this process continues to write.

        Args:
            restarted: The journal of the controller that this process restarts. Otherwise, the journal may be that of
                a cluster that was killed, which ends first.
        """
        journal = self._options.journal
        if restarted is None:
            make_ended = partial(self._make_shell, ends=asyncio.Event(), is_served=False)
            await end_killed_cluster(journal, make_ended, self._may_persist, self._options.directory)
        before = restarted or JournalRecovery(journal, restarts=False)
        keeper = self._keeper
        if keeper is not None:
            if first_term(keeper.transitions) <= before.last_term and restarted is None:
                await asyncio.to_thread(keeper.advance, transitions_of(before.last_term) + 1)
            before.raise_term(first_term(keeper.transitions))
            keeper.start()
        state = before.state(self._make_controller)
        if restarted is not None and keeper is None:  # otherwise the lease decides who serves
            await self._check_not_superseded(restarted, state)
        shell = self._make_shell(state)
        try:
            before.begin(shell)
        except OSError as error:
            raise JournalError(f"cannot write the journal in {journal}: {error.strerror}") from None
        return shell

    async def _check_not_superseded(self, journal: JournalRecovery, state: ProcessState) -> None:
        """Raise SupersededError if a standby of the journal's controller has taken over from it."""
        later = await later_controller(journal.directory, state.acceptor, self._options.directory)
        if later is None:
            return
        if later.address:
            report(self._options.ready_fd, FOLLOWED + later.address.encode() + b"\n")
        raise SupersededError(f"the controller of term {later.term} has taken over")

    async def _end(self, shell: ControllerShell) -> None:
        """End the cluster, unless another controller or the next engine continues it.

        Raises ControllerFailedError, and SupersededError if another controller has taken over.
        """
        if shell.state is ShellState.FAILED:
            await asyncio.to_thread(shell.keeper.close)
            raise ControllerFailedError(shell.failure)
        if shell.state is ShellState.SUPERSEDED:
            await asyncio.to_thread(shell.keeper.close)
            raise SupersededError(f"the controller of term {shell.superseded_by} has taken over")
        is_continued = self._is_orphaned and self._options.continues
        if is_continued and shell.journal is not None and not shell.journal.is_broken:
            _log.warning("the engine has ended: this controller ends, and its journal stays for the next engine")
            shell.leave_journal()
            if self._keeper is not None:
                self._keeper.leave()
            await asyncio.to_thread(shell.keeper.close)
            return
        files = SpilledFiles(shell.controller)
        may_persist = self._may_persist and shell.journal is not None and shell.journal.can_persist(shell.snapshot)
        persisted = shell.stop(may_persist)
        await asyncio.sleep(0)
        if self._is_orphaned:
            files.remove_except(persisted)  # hosts that end with the engine may not do it
        await asyncio.to_thread(shell.keeper.close)
        if shell.journal is not None:
            shell.journal.end(persisted)
        if self._address.is_unix:
            with contextlib.suppress(OSError):
                os.unlink(self._address.path)


def main() -> None:
    options = read_options(ControllerOptions)
    start_logging("controller")
    bugs = bug_trap(options)
    bugs.watch_threads()
    try:
        run_loop(lambda stop: serve(options, stop, bugs))
    except ControllerFailedError:  # already logged
        sys.exit(FAILED_STATUS)
    except SupersededError as error:
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(SUPERSEDED)
    except AtollError as error:
        report(options.ready_fd, CANNOT + " ".join(str(error).split()).encode() + b"\n")
        if options.ready_fd < 0:  # otherwise the process that started this one prints the reason
            print(f"atoll: {error}", file=sys.stderr)
        sys.exit(CANNOT_RESTART if isinstance(error, IncompatibleJournalError) else 1)


if __name__ == "__main__":
    main()
