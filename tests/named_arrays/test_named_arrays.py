"""Tests of named arrays as a state machine."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.errors import Code, Status, StatusError
from atoll.named_arrays import named_arrays
from atoll.named_arrays.named_arrays import Action, Free, NamedArrays, Opened, Refused, Stored, VersionWait
from atoll.named_arrays.version_files import FileState
from atoll.named_arrays.version_records import Version
from atoll.named_arrays.version_states import TRANSITIONS, VersionState
from atoll.named_arrays.written_versions import ANY_DEVICE
from tests.thoroughness import examples

LOST = Status(Code.DATA_LOSS, "island 1 failed")


def publish(names: NamedArrays, keep: int = 2, session: int = 1, name: str = "policy", tenant: str = "ana") -> Version:
    return names.publish(0.0, tenant, name, session, keep=keep, handles=(1, 2), paths=("w", "b"))


def complete(names: NamedArrays, keep: int = 2, session: int = 1, name: str = "policy") -> Version:
    version = publish(names, keep, session, name)
    version.held = [1, 2]
    names.complete(0.0, version)
    return version


def wait(
    number: int = -1,
    newer_than: int = 0,
    until: float = 0.0,
    session: int = 2,
    request: int = 1,
    is_guest: bool = False,
    in_files: bool = False,
) -> VersionWait:
    return VersionWait(session, request, "ana", "policy", number, newer_than, until, is_guest, in_files)


def opened(names: NamedArrays, asked: VersionWait) -> Opened:
    (answer,) = names.open(0.0, asked)
    assert isinstance(answer, Opened)
    return answer


def refused(names: NamedArrays, asked: VersionWait) -> str:
    (answer,) = names.open(0.0, asked)
    assert isinstance(answer, Refused)
    return answer.status.message


def test_versions_are_numbered_in_the_order_of_their_publication() -> None:
    names = NamedArrays()
    assert [publish(names).number for _ in range(3)] == [1, 2, 3]
    assert publish(names, name="other").number == 1


def test_a_version_is_given_to_readers_when_it_is_complete() -> None:
    names = NamedArrays()
    version = publish(names)
    assert names.open(0.0, wait(until=9.0)) == []
    version.held = [1, 2]
    (answer,) = names.complete(1.0, version)
    assert isinstance(answer, Opened)
    assert (answer.session, answer.request, answer.version) == (2, 1, version)


def test_the_newest_complete_version_is_read_while_a_newer_one_is_pending() -> None:
    names = NamedArrays()
    first = complete(names)
    publish(names)
    assert opened(names, wait()).version is first


def test_a_version_beyond_the_kept_ones_is_freed_when_its_last_reader_leaves() -> None:
    names = NamedArrays()
    first = complete(names, keep=1)
    one, other = opened(names, wait()), opened(names, wait(request=2))
    complete(names, keep=1)
    assert first.state is VersionState.RETIRED
    assert names.close_reader(2, one.reader) == []
    assert names.close_reader(2, other.reader) == [Free(first)]
    assert first.state is VersionState.FREED


def test_readers_of_other_sessions_cannot_be_closed() -> None:
    names = NamedArrays()
    first = complete(names, keep=1)
    reader = opened(names, wait()).reader
    complete(names, keep=1)
    assert names.close_reader(3, reader) == []
    assert first.readers == {reader}


def test_an_older_version_that_completes_late_is_freed_at_once_if_it_is_not_kept() -> None:
    names = NamedArrays()
    late = publish(names, keep=1)
    complete(names, keep=1)
    assert names.complete(0.0, late) == [Free(late)]


def test_the_end_of_a_session_fails_what_it_has_not_completed_and_nothing_else() -> None:
    names = NamedArrays()
    kept, pending, others = complete(names, session=1), publish(names, session=1), publish(names, session=3)
    assert names.session_closed(1) == [Free(pending)]
    assert [kept.state, pending.state, others.state] == [
        VersionState.COMPLETE,
        VersionState.FAILED,
        VersionState.PENDING,
    ]


def test_the_error_of_a_request_names_what_is_missing() -> None:
    names = NamedArrays()
    assert refused(names, wait()) == "ana/policy does not have a version yet: nothing was published under this name"
    version = publish(names, session=7)
    version.held = [1]
    text = "version 1 has 1 of 2 arrays complete, and session 7 computes it"
    assert refused(names, wait()) == f"ana/policy does not have a version yet: no version exists; {text}"
    names.fail(version, Status(Code.INTERNAL, "division by zero"))
    assert refused(names, wait(number=1)).startswith("version 1 of ana/policy failed: division by zero")
    complete(names)
    assert refused(names, wait(newer_than=2)) == "ana/policy does not have a version newer than 2 yet: version 2 exists"
    assert refused(names, wait(number=5)) == "ana/policy does not have version 5 yet: version 2 exists"


def test_a_freed_version_is_named_with_those_that_exist() -> None:
    names = NamedArrays()
    for _ in range(3):
        complete(names)
    text = refused(names, wait(number=1))
    assert text == "version 1 of ana/policy does not exist any more; versions 2, 3 exist"


def test_a_request_ends_at_its_deadline() -> None:
    names = NamedArrays()
    assert names.open(0.0, wait(until=5.0)) == []
    assert names.tick(4.0) == []
    (answer,) = names.tick(5.0)
    assert isinstance(answer, Refused)
    assert names.waits == {}


def test_a_lost_version_fails_requests_for_it_and_newer_ones_replace_it() -> None:
    names = NamedArrays()
    version = complete(names)
    assert names.lose(version, LOST) == []
    assert "island 1 failed" in refused(names, wait(number=1))
    assert "version 1 is lost: island 1 failed" in refused(names, wait())
    following = publish(names)
    following.held = [1, 2]
    assert names.complete(0.0, following) == [Free(version)]


def test_a_removed_version_lives_while_it_is_read() -> None:
    names = NamedArrays()
    version = complete(names)
    reader = opened(names, wait()).reader
    assert names.remove(0.0, "ana", "policy") == []
    assert "no version exists" in refused(names, wait())
    assert names.close_reader(2, reader) == [Free(version)]
    with pytest.raises(StatusError, match="ana/policy does not exist"):
        names.remove(0.0, "ana", "policy")


def test_versions_of_a_name_are_never_numbered_twice() -> None:
    names = NamedArrays()
    complete(names)
    names.remove(0.0, "ana", "policy")
    assert complete(names).number == 2


def test_a_tenant_has_a_limited_number_of_names() -> None:
    names = NamedArrays()
    for number in range(named_arrays.MAX_NAMES):
        complete(names, name=f"name {number}")
    with pytest.raises(StatusError, match="tenant ana has 1024 names"):
        publish(names, name="c")
    assert publish(names, name="c", tenant="ben").number == 1
    names.remove(0.0, "ana", "name 0")
    assert publish(names, name="c").number == 2  # replaces the name that has no versions


def test_a_name_that_was_forgotten_does_not_number_versions_again() -> None:
    names = NamedArrays()
    for _ in range(3):
        complete(names, keep=1)
    names.remove(0.0, "ana", "policy")
    for number in range(named_arrays.MAX_NAMES):
        complete(names, name=f"name {number}")
    assert ("ana", "policy") not in names.names
    names.remove(0.0, "ana", "name 0")
    assert publish(names).number == 4
    names.tenant_removed("ana")
    assert publish(names).number == 5


def test_a_reader_of_another_tenant_leaves_a_replaced_version_after_a_while() -> None:
    names = NamedArrays()
    first = complete(names, keep=1)
    guest = opened(names, wait(is_guest=True)).reader
    assert names.tick(1e6) == [], "the newest version may be read for any time"
    names.remove(1e6, "ana", "policy")
    assert names.tick(1e6 + named_arrays.GUEST_SECONDS - 1) == []
    assert names.tick(1e6 + named_arrays.GUEST_SECONDS) == [Free(first)]
    assert names.close_reader(2, guest) == []
    names.validate()


def test_a_reader_of_the_publishing_tenant_keeps_a_replaced_version() -> None:
    names = NamedArrays()
    first = complete(names, keep=1)
    own, guest = opened(names, wait()), opened(names, wait(request=2, is_guest=True))
    complete(names, keep=1)
    assert names.tick(1e9) == []
    assert first.readers == {own.reader}
    assert guest.reader not in names.readers
    assert names.close_reader(2, own.reader) == [Free(first)]


def test_a_session_has_a_limited_number_of_pending_versions() -> None:
    names = NamedArrays()
    for _ in range(named_arrays.MAX_PENDING):
        publish(names)
    with pytest.raises(StatusError, match="versions of session 1 are not complete"):
        publish(names)
    publish(names, session=2)


def test_a_tenant_has_a_limited_number_of_arrays_in_all_versions() -> None:
    names = NamedArrays()
    half = tuple(range(named_arrays.MAX_ARRAYS // 2))
    paths = ("",) * len(half)
    first = names.publish(0.0, "ana", "a", 1, keep=1, handles=half, paths=paths)
    names.publish(0.0, "ana", "b", 1, keep=1, handles=half, paths=paths)
    with pytest.raises(StatusError, match="the versions of tenant ana have 262144 arrays"):
        publish(names, name="c")
    publish(names, tenant="ben")
    names.fail(first, LOST)
    publish(names, name="c")
    names.validate()


def test_the_controller_keeps_limited_text_about_the_trees_of_a_tenant() -> None:
    names = NamedArrays()
    structure = bytes(named_arrays.MAX_DESCRIBED - 2)
    large = names.publish(0.0, "ana", "a", 1, keep=1, handles=(1, 2), paths=("w", "b"), structure=structure)
    with pytest.raises(StatusError, match="paths and tree structures of the versions of tenant ana exceed 32 MiB"):
        publish(names)
    assert names.names.keys() == {("ana", "a")}, "a refused publication leaves no name"
    publish(names, tenant="ben")
    large.held = [1, 2]
    names.complete(0.0, large)
    names.remove(0.0, "ana", "a")
    publish(names)
    names.validate()


def test_the_removal_of_a_tenant_ends_its_limits() -> None:
    names = NamedArrays()
    complete(names)
    names.tenant_removed("ana")
    names.validate()


def test_each_state_is_reached_and_has_its_row() -> None:
    assert set(TRANSITIONS) == set(VersionState)
    reached = {VersionState.PENDING}.union(*TRANSITIONS.values())
    assert reached == set(VersionState)


def publish_on_disk(names: NamedArrays, keep: int = 2) -> Version:
    version = names.publish(0.0, "ana", "policy", 1, keep=keep, handles=(1, 2), paths=("w", "b"), on_disk=True)
    version.held = [1, 2]
    return version


def test_a_request_for_files_is_answered_when_the_version_is_in_files() -> None:
    names = NamedArrays()
    version = publish_on_disk(names)
    asked = wait(1, until=5.0, in_files=True)
    assert names.open(0.0, asked) == names.complete(0.0, version) == []
    stored = Stored(asked.session, asked.request, version)
    assert names.written(0.0, version) == [stored]
    assert names.open(0.0, asked) == [stored]
    assert names.readers == {}, "it has no reader"


def test_a_request_for_files_does_not_restore_the_version() -> None:
    names = NamedArrays()
    version = publish_on_disk(names)
    names.complete(0.0, version)
    names.written(0.0, version)
    names.store(version)
    asked = wait(1, in_files=True)
    assert names.open(0.0, asked) == [Stored(asked.session, asked.request, version)]


def test_a_request_for_files_of_a_version_without_files_is_refused() -> None:
    names = NamedArrays()
    complete(names)
    text = 'version 1 of ana/policy has no files: publish it with spill="disk"'
    assert refused(names, wait(1, until=5.0, in_files=True)) == text


def test_a_request_for_files_ends_with_the_version() -> None:
    names = NamedArrays()
    version = publish_on_disk(names)
    names.complete(0.0, version)
    names.open(0.0, wait(1, until=5.0, in_files=True))
    (answer,) = names.lose(version, LOST)
    assert isinstance(answer, Refused)
    assert "island 1 failed" in answer.status.message


def _retired(names: NamedArrays) -> tuple[Version, Opened]:
    """Return a version that is being written, that a session reads, and whose files another request awaits."""
    version = publish_on_disk(names, keep=1)
    names.complete(0.0, version)
    reader = opened(names, wait())
    assert names.open(0.0, wait(1, until=5.0, session=3, in_files=True)) == []
    complete(names, keep=1)
    assert version.state is VersionState.RETIRED
    names.validate()
    return version, reader


def _refusal(actions: list[Action]) -> str:
    (answer,) = [each for each in actions if isinstance(each, Refused)]
    assert (answer.session, answer.request) == (3, 1)
    return answer.status.message


def test_a_request_for_files_ends_if_the_version_is_freed_when_its_last_reader_leaves() -> None:
    names = NamedArrays()
    version, reader = _retired(names)
    actions = names.close_reader(2, reader.reader)
    assert actions[0] == Free(version)
    assert "version 1 of ana/policy does not exist any more" in _refusal(actions)
    names.validate()


def test_a_request_for_files_ends_if_a_replaced_version_is_lost() -> None:
    names = NamedArrays()
    version, _ = _retired(names)
    assert "island 1 failed" in _refusal(names.lose(version, LOST))
    names.validate()


def test_a_request_for_files_ends_if_the_version_makes_space() -> None:
    names = NamedArrays()
    versions = [publish_on_disk(names, keep=1) for _ in range(2)]
    names.complete(0.0, versions[0])
    assert names.open(0.0, wait(1, until=5.0, session=3, in_files=True)) == []
    names.complete(0.0, versions[1])
    assert "does not exist any more" in _refusal(names.make_space(0.0, [versions[0]]))
    names.validate()


def test_a_session_with_the_most_readers_can_wait_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_arrays, "MAX_READERS", 1)
    names = NamedArrays()
    names.complete(0.0, publish_on_disk(names))
    opened(names, wait())
    assert names.open(0.0, wait(1, until=5.0, request=2, in_files=True)) == []
    assert "has 1 versions of arrays open" in refused(names, wait(request=3))


def test_a_request_for_files_times_out_with_the_reason() -> None:
    names = NamedArrays()
    version = publish_on_disk(names)
    asked = wait(1, in_files=True)
    names.complete(0.0, version)
    missing = "ana/policy does not have version 1 in files yet: "
    assert refused(names, asked) == missing + "its arrays are being written"
    assert version.files is not None
    version.files.problem = "No space left on device"
    assert refused(names, asked) == missing + "No space left on device"


def _exist(names: NamedArrays) -> list[int]:
    return sorted(version.number for version in names.versions())


def test_the_version_in_files_stays_until_a_newer_one_is_in_files() -> None:
    names = NamedArrays()
    versions = [publish_on_disk(names, keep=1) for _ in range(2)]
    names.complete(0.0, versions[0])
    names.written(0.0, versions[0])
    assert names.complete(0.0, versions[1]) == []
    assert opened(names, wait()).version is versions[1], "readers get the newest one"
    assert names.written(0.0, versions[1]) == [Free(versions[0])]
    assert _exist(names) == [2]
    names.validate()


def test_a_version_that_is_being_written_stays_until_then_if_scripts_publish_faster() -> None:
    names = NamedArrays()
    written = []
    for _ in range(12):
        version = publish_on_disk(names, keep=1)
        names.complete(0.0, version)
        if version.number % 3 == 0:  # the hosts write more slowly than the script publishes
            first = next(each for each in names.versions() if each.files and each.files.state is FileState.WRITING)
            names.written(0.0, first)
            written.append(first.number)
        names.validate()
        assert len(_exist(names)) <= 3
    assert written == [1, 3, 6, 9]


def test_versions_without_files_replace_all_others() -> None:
    names = NamedArrays()
    version = publish_on_disk(names, keep=1)
    names.complete(0.0, version)
    names.written(0.0, version)
    complete(names, keep=1)
    assert _exist(names) == [2]


def test_a_version_that_stays_only_until_it_is_written_is_the_newest_if_the_newest_is_lost() -> None:
    names = NamedArrays()
    versions = [publish_on_disk(names, keep=1) for _ in range(2)]
    for version in versions:
        names.complete(0.0, version)
    assert names.awaited_on(ANY_DEVICE) == [versions[0]]
    names.lose(versions[1], LOST)
    assert names.awaited_on(ANY_DEVICE) == []
    names.validate()


def test_space_is_made_of_versions_that_the_name_does_not_keep() -> None:
    names = NamedArrays()
    versions = [publish_on_disk(names, keep=1) for _ in range(2)]
    names.complete(0.0, versions[0])
    names.written(0.0, versions[0])
    names.complete(0.0, versions[1])
    assert names.replaceable(versions[0]) == []
    assert names.replaceable(versions[1]) == [versions[0]]
    assert names.make_space(0.0, [versions[0]]) == [Free(versions[0])]
    names.validate()


def test_versions_make_space_if_nothing_reads_them_and_those_without_files_first() -> None:
    names = NamedArrays()
    versions = [publish_on_disk(names, keep=1) for _ in range(3)]
    names.complete(0.0, versions[0])
    names.written(0.0, versions[0])
    first = opened(names, wait())
    names.complete(0.0, versions[1])
    names.complete(0.0, versions[2])
    assert names.replaceable(versions[2]) == [versions[1]]
    names.close_reader(2, first.reader)
    assert names.replaceable(versions[2]) == [versions[1], versions[0]]


class Player:
    """Makes random events, with a model of what can be read: each opened version exists until its reader leaves."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.names = NamedArrays()
        self.now = 0.0
        self.requests = 0
        self.readers: dict[int, tuple[int, Version]] = {}
        self.freed: set[tuple[str, str, int]] = set()
        self.answered: set[int] = set()
        self.asked_as_guest: dict[int, bool] = {}  # by request
        self.guests: set[int] = set()  # readers

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Free):
                version = action.version
                key = (version.tenant, version.name, version.number)
                assert key not in self.freed, "a version is freed once"
                for reader, (_, read) in list(self.readers.items()):
                    if read is version:
                        assert reader in self.guests, "a version that is read is not freed"
                        assert self.now >= version.retired + named_arrays.GUEST_SECONDS
                        del self.readers[reader]
                self.freed.add(key)
                continue
            assert action.request not in self.answered, "a request is answered once"
            self.answered.add(action.request)
            if isinstance(action, Stored):
                assert action.version.files is not None
                assert action.version.files.state is not FileState.WRITING
            if isinstance(action, Opened):
                assert action.version.state is VersionState.COMPLETE, "only complete versions are read"
                assert len(action.version.held) == len(action.version.handles)
                self.readers[action.reader] = (action.session, action.version)
                if self.asked_as_guest[action.request]:
                    self.guests.add(action.reader)

    def act(self) -> None:
        rng, names = self.rng, self.names
        session, tenant, name = rng.randint(1, 3), rng.choice(("ana", "ben")), rng.choice("ab")
        versions = list(names.versions())
        pending = list(names.pending.values())
        match rng.randrange(10):
            case 0 | 1:
                keep, on_disk = rng.randint(1, 3), rng.random() < 0.5
                with suppress(StatusError):  # too many are pending
                    names.publish(
                        self.now, tenant, name, session, keep=keep, handles=(1, 2), paths=("w", "b"), on_disk=on_disk
                    )
            case 9 if versions:
                version = rng.choice(versions)
                is_there = version.state in (VersionState.COMPLETE, VersionState.RETIRED) and version.error is None
                if is_there and version.files is not None and version.files.state is FileState.WRITING:
                    self.perform(names.written(self.now, version))
            case 2 | 3 if pending:
                version = rng.choice(pending)
                version.held.append(len(version.held))
                if len(version.held) == len(version.handles):
                    self.perform(names.complete(self.now, version))
            case 4:
                self.requests += 1
                number, newer = rng.choice((-1, -1, rng.randint(1, 5))), rng.randint(0, 4)
                until = self.now + rng.choice((0, 3))
                is_guest = self.asked_as_guest[self.requests] = rng.random() < 0.5
                in_files = number > 0 and rng.random() < 0.5
                asked = VersionWait(session, self.requests, tenant, name, number, newer, until, is_guest, in_files)
                self.perform(names.open(self.now, asked))
            case 5 if self.readers:
                reader = rng.choice(sorted(self.readers))
                owner, _ = self.readers.pop(reader)
                self.perform(names.close_reader(owner, reader))
            case 6 if versions and rng.random() < 0.4:
                self.perform(names.lose(rng.choice(versions), LOST))
            case 7 if versions and rng.random() < 0.4:
                version = rng.choice(versions)
                self.perform(names.remove(self.now, version.tenant, version.name, rng.choice((-1, version.number))))
            case 8:
                if rng.random() < 0.3:
                    self.readers = {key: each for key, each in self.readers.items() if each[0] != session}
                    self.perform(names.session_closed(session))
                self.now += rng.choice((1, 1, named_arrays.GUEST_SECONDS))
                self.perform(names.tick(self.now))


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32), st.integers(1, 150))
def test_any_sequence_of_events_reads_whole_versions_and_frees_each_once(seed: int, steps: int) -> None:
    player = Player(seed)
    for _ in range(steps):
        player.act()
        player.names.validate()
    player.readers.clear()
    for session in (1, 2, 3):
        player.perform(player.names.session_closed(session))
    for tenant, name in list(player.names.names):
        if player.names.names[tenant, name].versions:
            player.perform(player.names.remove(player.now, tenant, name))
    player.names.validate()
    assert list(player.names.versions()) == []
    assert player.names.waits == {}
    assert player.names.readers == {}
