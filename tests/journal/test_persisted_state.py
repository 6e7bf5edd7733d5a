"""Tests of the files that an ended cluster leaves in its journal's directory: the next one reads them, or refuses with
advice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import TenantSettings
from atoll.errors import IncompatibleJournalError, JournalError, SettingsError
from atoll.journal import files
from atoll.journal.files import JournalDirectory
from atoll.journal.journal import Journal
from atoll.journal.persisted_state import (
    NAME,
    PersistedCluster,
    PersistedState,
    check_persisted,
    encode_persisted,
    has_killed_cluster,
    persisted_in,
)

SETTINGS = ClusterSettings("1x1x2")
PERSISTED = PersistedState(
    PersistedCluster(SETTINGS.topology.shapes, {3: "default"}), b"shell", b"sessions", {3: "a secret"}
)


def ended(path: Path) -> Path:
    """Return a journal's directory, after a controller of term 5 has persisted its state."""
    journal = Journal(JournalDirectory(path), 5, 1, bytes)
    journal.begin()
    journal.end(encode_persisted(PERSISTED))
    return path


def test_it_is_all_that_is_left_and_comes_back(tmp_path):
    directory = ended(tmp_path / "journal")
    assert sorted(each.name for each in directory.iterdir()) == ["lock", NAME]
    assert persisted_in(directory) == (PERSISTED, 5)
    check_persisted(directory, SETTINGS)


def test_only_a_cluster_that_was_killed_while_it_ran_leaves_a_journal_to_continue_from(tmp_path):
    directory = tmp_path / "journal"
    assert not has_killed_cluster(directory)
    journal = Journal(JournalDirectory(directory), 5, 1, bytes)
    journal.begin()
    assert has_killed_cluster(directory)
    (directory / NAME).touch()
    assert not has_killed_cluster(directory), "it was killed while it ended"
    journal.end()
    (directory / NAME).unlink()
    assert not has_killed_cluster(directory)


def test_the_parts_that_the_next_cluster_has_restored_and_removed_are_named():
    versions = (("research", "policy", 4), ("guests", "policy", 7), ("research", "value", 1))
    cluster = PersistedCluster(SETTINGS.topology.shapes, {3: "research", 7: "guests"}, versions)
    restored, removed = cluster.parts({3}, {"research", "default"})
    assert (restored.sessions, restored.versions) == ({3: "research"}, (versions[0], versions[2]))
    assert (removed.sessions, removed.versions) == ({7: "guests"}, (versions[1],))
    assert str(removed) == "the suspended session 7 and 1 version of published arrays (guests/policy)"
    assert str(cluster.parts({3, 7}, {"research", "guests"})[1]) == ""


def test_a_line_of_the_log_names_a_bounded_number_of_arrays():
    cluster = PersistedCluster((), {}, tuple(("red", f"array-{number}", 1) for number in range(9)))
    assert str(cluster).endswith("array-6, red/array-7, ...)")


def test_a_directory_that_has_none_or_is_not_there_is_fine(tmp_path):
    check_persisted(tmp_path / "none", SETTINGS)
    check_persisted(tmp_path, SETTINGS)


def test_a_cluster_that_differs_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="suspended session 3 is persisted"):
        check_persisted(ended(tmp_path / "journal"), ClusterSettings("1x1x4"))


@pytest.mark.parametrize("content", [b"", b"something else", b"ATOLL JOURNAL\n"])
def test_what_cannot_be_read_is_said_with_what_to_do(tmp_path, content):
    directory = ended(tmp_path / "journal")
    whole = (directory / NAME).read_bytes()
    (directory / NAME).write_bytes(content and content + whole[len(content) + 9 :])
    with pytest.raises(JournalError, match="remove it only to discard them"):
        check_persisted(directory, SETTINGS)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    (directory / NAME).write_bytes(flipped)
    with pytest.raises(JournalError, match="is damaged"):
        check_persisted(directory, SETTINGS)


def test_another_key_is_told_from_damage_and_the_error_names_the_file_to_restore(tmp_path, monkeypatch):
    directory = ended(tmp_path / "journal")
    monkeypatch.setenv("ATOLL_KEY_FILE", str(tmp_path / "new key"))
    with pytest.raises(IncompatibleJournalError, match=r"another key than the one in .*/new key: restore that file"):
        check_persisted(directory, SETTINGS)


def test_another_version_is_read_and_another_protocol_is_refused(tmp_path, monkeypatch):
    directory = ended(tmp_path / "journal")
    monkeypatch.setattr(files, "__version__", "9.9")
    check_persisted(directory, SETTINGS)
    monkeypatch.setattr(files, "PROTOCOL", 999)
    with pytest.raises(IncompatibleJournalError, match=r"was written by atoll .* and this is atoll 9\.9.*remove it"):
        check_persisted(directory, SETTINGS)


def cluster(islands: str, *sessions: int) -> PersistedCluster:
    return PersistedCluster(ClusterSettings(islands).topology.shapes, dict.fromkeys(sessions, "default"))


def test_the_same_islands_and_more_will_do():
    cluster("2x1x2", 3).check(ClusterSettings("2x1x2"), "there")
    cluster("2x1x2", 3).check(ClusterSettings("2x1x2+1x1x8"), "there")


@pytest.mark.parametrize(
    ("persisted", "text"),
    [
        (PersistedCluster(SETTINGS.topology.shapes, {3: "students"}), "the suspended session 3 is persisted"),
        (
            PersistedCluster(SETTINGS.topology.shapes, {}, (("students", "policy", 4),)),
            r"1 version of published arrays \(students/policy\) is persisted",
        ),
        (
            PersistedCluster(SETTINGS.topology.shapes, {3: "students", 7: "research"}, (("students", "policy", 4),)),
            r"the suspended session 3 and 1 version of published arrays \(students/policy\) are persisted",
        ),
    ],
)
def test_a_cluster_without_a_tenant_of_what_is_persisted_is_refused(persisted, text):
    mistyped = replace(SETTINGS, tenants=(TenantSettings("research"), TenantSettings("studnets")))
    with pytest.raises(SettingsError, match=text) as caught:
        persisted.check(mistyped, "/journal/suspended")
    assert "in /journal/suspended, and this cluster has no tenant students. Correct the name" in str(caught.value)
    assert "run `atoll tenants remove students`" in str(caught.value)
    persisted.check(replace(SETTINGS, tenants=(TenantSettings("research"), TenantSettings("students"))), "there")


def test_what_the_default_tenant_has_persisted_needs_no_file_of_tenants():
    PersistedCluster(SETTINGS.topology.shapes, {3: "default"}, (("default", "a", 1),)).check(SETTINGS, "there")


def test_others_are_refused_with_what_to_do():
    for islands, text in (("1x1x2", "would not exist"), ("2x1x4", "would have 1 host with 4 cpu devices")):
        with pytest.raises(SettingsError, match=text) as caught:
            cluster("2x1x2", 3, 7).check(ClusterSettings(islands), "/journal/suspended")
        assert "suspended sessions 3, 7 are persisted in /journal/suspended" in str(caught.value)
        assert "Start the same islands to restore them, or remove /journal/suspended" in str(caught.value)
