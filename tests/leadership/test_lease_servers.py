"""Tests of leases in etcd and in Kubernetes: every server stores one record, and rejects writes to outdated
versions.
"""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from atoll.errors import LeaseError
from atoll.leadership.etcd_lease import EtcdLease
from atoll.leadership.kubernetes_lease import KubernetesLease, api_server
from atoll.leadership.lease_address import LeaseAddress, LeaseKind, open_lease, parse_lease
from atoll.leadership.lease_http import LeaseServer, NotConnectedError
from atoll.leadership.lease_record import LeaseRecord, LeaseStore
from atoll.leadership.name_lookup import Found
from tests.leadership.lease_servers import (
    FakeEtcd,
    FakeKubernetes,
    FakeServer,
    decoded,
    real_etcd,
    server_certificates,
    serving_context,
)

RECORD = LeaseRecord("one", 3, "tls://two:7000", 1000.25, 2000.5)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    directory = tmp_path / "serviceaccount"
    directory.mkdir()
    (directory / "token").write_text("a token\n")
    return directory


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    server = FakeKubernetes()
    with server.serving():
        yield server


@pytest.fixture
def etcd() -> Iterator[FakeEtcd]:
    server = FakeEtcd()
    with server.serving():
        yield server


@pytest.fixture(params=["etcd", "kubernetes", "real etcd"])
def store(request: pytest.FixtureRequest, account: Path, tmp_path: Path) -> Iterator[LeaseStore]:
    with contextlib.ExitStack() as stack:
        if request.param == "real etcd":
            address = stack.enter_context(real_etcd(tmp_path))
            yield EtcdLease([LeaseServer(address, "etcd")], "a lease")
            return
        server: FakeServer = FakeEtcd() if request.param == "etcd" else FakeKubernetes()
        stack.enter_context(server.serving())
        reached = LeaseServer(server.address, "it")
        if request.param == "etcd":
            yield EtcdLease([reached], "a lease")
        else:
            yield KubernetesLease(reached, "atoll", "lease", account)


def test_a_record_is_created_read_and_replaced_by_those_who_know_its_version(store):
    assert store.read() is None
    first = store.write(RECORD, "")
    assert first is not None
    assert store.read() == first
    assert first.record == RECORD
    assert store.write(RECORD, "") is None, "it exists"
    released = msgspec.structs.replace(RECORD, holder="", transitions=4)
    second = store.write(released, first.version)
    assert second is not None
    assert second.version != first.version
    assert store.write(RECORD, first.version) is None, "it has changed"
    assert store.read() == second
    assert second.record == released


def test_a_lease_of_kubernetes_has_the_fields_of_client_go_and_keeps_metadata_of_others(kubernetes, account):
    store = KubernetesLease(LeaseServer(kubernetes.address, "it"), "atoll", "lease", account)
    first = store.write(RECORD, "")
    assert kubernetes.leases["lease"]["spec"] == {
        "holderIdentity": "one",
        "leaseDurationSeconds": 15,
        "leaseTransitions": 3,
        "acquireTime": "1970-01-01T00:16:40.250000Z",
        "renewTime": "1970-01-01T00:33:20.500000Z",
    }
    kubernetes.leases["lease"]["metadata"]["labels"] = {"a": "label"}
    store.read()
    store.write(RECORD, first.version)
    metadata = kubernetes.leases["lease"]["metadata"]
    assert metadata["labels"] == {"a": "label"}
    assert metadata["annotations"] == {"atoll/standby": "tls://two:7000"}


def test_a_lease_of_kubernetes_that_was_removed_is_not_replaced(kubernetes, account):
    store = KubernetesLease(LeaseServer(kubernetes.address, "it"), "atoll", "lease", account)
    first = store.write(RECORD, "")
    kubernetes.leases.clear()
    assert store.write(RECORD, first.version) is None
    assert store.read() is None


def test_a_service_account_that_may_not_use_leases_is_told(kubernetes, account):
    store = KubernetesLease(LeaseServer(kubernetes.address, "the API server"), "other", "lease", account)
    with pytest.raises(LeaseError, match="status 403: leases is forbidden"):
        store.read()
    (account / "token").unlink()
    with pytest.raises(LeaseError, match="needs the token of a service account"):
        store.read()


@pytest.mark.parametrize("content", [b"", b"a\ntoken", b"a \x00", "\N{EURO SIGN}".encode(), b"\xff"])
def test_a_file_without_a_token_is_named_and_its_content_is_not(kubernetes, account, content):
    (account / "token").write_bytes(content)
    store = KubernetesLease(LeaseServer(kubernetes.address, "the API server"), "atoll", "lease", account)
    with pytest.raises(LeaseError, match=f"{account / 'token'} has none$"):
        store.read()


def test_a_server_that_sends_its_reply_slowly_has_failed_at_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        reached = LeaseServer(f"127.0.0.1:{server.getsockname()[1]}", "it", timeout=0.2)

        def trickle() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 200 OK\r\nA: ")
                for _ in range(500):
                    connection.sendall(b"a")
                    time.sleep(0.01)

        thread = threading.Thread(target=trickle)
        stack.callback(thread.join)
        thread.start()
        with pytest.raises(LeaseError, match=r"no reply from it at .*: timed out"):
            reached.request("GET", "/")


def test_a_name_that_is_not_resolved_fails_at_the_deadline_and_later_requests_use_its_late_answer(etcd):
    host, port = etcd.address.split(":")
    answers, calls = threading.Event(), 0

    def resolve(name: str, number: int) -> list[Found]:
        nonlocal calls
        calls += 1
        answers.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, number))]

    reached = LeaseServer(f"slow.example:{port}", "etcd", timeout=0.1, resolve=resolve)
    for _ in range(3):
        with pytest.raises(NotConnectedError, match=r"the name slow\.example was not resolved in time"):
            reached.request("POST", "/v3/kv/range", {"key": "a"})
    assert calls == 1, "one thread waits at a time"
    answers.set()
    patient = LeaseServer(f"slow.example:{port}", "etcd", timeout=30.0, resolve=resolve)
    assert patient.request("POST", "/v3/kv/range", {"key": "a"})[0] == 200


def test_a_name_that_nobody_knows_is_told_and_looked_up_again():
    calls = 0

    def resolve(name: str, number: int) -> list[Found]:
        nonlocal calls
        calls += 1
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    reached = LeaseServer("nobody.example:1", "etcd", resolve=resolve)
    for _ in range(2):
        with pytest.raises(NotConnectedError, match="Name or service not known"):
            reached.request("GET", "/")
    assert calls == 2


def test_an_address_that_does_not_accept_connections_leaves_time_for_the_next_one(etcd):
    host, port = etcd.address.split(":")
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        full = stack.enter_context(socket.socket())  # the listener's queue is then full
        full.connect(silent.getsockname())

        def resolve(name: str, number: int) -> list[Found]:
            kind = socket.AF_INET, socket.SOCK_STREAM, 0, ""
            return [(*kind, silent.getsockname()), (*kind, (host, number))]

        reached = LeaseServer(f"two.example:{port}", "etcd", resolve=resolve)
        assert reached.request("POST", "/v3/kv/range", {"key": "a"})[0] == 200


@pytest.mark.parametrize("content", [b'{"a": "\xff"}', b"[" * 5000])
def test_a_reply_that_is_no_json_is_none(content):
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        reached = LeaseServer(f"127.0.0.1:{server.getsockname()[1]}", "it")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + content)

        thread = threading.Thread(target=answer)
        stack.callback(thread.join)
        thread.start()
        assert reached.request("GET", "/") == (200, None)


def test_a_pod_reaches_the_api_server_with_its_own_token_and_authority(account, tmp_path):
    files = server_certificates(tmp_path)
    (account / "ca.crt").write_bytes(files["ATOLL_LEADER_LEASE_AUTHORITY"].read_bytes())
    server = FakeKubernetes(serving_context(files))
    with server.serving():
        host, port = server.address.split(":")
        environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT_HTTPS": port}
        assert KubernetesLease(api_server(environment, account), "atoll", "lease", account).read() is None
    with pytest.raises(LeaseError, match="KUBERNETES_SERVICE_HOST is not set"):
        api_server({}, account)


def test_the_next_server_of_etcd_is_used_when_one_does_not_answer(etcd):
    store = EtcdLease([LeaseServer("127.0.0.1:1", "etcd"), LeaseServer(etcd.address, "etcd")], "a lease")
    assert store.write(RECORD, "") is not None
    ((_, value),) = etcd.values.values()
    assert decoded(value)["holder"] == "one"


def test_a_write_is_not_repeated_at_the_next_server_when_one_may_have_applied_it(etcd, monkeypatch):
    silent = LeaseServer("silent:1", "etcd")

    def applied_without_a_reply(method: str, path: str, body: object) -> None:
        etcd.answer(method, path, body, "")
        raise LeaseError("no reply")

    monkeypatch.setattr(silent, "request", applied_without_a_reply)
    store = EtcdLease([silent, LeaseServer(etcd.address, "etcd")], "a lease")
    with pytest.raises(LeaseError, match="no reply"):
        store.write(RECORD, "")
    found = store.read()
    assert found is not None
    assert found.record == RECORD
    second = store.write(RECORD, found.version)
    assert second is not None, "the other server is used now"


def test_a_server_that_is_not_etcd_is_named(kubernetes):
    with pytest.raises(LeaseError, match=r"etcd at 127.0.0.1:\d+ answers /v3/kv/range with status 401: Unauthorized"):
        EtcdLease([LeaseServer(kubernetes.address, "etcd")], "a lease").read()


@pytest.mark.parametrize("value", ["bm9uZQ==", "\N{EURO SIGN}", base64.b64encode(b'{"holder": "\xff"}').decode()])
def test_a_key_with_another_value_is_not_taken_for_a_lease(etcd, value):
    EtcdLease([LeaseServer(etcd.address, "etcd")], "a lease").write(RECORD, "")
    (key,) = etcd.values
    etcd.values[key] = 1, value
    with pytest.raises(LeaseError, match="contains something else"):
        EtcdLease([LeaseServer(etcd.address, "etcd")], "a lease").read()


def test_etcd_with_tls_gets_the_certificate_of_the_settings(tmp_path):
    files = server_certificates(tmp_path)
    environment = {variable: str(path) for variable, path in files.items()}
    server = FakeEtcd(serving_context(files, ssl.CERT_REQUIRED))
    with server.serving():
        assert open_lease(f"etcds://{server.address}/atoll", environment).write(RECORD, "") is not None
        del environment["ATOLL_LEADER_LEASE_CERTIFICATE"], environment["ATOLL_LEADER_LEASE_KEY"]
        with pytest.raises(LeaseError, match="no reply from etcd"):
            open_lease(f"etcds://{server.address}/atoll", environment).read()
        with pytest.raises(LeaseError, match="no reply from etcd"):
            open_lease(f"etcds://{server.address}/atoll", {}).read()


def test_a_missing_file_for_tls_is_told(tmp_path):
    with pytest.raises(LeaseError, match="cannot read the files of ATOLL_LEADER_LEASE_AUTHORITY"):
        open_lease("etcds://one:2379/atoll", {"ATOLL_LEADER_LEASE_CERTIFICATE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("etcd://one:2379/atoll", LeaseAddress(LeaseKind.ETCD, ("one:2379",), "atoll")),
        ("etcds://one:1,[::1]:2/a/b", LeaseAddress(LeaseKind.ETCD_WITH_TLS, ("one:1", "[::1]:2"), "a/b")),
        ("kubernetes://ml/atoll", LeaseAddress(LeaseKind.KUBERNETES, ("ml",), "atoll")),
    ],
)
def test_the_address_of_a_lease(text, address):
    assert parse_lease(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "one:2379",
        "http://one:2379/atoll",
        "etcd://one/atoll",
        "etcd://one:2379",
        "etcd://one:0/atoll",
        "etcd://one:65536/atoll",
        "kubernetes://Ml/atoll",
    ],
)
def test_an_address_of_another_form_is_refused(text):
    with pytest.raises(LeaseError, match="expected etcd://HOST:PORT/NAME"):
        parse_lease(text)


@pytest.mark.parametrize("scheme", ["etcd://", "http://", ""])
def test_the_error_for_an_address_with_a_password_does_not_contain_it(scheme):
    with pytest.raises(LeaseError, match=r"the lease is '\.\.\.@one:2379/atoll': expected") as raised:
        parse_lease(f"{scheme}root:a/b@c@one:2379/atoll")
    assert "root" not in str(raised.value)
