"""Named, versioned arrays as a pure state machine: events in, actions out.

A tenant publishes a tree of arrays under a name. Each publication is a *version* of the name, numbered from 1 in the
order in which the controller receives them. A version becomes visible at once, when all of its arrays are complete.
The name keeps its newest complete versions, and each version lives at least as long as it has readers.

The methods for events change the state and return the actions that follow. They do no I/O and read no clock. The
controller performs the actions (`controller.named_arrays.published_arrays`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from atoll.cluster.array_names import SEPARATOR
from atoll.errors import Code, Status, StatusError, not_found
from atoll.named_arrays.version_files import FileState, VersionFiles
from atoll.named_arrays.version_records import Name, Version, VersionIndex, VersionKey, described_size
from atoll.named_arrays.version_states import VersionState
from atoll.named_arrays.written_versions import ANY_DEVICE

MAX_NAMES = 1024  # per tenant
MAX_KEPT = 64  # versions that a name keeps
MAX_REPLICAS = 8  # copies of a version on different islands, with the published arrays
MAX_ARRAYS = 1 << 18  # per tenant, in all versions that are not freed
MAX_DESCRIBED = 32 << 20  # characters of the paths and bytes of the structures of these versions, per tenant
MAX_PENDING = 16  # versions of a session that are not complete
MAX_READERS = 4096  # per session
MAX_WAITS = 256  # per session
MAX_WAIT_SECONDS = 60.0  # of one request
RETRY_SECONDS = 10.0  # until Atoll tries again to restore a version from files that it could not restore
GUEST_SECONDS = 300.0  # until readers of other tenants leave a version that was replaced or removed

_S = VersionState


class VersionWait(msgspec.Struct, frozen=True):
    """A session's request for a version. `number` is -1 for the newest one, which must be newer than `newer_than`.

    With `in_files`, the request is to know when version `number` is in files, and gets no reader.
    """

    session: int
    request: int
    tenant: str
    name: str
    number: int
    newer_than: int
    until: float
    is_guest: bool = False  # the session belongs to another tenant than the name
    in_files: bool = False


# ---- actions


class Free(msgspec.Struct, frozen=True):
    """Free what is left of the version in the vault and in the session that published it."""

    version: Version


class Restore(msgspec.Struct, frozen=True):
    """Make the arrays of a version again, from its files."""

    version: Version


class Opened(msgspec.Struct, frozen=True):
    """Answer a request: the session has a new reader of this version."""

    session: int
    request: int
    reader: int
    version: Version


class Stored(msgspec.Struct, frozen=True):
    """Answer a request: the version is in files."""

    session: int
    request: int
    version: Version


class Refused(msgspec.Struct, frozen=True):
    """Answer a request with an error."""

    session: int
    request: int
    status: Status


Action = Free | Restore | Opened | Stored | Refused


class NamedArrays:
    """All names with their versions, their readers, and the requests that wait for versions."""

    def __init__(self) -> None:
        self.names: dict[tuple[str, str], Name] = {}
        self.readers: dict[int, tuple[int, Version]] = {}  # by number: session and version
        self.waits: dict[tuple[int, int], VersionWait] = {}  # by session and request
        self._waits_of: dict[int, int] = {}  # number of the waits of each session
        self._waits_for: dict[tuple[str, str], dict[tuple[int, int], None]] = {}  # their keys, by tenant and name
        self._readers_of: dict[int, set[int]] = {}  # by session
        self.pending: dict[VersionKey, Version] = {}
        self.pending_of: dict[int, dict[VersionKey, Version]] = {}  # the same, by session
        self._arrays_of: dict[str, int] = {}  # number of the arrays in the versions of each tenant
        self._described_of: dict[str, int] = {}  # what the controller keeps about these, as in `Version.described`
        self._next_reader = 1
        self._guests: set[int] = set()  # readers that belong to other tenants than their versions
        self._reading: dict[int, int] = {}  # number of the reads of each reader that have not begun
        self._closing: set[int] = set()  # readers that leave when these have begun
        self.first_number = 1  # of new names
        self.index = VersionIndex()
        self._awaited: dict[tuple[str, str], Version] = {}  # one of a name that stays only until it is in files

    def rebuild_index(self) -> None:
        """Make the tables again that are not stored.

        These are the index, the waits by name, the pending versions by session, and the versions that stay.
        """
        self._waits_for.clear()
        self.pending_of.clear()
        for version in self.pending.values():
            self.pending_of.setdefault(version.session, {})[version.key] = version
        for key, wait in self.waits.items():
            self._waits_for.setdefault((wait.tenant, wait.name), {})[key] = None
        for name in self.names.values():
            self._note_awaited(name)
        for version in self.versions():
            version.join(self.index)

    # ---- publishing

    def publish(
        self,
        now: float,
        tenant: str,
        name: str,
        session: int,
        *,
        keep: int,
        handles: tuple[int, ...],
        paths: tuple[str, ...],
        structure: bytes = b"",
        replicas: int = 1,
        on_disk: bool = False,
    ) -> Version:
        """Begin a version. Raise RESOURCE_EXHAUSTED if the tenant or the session has too many."""
        self._check_space(tenant, len(handles), described_size(paths, structure))
        found = self.names.get((tenant, name))
        if found is None and sum(owner == tenant for owner, _ in self.names) >= MAX_NAMES:
            self._forget_unused_name(tenant)
        if len(self.pending_of.get(session, ())) >= MAX_PENDING:
            text = f"{MAX_PENDING} versions of session {session} are not complete: publish fewer at once"
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)
        if found is None:
            found = self.names[tenant, name] = Name(tenant, name, next_number=self.first_number)
        version = Version(
            tenant,
            name,
            found.next_number,
            session,
            handles,
            paths,
            structure,
            keep,
            now,
            replicas=replicas,
            index=self.index,
            files=VersionFiles() if on_disk else None,
        )
        found.next_number += 1
        found.versions[version.number] = version
        self.pending[version.key] = version
        self.pending_of.setdefault(session, {})[version.key] = version
        self._arrays_of[tenant] = self._arrays_of.get(tenant, 0) + len(handles)
        self._described_of[tenant] = self._described_of.get(tenant, 0) + version.described
        return version

    def _check_space(self, tenant: str, arrays: int, described: int) -> None:
        """Raise RESOURCE_EXHAUSTED if the controller would have to keep too much about the tenant's versions."""
        known = self._arrays_of.get(tenant, 0)
        advice = "keep fewer versions, or remove some with `atoll arrays rm`"
        if known + arrays > MAX_ARRAYS:
            text = (
                f"the versions of tenant {tenant} have {known} arrays, and {arrays} more exceed {MAX_ARRAYS}: {advice}"
            )
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)
        if self._described_of.get(tenant, 0) + described > MAX_DESCRIBED:
            text = (
                f"the paths and tree structures of the versions of tenant {tenant} exceed {MAX_DESCRIBED >> 20} MiB: "
                f"{advice}"
            )
            raise StatusError(Code.RESOURCE_EXHAUSTED, text)

    def _forget(self, version: Version) -> None:
        """Forget a version that has failed, was freed, or whose tenant was removed."""
        del self._name_of(version).versions[version.number]
        version.leave_devices()
        tenant = version.tenant
        self._arrays_of[tenant] -= len(version.handles)
        self._described_of[tenant] -= version.described
        if not self._arrays_of[tenant]:
            del self._arrays_of[tenant], self._described_of[tenant]

    def _forget_unused_name(self, tenant: str) -> None:
        for key, name in self.names.items():
            if key[0] == tenant and not name.versions:
                self._forget_name(key)
                return
        text = f"tenant {tenant} has {MAX_NAMES} names of arrays: remove some with `atoll arrays rm`"
        raise StatusError(Code.RESOURCE_EXHAUSTED, text)

    def _forget_name(self, key: tuple[str, str]) -> None:
        name = self.names.pop(key)
        self._awaited.pop(key, None)
        self.first_number = max(self.first_number, name.next_number)

    def complete(self, now: float, version: Version) -> list[Action]:
        """Handle that all arrays of the version are complete. It replaces the oldest of the kept versions."""
        self._end_pending(version)
        version.enter(_S.COMPLETE)
        version.seconds = now
        name = self._name_of(version)
        name.keep = version.keep
        actions = self._retire(now, name)
        return [*actions, *self._answer_waits(name)]

    def fail(self, version: Version, status: Status) -> list[Action]:
        """Handle that a version will not become complete."""
        self._end_pending(version)
        version.error = status
        version.enter(_S.FAILED)
        self._forget(version)
        name = self._name_of(version)
        name.failure = (version.number, status)
        return [Free(version), *self._answer_waits(name)]

    def _end_pending(self, version: Version) -> None:
        del self.pending[version.key]
        own = self.pending_of[version.session]
        del own[version.key]
        if not own:
            del self.pending_of[version.session]

    def _name_of(self, version: Version) -> Name:
        return self.names[version.tenant, version.name]

    def _retire(self, now: float, name: Name) -> list[Action]:
        """Retire the versions beyond those that the name keeps, and lost versions that are older than these."""
        kept, older = name.divided()
        awaited = name.awaited()
        lost = [each for each in name.versions.values() if each.state is _S.LOST]
        replaced = [each for each in older if each not in awaited]
        replaced += [each for each in lost if kept and each.number < kept[-1].number]
        return self.replace(now, name, replaced)

    def _note_awaited(self, name: Name) -> None:
        """Note the version of a name that stays only until it is in files."""
        found = [each for each in name.awaited() if each.is_being_written]
        if found:
            self._awaited[name.tenant, name.name] = found[0]
        else:
            self._awaited.pop((name.tenant, name.name), None)

    def _retire_one(self, now: float, version: Version) -> list[Action]:
        version.enter(_S.RETIRED)
        version.retired = now
        return self._free_unread(version)

    def _free_unread(self, version: Version) -> list[Action]:
        """Free a retired version unless it has readers."""
        if version.readers:
            return []
        version.enter(_S.FREED)
        self._forget(version)
        return [Free(version)]

    # ---- files

    def written(self, now: float, version: Version) -> list[Action]:
        """Handle that all arrays of the version are in files. Older ones that stayed until then are replaced."""
        _files(version).enter(FileState.WRITTEN)
        self.index.files_written(version)
        name = self._name_of(version)
        return [*self._retire(now, name), *self._answer_waits(name)]

    def replaceable(self, version: Version) -> list[Version]:
        """Return the older versions that the name does not keep, and that stay only until this one is in files.

        Versions that are not in files come first. Versions with readers would stay, so they are not among them.
        """
        older = [each for each in self._name_of(version).divided()[1] if each.number < version.number]
        return sorted((each for each in older if not each.readers), key=lambda each: each.has_files)

    def awaited_on(self, device: int) -> list[Version]:
        """Return the versions on the device that stay only until they are in files, although newer ones exist.

        There is at most one per name. They are in no order.
        """
        return [each for each in self._awaited.values() if device == ANY_DEVICE or device in each.devices]

    def replace(self, now: float, name: Name, versions: Iterable[Version]) -> list[Action]:
        """Retire versions of a name that it does not keep."""
        actions = [action for version in versions for action in self._retire_one(now, version)]
        self._note_awaited(name)
        return actions

    def make_space(self, now: float, versions: Iterable[Version]) -> list[Action]:
        """Retire versions that are `replaceable` or `awaited_on` a device, since there is no space for them."""
        actions: list[Action] = []
        for version in versions:
            name = self._name_of(version)
            actions += [*self.replace(now, name, [version]), *self._answer_waits(name)]
        return actions

    def store(self, version: Version) -> list[Action]:
        """Handle that the arrays of the version are not on devices any more. Readers need them there."""
        _files(version).enter(FileState.STORED)
        return [Restore(version)] if version.readers else []

    def restoring(self, version: Version) -> None:
        """Handle that launches make the arrays of the version again."""
        _files(version).enter(FileState.RESTORING)

    def restored(self, version: Version) -> list[Action]:
        """Handle that all arrays of the version are on devices again."""
        files = _files(version)
        files.enter(FileState.WRITTEN)
        files.problem, files.failure = "", None
        self.index.files_written(version)
        return self._answer_waits(self._name_of(version))

    def not_restored(self, now: float, version: Version, status: Status | None) -> list[Action]:
        """Handle that the arrays of the version could not be restored.

        Refuse the requests for it with `status` if there is one. Otherwise they wait for another attempt.
        """
        files = _files(version)
        files.enter(FileState.STORED)
        if status is None:
            return [Restore(version)]
        files.failure, files.failed = status, now
        return self._answer_waits(self._name_of(version))

    def may_be_restored(self, version: Version) -> bool:
        """Return whether the arrays are in files only, and the last attempt to restore them did not fail."""
        files = version.files
        is_there = version.error is None and self.find(version.key) is version
        return is_there and files is not None and not files.are_on_devices and files.failure is None

    def add_stored(self, now: float, version: Version, keep: int, next_number: int) -> None:
        """Add a version that an ended cluster had in files, to a name that keeps `keep` versions."""
        key = version.tenant, version.name
        name = self.names.setdefault(key, Name(*key))
        name.keep, name.next_number = keep, max(name.next_number, next_number)
        version.seconds = now
        version.join(self.index)
        name.versions[version.number] = version
        tenant = version.tenant
        self._arrays_of[tenant] = self._arrays_of.get(tenant, 0) + len(version.handles)
        self._described_of[tenant] = self._described_of.get(tenant, 0) + version.described

    # ---- losses and removals

    def lose(self, version: Version, status: Status) -> list[Action]:
        """Handle that a part of the version is lost with an island."""
        if version.state is _S.PENDING:
            return self.fail(version, status)
        version.error = version.error or status
        name = self._name_of(version)
        if version.state is _S.COMPLETE:
            version.enter(_S.LOST)
            self._note_awaited(name)
        return self._answer_waits(name)

    def remove(self, now: float, tenant: str, name: str, number: int = -1) -> list[Action]:
        """Remove a version, or all versions of the name. Readers keep what they read. Raise NOT_FOUND."""
        found = self.names.get((tenant, name))
        chosen = [] if found is None else [each for each in found.versions.values() if number in (-1, each.number)]
        if found is None or not chosen:
            what = f"{tenant}{SEPARATOR}{name}" if number < 0 else f"version {number} of {tenant}{SEPARATOR}{name}"
            raise not_found(f"{what} does not exist (atoll arrays lists the versions)")
        actions: list[Action] = []
        for version in chosen:
            if version.state is _S.PENDING:
                actions += self.fail(version, Status(Code.CANCELLED, f"{version.title} was removed"))
                continue
            if version.state is not _S.RETIRED:
                actions += self._retire_one(now, version)
        self._note_awaited(found)
        return [*actions, *self._answer_waits(found)]

    def tenant_removed(self, tenant: str) -> list[Action]:
        """Forget all names of a tenant, whose vault is closed. Nothing is left to free."""
        actions: list[Action] = []
        for key, name in [(key, name) for key, name in self.names.items() if key[0] == tenant]:
            gone = Status(Code.CANCELLED, f"the arrays of tenant {tenant} were removed")
            for version in list(name.versions.values()):
                if version.state is _S.PENDING:
                    actions += self.fail(version, gone)
                else:
                    for reader in list(version.readers):
                        self._forget_reader(reader)
                    version.error = gone
                    self._forget(version)
            self._forget_name(key)
        return actions

    # ---- reading

    def open(self, now: float, wait: VersionWait) -> list[Action]:
        """Handle a request for a version: answer it now, or when there is such a version, or at its deadline."""
        if self._waits_of.get(wait.session, 0) >= MAX_WAITS:
            text = f"{MAX_WAITS} requests of session {wait.session} wait for versions of arrays"
            return [Refused(wait.session, wait.request, Status(Code.RESOURCE_EXHAUSTED, text))]
        if (wait.session, wait.request) in self.waits:
            text = f"request {wait.request} of session {wait.session} waits already"
            return [Refused(wait.session, wait.request, Status(Code.INVALID_ARGUMENT, text))]
        if not wait.in_files and len(self._readers_of.get(wait.session, ())) >= MAX_READERS:
            text = f"session {wait.session} has {MAX_READERS} versions of arrays open: delete some"
            return [Refused(wait.session, wait.request, Status(Code.RESOURCE_EXHAUSTED, text))]
        actions = [] if wait.in_files else self._wake(now, self._wanted(wait))
        answer = self._answer(wait)
        if answer is None and wait.until <= now:
            answer = self._timed_out(wait)
        if answer is None:
            key = wait.session, wait.request
            self.waits[key] = wait
            self._waits_for.setdefault((wait.tenant, wait.name), {})[key] = None
            self._waits_of[wait.session] = self._waits_of.get(wait.session, 0) + 1
            return actions
        return [*actions, answer]

    def _wake(self, now: float, version: Version | None) -> list[Action]:
        """Begin to restore a version that is in files only, unless the last attempt has just failed."""
        files = None if version is None else version.files
        if version is None or files is None or files.state is not FileState.STORED:
            return []
        if files.failure is not None and now < files.failed + RETRY_SECONDS:
            return []
        files.failure = None
        return [Restore(version)]

    def _wanted(self, wait: VersionWait) -> Version | None:
        """Return the complete version that a request is for, or None if it does not exist yet."""
        name = self.names.get((wait.tenant, wait.name))
        if name is None:
            return None
        if wait.number >= 0:
            version = name.versions.get(wait.number)
            return version if version is not None and version.state is _S.COMPLETE else None
        newest = name.newest()
        return None if newest is None or newest.number <= wait.newer_than else newest

    def _end_wait(self, key: tuple[int, int]) -> VersionWait:
        session, wait = key[0], self.waits.pop(key)
        self._waits_of[session] -= 1
        if not self._waits_of[session]:
            del self._waits_of[session]
        others = self._waits_for[wait.tenant, wait.name]
        del others[key]
        if not others:
            del self._waits_for[wait.tenant, wait.name]
        return wait

    def _answer(self, wait: VersionWait) -> Opened | Stored | Refused | None:
        """Return the answer to a request, or None if the request has to wait."""
        name = self.names.get((wait.tenant, wait.name))
        if name is None:
            return None
        if wait.in_files and (written := name.versions.get(wait.number)) is not None:
            return _stored(wait, written)
        wanted = self._wanted(wait)
        if wanted is not None:
            return self._opened(wait, wanted) if wanted.is_on_devices else _unrestored(wait, wanted)
        if wait.number < 0:
            return None
        version = name.versions.get(wait.number)
        if version is not None and version.state is _S.LOST:
            assert version.error is not None
            return Refused(wait.session, wait.request, version.error.within(version.title))
        if wait.number >= name.next_number or (version is not None and version.state is _S.PENDING):
            return None
        text = f"version {wait.number} of {wait.tenant}{SEPARATOR}{wait.name} does not exist any more"
        if name.failure is not None and name.failure[0] == wait.number:
            text = f"version {wait.number} of {wait.tenant}{SEPARATOR}{wait.name} failed: {name.failure[1].message}"
        return Refused(wait.session, wait.request, Status(Code.NOT_FOUND, f"{text}; {name.contents()}"))

    def _opened(self, wait: VersionWait, version: Version) -> Opened:
        reader = self._next_reader
        self._next_reader += 1
        self.readers[reader] = (wait.session, version)
        self._readers_of.setdefault(wait.session, set()).add(reader)
        version.readers.add(reader)
        if wait.is_guest:
            self._guests.add(reader)
        return Opened(wait.session, wait.request, reader, version)

    def _answer_waits(self, name: Name) -> list[Action]:
        """Answer the requests for versions of the name that can be answered now."""
        actions: list[Action] = []
        for key in list(self._waits_for.get((name.tenant, name.name), ())):
            if (answer := self._answer(self.waits[key])) is not None:
                self._end_wait(key)
                actions.append(answer)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Answer the requests whose deadlines have passed, and end readers that hold the memory of other tenants."""
        late = [key for key, wait in self.waits.items() if wait.until <= now]
        actions: list[Action] = [self._timed_out(self._end_wait(key)) for key in late]
        for reader in sorted(self._guests):
            version = self.readers[reader][1]
            if version.state is _S.RETIRED and version.retired + GUEST_SECONDS <= now:
                actions += self._end_reader(reader)
        return actions

    def _timed_out(self, wait: VersionWait) -> Refused:
        """Return an error that names what is missing."""
        whose, what, state = self._missing(wait)
        return Refused(
            wait.session, wait.request, Status(Code.DEADLINE_EXCEEDED, f"{whose} does not have {what} yet: {state}")
        )

    def oldest_waits(self) -> Iterator[tuple[VersionWait, str]]:
        """Yield the oldest request of each session that waits, with a text that names what is missing."""
        seen: set[int] = set()
        for wait in self.waits.values():
            if wait.session not in seen:
                seen.add(wait.session)
                whose, what, state = self._missing(wait)
                yield wait, f"{what} of {whose}: {state}"

    def _missing(self, wait: VersionWait) -> tuple[str, str, str]:
        """Return the texts of the name, of what the request waits for, and of what the name has."""
        whose = f"{wait.tenant}{SEPARATOR}{wait.name}"
        what = f"version {wait.number}" if wait.number >= 0 else f"a version newer than {wait.newer_than}"
        if wait.number < 0 and wait.newer_than <= 0:
            what = "a version"
        name = self.names.get((wait.tenant, wait.name))
        state = "nothing was published under this name" if name is None else name.contents()
        version = None if name is None else name.versions.get(wait.number)
        if wait.in_files and version is not None and version.files is not None and version.state is not _S.PENDING:
            what += " in files"
            state = version.files.problem or "its arrays are being written"
        return whose, what, state

    def ask_to_read(self, session: int, reader: int) -> Version | None:
        """Note that the session's reader will read arrays. Return its version, or None if there is no such reader."""
        known = self.readers.get(reader)
        if known is None or known[0] != session or reader in self._closing:
            return None
        self._reading[reader] = self._reading.get(reader, 0) + 1
        return known[1]

    def begin_read(self, reader: int) -> list[Action]:
        """Handle that the reader reads, so that it does not need the version, or never will. It may have ended."""
        if reader not in self._reading:
            return []
        self._reading[reader] -= 1
        if self._reading[reader]:
            return []
        del self._reading[reader]
        return self._end_reader(reader) if reader in self._closing else []

    def close_reader(self, session: int, reader: int) -> list[Action]:
        """Handle that the session's reader has left. It ends when its last read has begun."""
        known = self.readers.get(reader)
        if known is None or known[0] != session:
            return []
        if reader in self._reading:
            self._closing.add(reader)
            return []
        return self._end_reader(reader)

    def _end_reader(self, reader: int) -> list[Action]:
        version = self.readers[reader][1]
        self._forget_reader(reader)
        if version.state is not _S.RETIRED or version.readers:
            return []
        return [*self._free_unread(version), *self._answer_waits(self._name_of(version))]

    def _forget_reader(self, reader: int) -> None:
        session, version = self.readers.pop(reader)
        version.readers.discard(reader)
        self._guests.discard(reader)
        self._reading.pop(reader, None)
        self._closing.discard(reader)
        own = self._readers_of[session]
        own.discard(reader)
        if not own:
            del self._readers_of[session]

    def session_closed(self, session: int) -> list[Action]:
        """Handle the end of a session: its readers leave, and its pending versions fail."""
        for key in [key for key in self.waits if key[0] == session] if session in self._waits_of else ():
            self._end_wait(key)
        actions: list[Action] = []
        for version in list(self.pending_of.get(session, {}).values()):
            text = f"session {session} ended before all arrays of {version.title} were complete"
            actions += self.fail(version, Status(Code.CANCELLED, text))
        for reader in sorted(self._readers_of.get(session, ())):
            actions += self._end_reader(reader)
        return actions

    # ---- reports

    def find(self, key: VersionKey) -> Version | None:
        """Return a version, or None if it has failed or was freed."""
        name = self.names.get(key[:2])
        return None if name is None else name.versions.get(key[2])

    def versions(self) -> Iterator[Version]:
        """Yield all versions that are not failed and not freed."""
        for name in self.names.values():
            yield from name.versions.values()

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. For tests, since it looks at everything."""
        readers = {reader: version for reader, (_, version) in self.readers.items()}
        awaited: dict[tuple[str, str], Version] = {}
        for name in self.names.values():
            kept, older = name.divided()
            assert older == name.awaited(), f"{name.name} keeps {len(kept) + len(older)} versions"
            assert len(older) <= 2
            awaited |= {(each.tenant, each.name): each for each in older if each.is_being_written}
            for number, version in name.versions.items():
                assert version.number == number < name.next_number
                assert version.state not in (_S.FAILED, _S.FREED)
                assert (version.state is _S.PENDING) == (version.key in self.pending)
                assert version.state is not _S.RETIRED or version.readers, f"nothing reads {version.title}"
                assert all(readers.get(reader) is version for reader in version.readers)
        assert awaited == self._awaited
        assert all(reader in version.readers for reader, version in readers.items())
        assert {reader for own in self._readers_of.values() for reader in own} == set(readers)
        assert self._guests <= set(readers)
        assert self._closing <= self._reading.keys() <= set(readers)
        assert sum(self._waits_of.values()) == len(self.waits)
        by_name = {(name, key) for name, keys in self._waits_for.items() for key in keys}
        assert by_name == {((wait.tenant, wait.name), key) for key, wait in self.waits.items()}
        assert self.index.content == {(device, each.key) for each in self.versions() for device in each.devices}
        written = [each for each in self.versions() if each.is_written]
        places = {(device, each.tenant, each.rank) for each in written for device in (ANY_DEVICE, *each.devices)}
        assert self.index.written.content == places
        for counts, size in ((self._arrays_of, _arrays), (self._described_of, _size)):
            found: dict[str, int] = {}
            for version in self.versions():
                found[version.tenant] = found.get(version.tenant, 0) + size(version)
            assert counts == found, f"{counts} are counted, and there are {found}"
        opening = [wait for wait in self.waits.values() if not wait.in_files]
        waited_for = [each for wait in opening if (each := self._wanted(wait)) is not None]
        assert not any(each.is_on_devices for each in waited_for), "requests are answered"
        for wait in self.waits.values():
            key = wait.tenant, wait.name, wait.number
            if wait.in_files and key not in self.pending:  # otherwise it is answered when the version is complete
                assert self._answer(wait) is None, "requests for files are answered"


def _files(version: Version) -> VersionFiles:
    assert version.files is not None
    return version.files


def _unrestored(wait: VersionWait, version: Version) -> Refused | None:
    """Return the error of a version that could not be restored, or None if that has not been tried."""
    failure = _files(version).failure
    return None if failure is None else Refused(wait.session, wait.request, failure.within(version.title))


def _stored(wait: VersionWait, version: Version) -> Stored | Refused | None:
    """Return the answer to a request for the files of a version, or None if it has to wait for them."""
    if version.error is not None:
        return Refused(wait.session, wait.request, version.error.within(version.title))
    if version.files is None:
        text = f'{version.title} has no files: publish it with spill="disk"'
        return Refused(wait.session, wait.request, Status(Code.FAILED_PRECONDITION, text))
    return Stored(wait.session, wait.request, version) if version.has_files else None


def _arrays(version: Version) -> int:
    return len(version.handles)


def _size(version: Version) -> int:
    return version.described
