"""What an ended cluster has left in its journal's directory: sessions that are suspended on disk, for the next one.

It is one file, beside the snapshots and events of the cluster that runs, if one does.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from atoll.cluster.former import FormerCluster
from atoll.cluster.settings import ClusterSettings
from atoll.errors import JournalError
from atoll.journal.cipher import journal_key
from atoll.journal.files import read_whole

NAME = "suspended"


class KeptSessions(msgspec.Struct, frozen=True):
    """`shell` is pickled: what is kept of the connections to the sessions' proxies. `sessions` are the controller's,
    and `secrets` what hosts know them by.
    """

    former: FormerCluster
    shell: bytes
    sessions: bytes
    secrets: dict[int, str]


def kept_in(directory: Path) -> tuple[KeptSessions, int] | None:
    """With the term of the controller that kept them; None where there are none.

    Raises JournalError where they cannot be read, or are of another version of Atoll's.
    """
    path = directory / NAME
    try:
        if not path.exists():
            return None
        found, payload = read_whole(path, journal_key())
        return msgspec.msgpack.decode(payload, type=KeptSessions), found.term
    except (OSError, msgspec.MsgspecError) as error:
        raise JournalError(f"{path} cannot be read: {error}") from None
    except JournalError as error:
        raise JournalError(
            f"{error}. It has sessions that were suspended when the cluster ended; remove it to do without them"
        ) from None


def check_kept(directory: Path, settings: ClusterSettings) -> None:
    """Whether a cluster of these settings can go on with what is there. Raises JournalError or SettingsError."""
    kept = kept_in(directory)
    if kept is not None:
        kept[0].former.check(settings, str(directory / NAME))
