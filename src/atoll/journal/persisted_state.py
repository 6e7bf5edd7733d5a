"""The file in which an ended cluster persists its suspended sessions and its published arrays for the next one.

It is in the journal's directory, beside the snapshots and segments of a running cluster.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.cluster.topology import IslandShape
from atoll.errors import JournalError, SettingsError
from atoll.journal.files import journal_key, read_whole, snapshots_in
from atoll.missing import exists
from atoll.quantities import counted, noun_for
from atoll.state.versions import decode_versioned, encode_versioned

NAME = "suspended"
_NAMES = 8  # of published arrays in a line of the log


class PersistedCluster(msgspec.Struct, frozen=True):
    """The islands of an ended cluster, and the sessions and the published arrays that it has persisted.

    Published arrays can be restored on other islands than before.
    """

    shapes: tuple[IslandShape, ...]
    sessions: dict[int, str]  # tenants by the number of the session
    versions: tuple[tuple[str, str, int], ...] = ()  # of published arrays: tenant, name and number

    def check(self, settings: ClusterSettings, where: str) -> None:
        """Raise SettingsError if a cluster with these settings lacks islands or tenants of what `where` persists.

        Without its tenant, a session or a version would be removed with its files.
        """
        self._check_islands(settings, where)
        known = {DEFAULT_NAME, *(each.name for each in settings.tenants)}
        lost = self._of_others(known)
        missing = sorted({*lost.sessions.values(), *(each[0] for each in lost.versions)})
        if missing:
            many = f"{noun_for(len(missing), 'tenant')} {', '.join(missing)}"
            are = "are" if len(lost.sessions) + len(lost.versions) > 1 else "is"
            raise SettingsError(
                f"{lost} {are} persisted in {where}, and this cluster has no {many}. Correct the name in "
                f"the file of --tenants. To remove {'them' if are == 'are' else 'it'}, start the cluster with the "
                f"{noun_for(len(missing), 'tenant')} and run `atoll tenants remove {missing[0]}`"
            )

    def _of_others(self, tenants: Container[str]) -> PersistedCluster:
        """Return the part that does not belong to these tenants."""
        sessions = {number: tenant for number, tenant in self.sessions.items() if tenant not in tenants}
        versions = tuple(each for each in self.versions if each[0] not in tenants)
        return PersistedCluster(self.shapes, sessions, versions)

    def _check_islands(self, settings: ClusterSettings, where: str) -> None:
        shapes = settings.topology.shapes
        for island, shape in enumerate(self.shapes if self.sessions else ()):
            has = shapes[island] if island < len(shapes) else None
            if has != shape:
                what = f"{self._named()} {'are' if len(self.sessions) > 1 else 'is'}"
                raise SettingsError(
                    f"{what} persisted in {where}, of a cluster whose island {island} has {shape}: in this "
                    f"cluster it would {f'have {has}' if has else 'not exist'}. Start the same islands to restore "
                    f"{'them' if len(self.sessions) > 1 else 'it'}, or remove {where} to continue without"
                )

    def parts(self, sessions: Container[int], tenants: Container[str]) -> tuple[PersistedCluster, PersistedCluster]:
        """Return the part that the next cluster has restored, and the part that it has removed.

        The next cluster has restored `sessions` and the published arrays of its `tenants`.
        """
        restored = {number: tenant for number, tenant in self.sessions.items() if number in sessions}
        versions = tuple(each for each in self.versions if each[0] in tenants)
        removed = {number: tenant for number, tenant in self.sessions.items() if number not in sessions}
        rest = tuple(each for each in self.versions if each not in versions)
        return PersistedCluster(self.shapes, restored, versions), PersistedCluster(self.shapes, removed, rest)

    def __str__(self) -> str:
        """Return text such as "the suspended sessions 3, 7 and 2 versions of published arrays (red/policy)"."""
        count = len(self.versions)
        names = sorted({f"{tenant}/{name}" for tenant, name, _ in self.versions})
        shown = ", ".join([*names[:_NAMES], *(["..."] if len(names) > _NAMES else [])])
        versions = f"{counted(count, 'version')} of published arrays ({shown})" if count else ""
        return " and ".join(filter(None, (self._named() if self.sessions else "", versions)))

    def _named(self) -> str:
        return f"the suspended {noun_for(len(self.sessions), 'session')} {', '.join(map(str, sorted(self.sessions)))}"


class PersistedState(msgspec.Struct, frozen=True):
    """The content of the file.

    `shell` is the encoded state of the connections to the sessions' proxies, `sessions` is that of the controller, and
    `secrets` identify the sessions to hosts.
    """

    cluster: PersistedCluster
    shell: bytes
    sessions: bytes
    secrets: dict[int, str]


_TAG, _VERSION = "persisted state", (4, 4)


def encode_persisted(state: PersistedState) -> bytes:
    """Return the content of the file."""
    return encode_versioned(_TAG, _VERSION, state)


def decode_persisted(content: bytes) -> PersistedState:
    """Return the state that `encode_persisted` encoded. Raises JournalError if it cannot be read."""
    return decode_versioned(content, _TAG, _VERSION, PersistedState)


def persisted_in(directory: Path) -> tuple[PersistedState, int] | None:
    """Return the persisted state and the term of its controller, or None if the directory has none.

    Raises JournalError if the file cannot be read.
    """
    path = directory / NAME
    try:
        if not exists(path):
            return None
        found, payload = read_whole(path, journal_key())
        return decode_persisted(payload), found.term
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error}") from None
    except JournalError as error:
        raise type(error)(
            f"{error}. It contains sessions that were suspended when the cluster ended; remove it only to discard them"
        ) from None


def has_killed_cluster(directory: Path) -> bool:
    """Return whether the directory has the journal of a cluster that was killed while it ran.

    Raises JournalError if that is unknown.
    """
    try:
        return not exists(directory / NAME) and bool(snapshots_in(directory))
    except OSError as error:
        raise JournalError(f"the journal in {directory} cannot be read: {error}") from None


def check_persisted(directory: Path, settings: ClusterSettings) -> None:
    """Check that a cluster of these settings can restore the sessions. Raises JournalError or SettingsError."""
    persisted = persisted_in(directory)
    if persisted is not None:
        persisted[0].cluster.check(settings, str(directory / NAME))
