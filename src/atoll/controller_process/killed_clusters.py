"""Persist the sessions of a cluster that was killed as a whole, as its orderly end would have.

If an engine and its controller are killed together, or the machine loses power, no controller is restarted: the journal
is that of a cluster that is over. But sessions that were suspended on disk still exist: their arrays are in files, and
their proxies wait. So the next cluster replays the journal, and ends the killed cluster in its place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from atoll.controller_process.journal_recovery import load_snapshot
from atoll.controller_process.process_state import ProcessState
from atoll.controller_process.shell import ControllerShell
from atoll.controller_process.spilled_files import SpilledFiles
from atoll.controller_process.successor_probe import later_controller
from atoll.errors import IncompatibleJournalError, JournalError
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import recover
from atoll.journal.persisted_state import NAME, decode_persisted
from atoll.missing import exists

_log = logging.getLogger(__name__)


async def end_killed_cluster(
    path: str, make_shell: Callable[[ProcessState], ControllerShell], persist: bool, authority: str = ""
) -> None:
    """End the cluster whose journal is in the directory, if there is one. With `persist`, persist its sessions.

    If a standby has taken over, the cluster continues there with its sessions and files, and only the journal is
    removed. `authority` is the directory with the certificate authority with which to ask the standby.

    `make_shell` makes a shell that serves the cluster's last state. Afterwards the directory has no journal, and the
    file of persisted sessions if there are any. The files of a damaged journal are then in its directory DAMAGED.
    Raises JournalError if the directory is unusable or full. Without changing a file, raises JournalError if the
    operating system cannot read the journal, which may be intact, and IncompatibleJournalError if the journal has
    another protocol or key.
    """
    directory = JournalDirectory(path)
    try:
        with _explained(directory, "it cannot be read now"):
            is_killed = bool(directory.snapshots() or directory.segments())
            has_persisted = exists(directory.path / NAME)
        if is_killed:
            await _end(directory, make_shell, persist, has_persisted, authority)
    finally:
        directory.close()


@contextlib.contextmanager
def _explained(directory: JournalDirectory, what: str) -> Iterator[None]:
    """Raise JournalError for an OSError in this block. `what` is the effect."""
    try:
        yield
    except OSError as error:
        raise JournalError(
            f"{directory.path} contains the journal of a cluster that was killed, and {what}: {error}. Its files are "
            "kept: fix the reason, and start the cluster again"
        ) from None


async def _end(
    directory: JournalDirectory,
    make_shell: Callable[[ProcessState], ControllerShell],
    persist: bool,
    has_persisted: bool,
    authority: str,
) -> None:
    if has_persisted:
        # Nothing has happened between this file and the journal: the first snapshot contains what the file has, and
        # the last events of a journal only write the file.
        _log.warning(
            "%s contained the journal of a cluster that was killed while it started or ended; its suspended "
            "sessions are in %s",
            directory.path,
            directory.path / NAME,
        )
    else:
        with _explained(directory, "it cannot be read now"):
            found = _read(directory)
        if found is None:
            return
        later = await later_controller(directory, found[0].acceptor, authority)
        if later is not None:
            _log.warning(
                "%s contained the journal of a cluster that %s continues: this one is another cluster",
                directory.path,
                later,
            )
        else:
            with _explained(directory, "that cluster cannot be ended now"):
                _persist(directory, *found, make_shell, persist)
    with _explained(directory, "its files cannot be removed now"):
        directory.clear()


def _read(directory: JournalDirectory) -> tuple[ProcessState, int] | None:
    """Return the last state of the cluster, and the term of its controller.

    If the journal is damaged, set its files aside and return None. Raises IncompatibleJournalError, and OSError if the
    operating system cannot read or move a file.
    """
    try:
        found = recover(directory)
        if found is None:
            raise JournalError("it has events, and no snapshot of the state before them")
        state = ProcessState(*load_snapshot(found.payload, str(directory.path)), found.term)
        for turn in found.decoded_turns():
            state.replay(turn)
    except IncompatibleJournalError as error:
        raise IncompatibleJournalError(
            f"{directory.path} contains the journal of a cluster that was killed, which may have sessions that were "
            f"suspended on disk. {error}. Remove {directory.path} only to discard them"
        ) from None
    except JournalError as error:
        aside = directory.set_aside()
        _log.error(
            "%s contained the journal of a cluster that was killed, and it cannot be read: %s. Its sessions and "
            "published versions on disk are not in this cluster; their files stay. The journal is now in %s: to "
            "continue from a backup, end this cluster, restore the backup, and start the cluster again",
            directory.path,
            error,
            aside,
        )
        return None
    return state, found.term


def _persist(
    directory: JournalDirectory,
    state: ProcessState,
    term: int,
    make_shell: Callable[[ProcessState], ControllerShell],
    persist: bool,
) -> None:
    shell = make_shell(state)
    try:
        files = SpilledFiles(state.controller)
        persisted = shell.stop(persist)
    finally:
        shell.keeper.close()
    if persisted:
        try:
            directory.write_persisted(NAME, term, persisted)
        except OSError as error:  # the journal stays, so that another start can do it
            raise JournalError(f"cannot persist suspended sessions in {directory.path}: {error}") from None
    cluster = decode_persisted(persisted).cluster if persisted else None
    _log.warning(
        "%s contained the journal of a cluster that was killed; sessions on disk, which can be resumed: %d; "
        "published versions on disk: %d; removed files of others: %d",
        directory.path,
        len(cluster.sessions) if cluster is not None else 0,
        len(cluster.versions) if cluster is not None else 0,
        files.remove_except(persisted),  # the hosts of the killed cluster cannot do it any more
    )
