"""Read the file in which an ended cluster has persisted its suspended sessions for the next one.

It is one file of the journal's directory, beside the snapshots and events of a cluster that runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.cluster.persisted_cluster import PersistedCluster
from atoll.cluster.settings import ClusterSettings
from atoll.errors import JournalError
from atoll.journal.cipher import journal_key
from atoll.journal.files import read_whole

NAME = "suspended"


class PersistedState(msgspec.Struct, frozen=True):
    """The content of the file: `shell` is the pickled state of the connections to the sessions' proxies, `sessions` is
    that of the controller, and `secrets` are those by which hosts know the sessions.
    """

    cluster: PersistedCluster
    shell: bytes
    sessions: bytes
    secrets: dict[int, str]


def persisted_in(directory: Path) -> tuple[PersistedState, int] | None:
    """Return the persisted state and the term of its controller; None if there is none.

    Raises JournalError if it cannot be read, or if another version of Atoll wrote it.
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
            f"{error}. It has sessions that were suspended when the cluster ended; remove it to do without them"
        ) from None


def check_persisted(directory: Path, settings: ClusterSettings) -> None:
    """Check that a cluster of these settings can restore the sessions. Raises JournalError or SettingsError."""
    persisted = persisted_in(directory)
    if persisted is not None:
        persisted[0].cluster.check(settings, str(directory / NAME))
