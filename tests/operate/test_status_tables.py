"""Tests of formatting numbers for people."""

import re

import pytest
from rich.console import Console

from atoll.cluster.sandbox.mechanisms import Mechanisms, Namespaces
from atoll.operate.status_tables import ranges, security_tables, status_tables, tenants_table, versions_table
from atoll.protocol.events import JournalLoad
from atoll.quantities import exact_bytes, human_bytes, parse_bytes
from atoll.telemetry.snapshot import (
    ControllerLoad,
    DeviceSnapshot,
    HostSnapshot,
    IslandSnapshot,
    SessionSnapshot,
    Snapshot,
    TenantSnapshot,
    VersionSnapshot,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 70, "1048576.0 PiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_that_fits(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize("count", [0, 1, 1000, 1024, 1536, (1 << 30) + 1, 8 << 30, 3 << 60])
def test_an_exact_amount_is_read_again_as_the_same(count: int) -> None:
    assert parse_bytes(exact_bytes(count)) == count


def test_an_exact_amount_has_the_largest_unit() -> None:
    assert [exact_bytes(each) for each in (0, 1536, 8 << 30)] == ["0B", "1536B", "8GiB"]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([0, 1, 4, 6, 7], "0-1, 4, 6-7"), ([2, 0, 1], "0-2")],
)
def test_runs_of_numbers_are_drawn_together(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def shown(*versions: VersionSnapshot) -> list[list[str]]:
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        console.print(versions_table(versions))
    _, *lines = capture.get().splitlines()
    rows = [re.split(" {2,}", line.strip()) for line in lines]
    return rows[next(index for index, row in enumerate(rows) if row[0] == "NAME") + 1 :]


def test_a_session_of_another_machine_has_the_name_of_the_machine() -> None:
    console = Console(width=140)
    with console.capture() as capture:
        console.print(status_tables(Snapshot(sessions=(SessionSnapshot(1, pid=7, machine="m1"),)), "unix:/x"))
    assert "7 on m1" in capture.get()


def test_a_missing_mechanism_of_sandboxes_has_the_hosts_that_lack_it() -> None:
    user = {"user": "Atoll does not run as root"}
    sandboxes = [
        Mechanisms(Namespaces.BY_USER, missing=user),
        Mechanisms(Namespaces.BY_USER, missing={**user, "landlock": "the kernel does not have it"}),
        Mechanisms(Namespaces.BY_ROOT, own_user=True),
    ]
    hosts = tuple(HostSnapshot(number, sandbox=each) for number, each in enumerate(sandboxes))
    console = Console(width=140)
    with console.capture() as capture:
        console.print(security_tables(Snapshot(islands=(IslandSnapshot(0, "ready", hosts=hosts),)), "unix:/x"))
    assert capture.get().splitlines()[-2:] == [
        "hosts 0, 1 without a separate user ID: Atoll does not run as root",
        "host 1 without Landlock: the kernel does not have it",
    ]


def test_versions_are_listed_by_name_and_number() -> None:
    lost = VersionSnapshot("ana", "policy", 2, "lost", 3, 4, 2048, 1, (0,), (0, 1), 1, age=7.0, note="island 0 failed")
    kept = VersionSnapshot("ana", "policy", 1, "complete", 3, 4, 1024, 1, (0, 1), (0, 1, 2), 0, 2048, 6144, 12.4)
    assert shown(lost, kept) == [
        ["ana/policy", "1", "4", "1.0 KiB", "complete", "0-1", "0-2", "0", "2.0 KiB", "6.0 KiB", "12"],
        ["ana/policy", "2", "4", "2.0 KiB", "lost: island 0 failed", "0", "0-1", "1", "0 B", "0 B", "7"],
    ]


def test_tenants_have_their_rights_to_published_arrays() -> None:
    console = Console(width=240, highlight=False)
    reader = TenantSnapshot("serving", publish=(), subscribe=("trainer/policy-*", "eve/*"))
    trainer = TenantSnapshot("trainer", publish=("policy-*",), launches=50)
    with console.capture() as capture:
        console.print(tenants_table(Snapshot(tenants=(TenantSnapshot("default"), reader, trainer))))
    default, serving, publisher = capture.get().splitlines()[-3:]
    assert "publishes" not in default
    assert "publishes nothing, reads trainer/policy-*, eve/*" in serving
    assert "publishes policy-*" in publisher


def test_the_journal_and_its_standby_are_named() -> None:
    def text(journal: JournalLoad) -> str:
        console = Console(width=140, highlight=False)
        with console.capture() as capture:
            console.print(status_tables(Snapshot(load=ControllerLoad(journal=journal)), "unix:/a"))
        return capture.get()

    assert "journal complete; no standby follows" in text(JournalLoad(True, 1, 0.0, 0))
    followed = JournalLoad(True, 1, 0.0, 0, "tls://two:7000")
    assert "journal complete; the standby at tls://two:7000 follows" in text(followed)
    held = JournalLoad(True, 1, 0.0, 0, "", "the lease lab in etcd", True)
    assert "no standby follows; the controller holds the lease lab in etcd" in text(held)
    late = JournalLoad(True, 1, 0.0, 0, "", "the lease lab in etcd", False)
    assert "does not hold the lease lab in etcd, so it sends nothing" in text(late)
    assert "journal incomplete: if the controller ends now" in text(JournalLoad(False, 1, 0.0, 0))


def test_a_table_that_is_too_wide_keeps_states_and_numbers_in_full() -> None:
    """Rich shortens them to "rea…" if it may."""
    devices = tuple(DeviceSnapshot(number, kind="cpu", used_bytes=3 << 28) for number in range(4))
    hosts = [HostSnapshot(number, pid=12345, state="ready", devices=devices) for number in range(8)]
    islands = tuple(IslandSnapshot(host.id, "restarting", hosts=(host,), waiting=123) for host in hosts)
    session = SessionSnapshot(
        1, label="train_a_large_model.py", pid=12345, tenant="research", state="suspended on disk"
    )
    snapshot = Snapshot(islands=islands, sessions=(session,), topology="8x1x4")
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        console.print(status_tables(snapshot, "unix:/x", "default"))
    shown = capture.get()
    assert "…" not in shown
    assert "32 cpu devices" in " ".join(shown.split())
    for each in ("restarting", "12345", "768.0", "123", "RESTARTS", "research", "0-3"):
        assert each in shown


def test_the_kind_of_devices_is_a_column_only_if_they_differ() -> None:
    def shown(*kinds: str) -> str:
        hosts = [
            HostSnapshot(number, devices=(DeviceSnapshot(number, kind=kind),)) for number, kind in enumerate(kinds)
        ]
        islands = tuple(IslandSnapshot(host.id, "ready", hosts=(host,)) for host in hosts)
        console = Console(width=140, highlight=False)
        with console.capture() as capture:
            console.print(status_tables(Snapshot(islands=islands), "unix:/x"))
        return capture.get()

    assert "KIND" not in shown("cpu", "cpu")
    assert "2 cpu devices" in shown("cpu", "cpu")
    assert "KIND" in shown("cpu", "NVIDIA H200")
