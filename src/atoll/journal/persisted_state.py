"""The file in which an ended cluster persists its suspended sessions for the next one.

It is in the journal's directory, beside the snapshots and segments of a running cluster.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.cluster.persisted_cluster import PersistedCluster
from atoll.cluster.settings import ClusterSettings
from atoll.errors import JournalError
from atoll.journal.files import journal_key, read_whole

NAME = "suspended"


class PersistedState(msgspec.Struct, frozen=True):
    """The content of the file.

    `shell` is the pickled state of the connections to the sessions' proxies, `sessions` is that of the controller, and
    `secrets` identify the sessions to hosts.
    """

    cluster: PersistedCluster
    shell: bytes
    sessions: bytes
    secrets: dict[int, str]


def persisted_in(directory: Path) -> tuple[PersistedState, int] | None:
    """Return the persisted state and the term of its controller, or None if the directory has none.

    Raises JournalError if the file is unreadable or another version of Atoll wrote it.
    """
    path = directory / NAME
    try:
        if not path.exists():
            return None
        found, payload = read_whole(path, journal_key())
        return msgspec.msgpack.decode(payload, type=PersistedState), found.term
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from None
    except JournalError as error:
        raise JournalError(
            f"{error}. It contains sessions that were suspended when the cluster ended; remove it to discard them"
        ) from None


def check_persisted(directory: Path, settings: ClusterSettings) -> None:
    """Check that a cluster of these settings can restore the sessions. Raises JournalError or SettingsError."""
    persisted = persisted_in(directory)
    if persisted is not None:
        persisted[0].cluster.check(settings, str(directory / NAME))
