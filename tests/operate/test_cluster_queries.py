"""Tests of which cluster a command uses. The records are real, but contain the pid of this test's process."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from atoll.cluster.cluster_runs import RunRecord, new_run
from atoll.cluster.moved_controllers import record_controller
from atoll.cluster.processes.process_table import ancestors, began
from atoll.cluster.settings import ClusterSettings
from atoll.controller_process.standby_status import StandbyProgress
from atoll.errors import AccessError, ClusterError, UnreachableError
from atoll.journal.successor import NAME as SUCCESSOR
from atoll.journal.successor import Successor, encode_successor
from atoll.operate.cluster_queries import explained, find, other_clusters
from atoll.operate.cluster_registry import ClusterRecord, ClusterRegistry, embedded_clusters, register_embedded
from atoll.operate.standing import StandingOptions, start_cluster
from atoll.security.join_token import JoinToken, join_file
from atoll.wire.address import parse_address


@pytest.fixture(autouse=True)
def runtime(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_directory))
    monkeypatch.delenv("ATOLL_ADDRESS", raising=False)
    return short_directory


def stays(name: str) -> None:
    registry = ClusterRegistry()
    with registry.locked():
        registry.directory(name).mkdir()
        registry.register(name, f"unix:/{name}", "1x1x1", "cpu", os.getpid())


def embedded(runtime: Path, owner: int) -> None:
    directory = runtime / f"atoll-client-{owner}"
    directory.mkdir()
    started = began(os.getpid())
    assert started is not None
    record = ClusterRecord(
        f"embedded-{owner}", f"unix:/e{owner}", "1x1x1", "cpu", str(directory), os.getpid(), started, owner, "train.py"
    )
    (directory / "cluster.json").write_bytes(msgspec.json.encode(record))


def found(**options: object) -> str:
    return str(find(**options).address)  # type: ignore[arg-type]


def test_only_some_commands_find_a_standby(runtime: Path) -> None:
    stays("spare")
    StandbyProgress(str(ClusterRegistry().directory("spare")), "tls://one:7000")
    with pytest.raises(ClusterError, match=r"spare is a standby, .*`--join FILE` .* its address, tls://one:7000"):
        find(name="spare")
    found = find(name="spare", standby=True)
    assert found.standby is not None
    assert found.standby.controller == "tls://one:7000"


@pytest.mark.parametrize(
    ("address", "how"),
    [
        ("tls://two:7000", "give `--join FILE` with a join token that contains its address, tls://two:7000"),
        ("unix:/two", "give `--address unix:/two`"),
    ],
)
def test_the_end_of_a_cluster_names_the_standby_that_may_have_taken_over(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, how: str
) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path))
    journal = tmp_path / "journal"
    journal.mkdir()
    run = new_run(RunRecord("lab", started=1.0, journal=str(journal)))
    assert run is not None
    run.end("its engine was killed")
    with pytest.raises(ClusterError) as raised:
        find(name="lab")
    assert "its engine was killed" in str(raised.value)
    assert "may have taken over" not in str(raised.value)
    (journal / SUCCESSOR).write_bytes(encode_successor(Successor(address)))
    with pytest.raises(ClusterError) as raised:
        find(name="lab")
    assert f"; the standby at {address} may have taken over: {how}" in str(raised.value)


@pytest.mark.parametrize("standby", [False, True])
def test_of_several_addresses_that_of_a_standby_on_this_machine_is_not_its_cluster(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, standby: bool
) -> None:
    registry = ClusterRegistry()
    with registry.locked():
        registry.directory("spare").mkdir()
        registry.register("spare", "tls://two:7000", "1x1x1", "cpu", os.getpid())
    progress = StandbyProgress(str(registry.directory("spare")), "tls://one:7000")
    text = str(JoinToken(parse_address("tls://one:7000,two:7000"), "f" * 64, "secret"))
    target = find(join=text, standby=standby)
    assert (str(target.address), target.record, target.standby) == ("tls://one:7000,two:7000", None, None)
    with pytest.raises(ClusterError, match="spare is a standby"):
        find("two:7000", join=text)
    monkeypatch.setenv("ATOLL_JOIN", text)
    assert find(standby=standby).record is None
    progress.follows()
    progress.takes_over()
    record = find(standby=standby).record
    assert record is not None
    assert record.name == "spare"


STRANGER = 1 << 22  # larger than any pid


def test_inside_a_script_its_embedded_cluster_goes_before_the_one_that_stays(runtime: Path) -> None:
    stays("default")
    embedded(runtime, STRANGER)
    embedded(runtime, os.getppid())
    assert found() == f"unix:/e{os.getppid()}"
    assert found(embedded=False) == "unix:/default"


def test_elsewhere_an_embedded_cluster_is_found_by_its_name_or_as_the_only_one(runtime: Path) -> None:
    embedded(runtime, STRANGER)
    assert found() == f"unix:/e{STRANGER}"
    stays("mine")
    assert found() == "unix:/mine"
    assert found(name=f"embedded-{STRANGER}") == f"unix:/e{STRANGER}"
    assert [each.title for each in other_clusters(find())] == [f"embedded-{STRANGER} (train.py)"]


def test_an_embedded_cluster_is_not_ended_unless_it_is_named(runtime: Path) -> None:
    embedded(runtime, STRANGER)
    with pytest.raises(ClusterError, match=r"no cluster is up .*, set ATOLL_JOIN to a copy of the file"):
        find(embedded=False)
    assert found(name=f"embedded-{STRANGER}", embedded=False) == f"unix:/e{STRANGER}"


def test_an_unknown_name_is_answered_with_the_clusters_that_are_up(runtime: Path) -> None:
    stays("mine")
    embedded(runtime, STRANGER)
    with pytest.raises(ClusterError, match=rf"no cluster your is up \(tried .*; up: mine, embedded-{STRANGER}\)"):
        find(name="your")


def test_among_several_embedded_clusters_one_has_to_be_chosen(runtime: Path) -> None:
    embedded(runtime, STRANGER)
    embedded(runtime, STRANGER + 1)
    with pytest.raises(ClusterError, match=rf"--name \(embedded-{STRANGER} \(train.py\), embedded-"):
        find()


def test_the_environments_address_goes_before_the_embedded_cluster(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded(runtime, os.getpid())
    monkeypatch.setenv("ATOLL_ADDRESS", "unix:/other")
    assert found() == "unix:/other"


def test_a_cluster_is_recorded_for_as_long_as_its_engine_runs(runtime: Path) -> None:
    directory = runtime / "atoll-proxy-1"
    directory.mkdir()
    register_embedded(directory, "unix:/p", "1x1x1", "cpu", STRANGER, "atoll proxy")
    assert embedded_clusters() == []
    register_embedded(directory, "unix:/p", "1x1x1", "cpu", os.getpid(), "atoll proxy")
    assert [(each.title, each.owner) for each in embedded_clusters()] == [
        (f"embedded-{os.getpid()} (atoll proxy)", os.getpid())
    ]


def test_ancestors_begin_with_the_process_and_its_parent() -> None:
    assert list(ancestors(os.getpid()))[:2] == [os.getpid(), os.getppid()]


def hint(**options: object) -> str:
    """Return the error of a command if no controller listens at the cluster's address."""
    with pytest.raises(UnreachableError) as caught, explained(find(**options)):  # type: ignore[arg-type]
        raise UnreachableError("nothing listens")
    return str(caught.value)


def test_the_error_that_no_controller_listens_depends_on_what_is_known_of_the_cluster() -> None:
    stays("lab")
    assert "start one with `atoll up" in hint(address="unix:/other")
    assert "the engine of cluster lab runs, so its controller is starting or restarting" in hint(name="lab")
    record_controller(str(ClusterRegistry().directory("lab")), "tls://two:7000")
    assert "cluster lab continues at tls://two:7000: use `--address tls://two:7000`" in hint(name="lab")


def test_the_user_of_the_engine_reaches_a_controller_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = ClusterRegistry()
    with registry.locked():
        registry.directory("lab").mkdir()
        registry.register("lab", "tls://one:7000", "1x1x1", "cpu", os.getpid())
    JoinToken(parse_address("tls://one:7000"), "ab" * 32, "secret").save(join_file(registry.directory("lab")))
    with pytest.raises(AccessError):
        find(address="two:7000")
    record_controller(str(registry.directory("lab")), "tls://two:7000")
    target = find(address="two:7000")
    assert target.join is not None
    assert (str(target.address), target.join.token) == ("tls://two:7000", "secret")


def test_a_name_that_an_engine_uses_whose_controller_has_moved_is_refused_with_the_address() -> None:
    stays("lab")
    record_controller(str(ClusterRegistry().directory("lab")), "tls://two:7000")
    with pytest.raises(ClusterError, match=r"continues at tls://two:7000: give the new one another --name"):
        start_cluster(StandingOptions(name="lab", settings=ClusterSettings("1x1x1"), listen="", token="", stays=True))
