"""The main function of a controller process."""

from __future__ import annotations

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
from atoll.controller_process.controller_options import (
    CANNOT,
    CANNOT_RESTART,
    FAILED,
    RUNS,
    SUPERSEDED,
    ControllerFailedError,
    ControllerOptions,
    SupersededError,
    report,
)
from atoll.controller_process.journal_recovery import JournalRecovery
from atoll.controller_process.killed_clusters import end_killed_cluster
from atoll.controller_process.lease_start import acquire_lease, lease_of
from atoll.controller_process.process_state import ProcessState
from atoll.controller_process.shell import ControllerShell, new_controller
from atoll.controller_process.spilled_files import SpilledFiles
from atoll.controller_process.standby import Standby
from atoll.controller_process.takeover import first_term, transitions_of
from atoll.errors import AtollError, IncompatibleJournalError, JournalError
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
        await _serve(options, stop, bugs or bug_trap(options), keeper)


async def _serve(options: ControllerOptions, stop: asyncio.Event, bugs: BugTrap, keeper: LeaseKeeper | None) -> None:
    token = TOKEN.text()
    host_token = HOST_TOKEN.text()
    address = parse_address(options.listen)
    check_may_listen(address, token)
    is_orphaned = False

    def engine_ended() -> None:
        nonlocal is_orphaned
        is_orphaned = True
        stop.set()

    watch_in_loop(options.parent, engine_ended)
    unauthenticated = UnauthenticatedConnections()

    def make_shell(state: ProcessState, ends: asyncio.Event = stop, is_served: bool = True) -> ControllerShell:
        lease = keeper if is_served else None
        return ControllerShell(options, state, ends, has_tls=address.tls, unauthenticated=unauthenticated, lease=lease)

    make_controller = partial(new_controller, options, token, host_token)
    bugs.watch_loop(asyncio.get_running_loop())
    # With TLS, peers trust the next cluster only if it has the same certificate authority.
    may_persist = not address.tls or bool(AUTHORITY_IS_KEPT.text())
    if options.standby and not options.restarts:
        standby = Standby(options, make_shell, stop, unauthenticated, keeper)
        server, _ = await listen(address, standby.accept, standby.identity, unauthenticated)
        if keeper is not None:
            keeper.start()
        took_over = await standby.run()
        if took_over is None:
            server.close()
            return
        shell = took_over
    else:
        restarted = JournalRecovery(options.journal, True) if options.restarts else None
        if keeper is not None:
            claim = Claim(transitions_of(restarted.last_term) if restarted is not None else None)
            await acquire_lease(keeper, claim, options, stop)
        if options.journal and not options.restarts:
            make_ended = partial(make_shell, ends=asyncio.Event(), is_served=False)
            end_killed_cluster(options.journal, make_ended, may_persist)
        if options.journal:
            before = restarted or JournalRecovery(options.journal, False)
            if keeper is not None:
                if first_term(keeper.transitions) <= before.last_term and restarted is None:
                    await asyncio.to_thread(keeper.advance, transitions_of(before.last_term) + 1)
                before.raise_term(first_term(keeper.transitions))
                keeper.start()
            shell = make_shell(before.state(make_controller))
            try:
                before.begin(shell)
            except OSError as error:
                raise JournalError(f"cannot write the journal in {options.journal}: {error.strerror}") from None
        else:
            shell = make_shell(ProcessState(make_controller()))
            shell.start()
        identity = shell.joiners.identity if shell.joiners is not None else None
        server, _ = await listen(address, shell.accept, identity, unauthenticated)
        report(options.ready_fd, RUNS)
    shell.collector.start()
    await stop.wait()
    server.close()
    if shell.failure:
        await asyncio.to_thread(shell.keeper.close)
        raise ControllerFailedError(shell.failure)
    if shell.superseded_by:
        await asyncio.to_thread(shell.keeper.close)
        raise SupersededError(f"the controller of term {shell.superseded_by} has taken over")
    if is_orphaned and options.continues and shell.journal is not None and not shell.journal.is_broken:
        _log.warning("the engine has ended: this controller ends, and its journal stays for the next engine")
        shell.leave_journal()
        if keeper is not None:
            keeper.leave()
        await asyncio.to_thread(shell.keeper.close)
        return
    files = SpilledFiles(shell.controller)
    persisted = shell.stop(shell.journal is not None and may_persist)
    await asyncio.sleep(0)
    if is_orphaned:
        files.remove_except(persisted)  # hosts that end with the engine may not do it
    await asyncio.to_thread(shell.keeper.close)
    if shell.journal is not None:
        shell.journal.end(persisted)
    if address.is_unix:
        with contextlib.suppress(OSError):
            os.unlink(address.path)


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
        print(f"atoll: {error}", file=sys.stderr)
        sys.exit(CANNOT_RESTART if isinstance(error, IncompatibleJournalError) else 1)


if __name__ == "__main__":
    main()
