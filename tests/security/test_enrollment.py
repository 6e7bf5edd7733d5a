"""Tests of joining a cluster: which peers get a certificate of which role, and the errors of all others."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from atoll.errors import AccessError, ConnectError
from atoll.security import access, enrollment
from atoll.security.certificate_authority import CertificateAuthority, make_key, signing_request, with_fingerprint
from atoll.security.enrollment import (
    AskAuthority,
    AuthorityIs,
    CertificateIssuer,
    Enroll,
    Enrolled,
    NotEnrolled,
    Renewal,
    enroll,
)
from atoll.security.join_token import JoinToken
from atoll.security.roles import Role, is_of_the_cluster, may_claim
from atoll.security.tokens import TOO_MANY, digest
from atoll.wire.address import Address
from atoll.wire.byte_stream import dial_stream
from atoll.wire.connection import Connection
from atoll.wire.endpoints import connect, listen
from atoll.wire.tls.identity import RENEWAL_SECONDS, Certificate, Identity
from tests.certificates import clock_ahead_by, identity
from tests.cluster_process import free_port

TOKENS = {Role.CLIENT: "a client's token", Role.HOST: "a host's token"}
DIGESTS = {role: digest(token) for role, token in TOKENS.items()}
AUTHORITY = CertificateAuthority.make("a test's")


class Controller:
    """A controller's port that only supports joining, with a thread for its event loop.

    Without an issuer, it behaves like the port of a standby.
    """

    def __init__(self, own: Identity, issuer: CertificateIssuer | None) -> None:
        self._own, self._issuer = own, issuer
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, self.address = self._run(listen(Address(host="127.0.0.1", tls=True), self._accept, own))

    def _run(self, coroutine):  # type: ignore[no-untyped-def]
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def _accept(self) -> Connection:
        def answer(message: Any) -> None:
            if self._issuer is None:
                connection.abort()
            else:
                connection.send(self._issuer.answer(message))

        connection = Connection(enrollment.FromJoiner, answer, lambda reason: None)
        return connection

    def join(self, role: Role) -> JoinToken:
        return JoinToken(self.address, AUTHORITY.fingerprint, TOKENS[role])

    def close(self) -> None:
        async def close() -> None:
            self._server.close()
            await asyncio.sleep(0.05)

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Impostor(CertificateIssuer):
    """Sends `authority` as the CA's certificate, and records all requests."""

    def __init__(self, signs: CertificateAuthority, authority: Any) -> None:
        super().__init__(signs, DIGESTS)
        self._claims = authority
        self.asked: list[object] = []

    def answer(self, message: Any) -> Any:
        self.asked.append(message)
        return self._claims if isinstance(message, AskAuthority) else super().answer(message)


@contextlib.contextmanager
def controller(own: Identity | None = None, authority: CertificateAuthority = AUTHORITY) -> Iterator[Controller]:
    made = Controller(own or identity(Role.CONTROLLER, authority), CertificateIssuer(authority, DIGESTS))
    with contextlib.closing(made):
        yield made


@contextlib.contextmanager
def standby() -> Iterator[Controller]:
    made = Controller(identity(Role.CONTROLLER, AUTHORITY), None)
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize("role", [Role.HOST, Role.CLIENT])
def test_who_has_a_roles_join_string_gets_a_certificate_of_that_role(role: Role) -> None:
    with controller() as served:
        certificate = enroll(served.join(role), role, "gpu-17, and naïve\n")
    assert certificate.role == role
    assert certificate.authority == AUTHORITY.pem
    assert certificate.begins < time.time() - 60
    assert 3600 < certificate.ends - time.time() <= 24 * 3600
    Identity(certificate)  # it goes with its key
    assert "PRIVATE" not in repr(certificate)


def test_a_clients_join_string_is_not_a_hosts_nor_the_other_way_round() -> None:
    with controller() as served:
        with pytest.raises(AccessError, match=r"is for a client, not for a host: .*--host-join-file"):
            enroll(served.join(Role.CLIENT), Role.HOST, "an impostor")
        with pytest.raises(AccessError, match="is for a host, not for a client"):
            enroll(served.join(Role.HOST), Role.CLIENT, "a confused one")


@pytest.mark.parametrize("role", [Role.ENGINE, Role.CONTROLLER])
def test_nobody_joins_as_what_a_cluster_has_once(role: Role) -> None:
    with controller() as served:
        for join in (served.join(Role.CLIENT), served.join(Role.HOST)):
            with pytest.raises(AccessError, match=f"cannot join as '{role}'"):
                enroll(join, role, "an impostor")


def test_who_joins_while_the_controller_is_killed_waits_for_the_next_one() -> None:
    with controller() as served, socket.create_server(("127.0.0.1", 0)) as killed:

        def cut_off_and_end() -> None:
            killed.accept()[0].close()
            killed.close()

        ends = threading.Thread(target=cut_off_and_end, daemon=True)
        ends.start()
        where = Address(host="127.0.0.1", port=killed.getsockname()[1], tls=True, others=(served.address,))
        certificate = access.joined(replace(served.join(Role.HOST), address=where), Role.HOST, "x", 10.0).certificate
        ends.join()
    assert certificate.role == Role.HOST


def test_a_wrong_token_is_refused_and_not_repeated() -> None:
    with controller() as served, pytest.raises(AccessError, match="its token is not the cluster's") as caught:
        enroll(replace(served.join(Role.CLIENT), token="guessed"), Role.CLIENT, "x")
    assert "guessed" not in str(caught.value)


def test_another_authority_is_found_by_its_fingerprint_before_the_token_is_sent() -> None:
    other = CertificateAuthority.make("somebody else's")
    issuer = Impostor(other, AuthorityIs(other.pem, time.time()))
    made = Controller(identity(Role.CONTROLLER, other), issuer)
    with (
        contextlib.closing(made),
        pytest.raises(AccessError, match=r"is not that of the join token.*was restarted.*another server answers"),
    ):
        enroll(made.join(Role.CLIENT), Role.CLIENT, "x")
    assert [type(each) for each in issuer.asked] == [AskAuthority]


def test_an_authority_that_follows_the_right_one_is_not_trusted() -> None:
    """The fingerprint belongs to one certificate, but OpenSSL trusts all certificates that it reads."""
    other = CertificateAuthority.make("somebody else's")
    for pem in (AUTHORITY.pem + other.pem, other.pem + AUTHORITY.pem, b"a comment\n" + AUTHORITY.pem + other.pem):
        issuer = Impostor(other, AuthorityIs(pem, time.time()))
        made = Controller(identity(Role.CONTROLLER, other), issuer)
        with (
            contextlib.closing(made),
            pytest.raises(AccessError, match="of the cluster's CA: 2 certificates, expected one"),
        ):
            enroll(made.join(Role.CLIENT), Role.CLIENT, "x")
        assert [type(each) for each in issuer.asked] == [AskAuthority]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Enrolled(b"unasked"), "type Enrolled"),
        (NotEnrolled("a text of anybody"), "type NotEnrolled"),
        (AskAuthority(), "Invalid value"),
        (msgspec.Raw(b"\x92\xa7refused\xa1\xff"), "(utf|UTF)-8"),
        (msgspec.Raw(b"\x93\xa7refused\xa1x" + b"\x91" * 20_000), "depth"),
        (msgspec.Raw(b"\xc0" * 65537), "over the limit"),
    ],
    ids=["another type", "a refusal", "a question", "not UTF-8", "nested", "long"],
)
def test_an_invalid_answer_of_any_server_is_an_error_of_the_connection(answer: Any, words: str) -> None:
    made = Controller(identity(Role.CONTROLLER, AUTHORITY), Impostor(AUTHORITY, answer))
    with (
        contextlib.closing(made),
        pytest.raises(ConnectError, match=rf"{made.address.port} sent an invalid answer: .*{words}") as caught,
    ):
        enroll(made.join(Role.CLIENT), Role.CLIENT, "x")
    assert not isinstance(caught.value, AccessError), "it may be another server"


def test_a_controller_that_answers_with_another_message_is_an_error_of_the_connection() -> None:
    class Confused(CertificateIssuer):
        def answer(self, message: Any) -> Any:
            return super().answer(AskAuthority())

    made = Controller(identity(Role.CONTROLLER, AUTHORITY), Confused(AUTHORITY, DIGESTS))
    with contextlib.closing(made), pytest.raises(ConnectError, match=r"sent an invalid answer: .*AuthorityIs"):
        enroll(made.join(Role.CLIENT), Role.CLIENT, "x")


def test_who_has_guessed_too_often_is_told_so_at_the_first_question() -> None:
    made = Controller(identity(Role.CONTROLLER, AUTHORITY), Impostor(AUTHORITY, NotEnrolled(TOO_MANY)))
    with contextlib.closing(made), pytest.raises(AccessError, match="does not answer this machine: too many wrong"):
        enroll(made.join(Role.CLIENT), Role.CLIENT, "x")


def test_only_the_certificate_with_the_fingerprint_is_kept() -> None:
    """OpenSSL also reads certificates with another label, which are not counted."""
    other = CertificateAuthority.make("somebody else's").pem.replace(b" CERTIFICATE", b" TRUSTED CERTIFICATE")
    assert with_fingerprint(AUTHORITY.pem + other) == (AUTHORITY.pem, AUTHORITY.fingerprint)


def test_who_shows_the_right_authority_and_has_no_certificate_of_it_gets_no_token() -> None:
    """The CA's certificate is not secret, so anybody can send it."""
    stranger = CertificateAuthority.make("somebody else's")
    for own, words in (
        (
            identity(Role.CONTROLLER, stranger),
            "is not trusted: its certificate is not from",
        ),
        (identity(Role.HOST, AUTHORITY), "its certificate is for another role"),
    ):
        with controller(own) as served, pytest.raises(AccessError, match=words):
            enroll(served.join(Role.CLIENT), Role.CLIENT, "x")


def test_a_clock_that_is_wrong_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """As seen by the joiner, the controller's clock and its signatures are three days old."""
    with clock_ahead_by(-3 * 86400.0):
        own = identity(Role.CONTROLLER, AUTHORITY)
    clock = time.time
    monkeypatch.setattr(CertificateIssuer, "clock", staticmethod(lambda: clock() - 3 * 86400.0))
    words = "has expired according to this machine's clock"
    skew = r"This machine's clock is 2592\d\d s ahead of the controller's"
    with controller(own) as served, pytest.raises(AccessError, match=f"{words}.*{skew}"):
        enroll(served.join(Role.CLIENT), Role.CLIENT, "x")


def test_a_clock_that_is_behind_joins() -> None:
    with clock_ahead_by(3 * 86400.0):
        own = identity(Role.CONTROLLER, AUTHORITY)
    with controller(own) as served:
        assert enroll(served.join(Role.CLIENT), Role.CLIENT, "x").role == Role.CLIENT


def test_what_listens_without_tls_and_what_never_answers_are_named_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(host="127.0.0.1", port=silent.getsockname()[1], tls=True)
        join = JoinToken(address, AUTHORITY.fingerprint, "x")
        started = time.monotonic()
        with pytest.raises(ConnectError, match=rf"{address.host_and_port} did not finish the TLS handshake in time"):
            enroll(join, Role.CLIENT, "x", seconds=0.3)
        assert time.monotonic() - started < 60

        def close_at_once() -> None:
            silent.accept()[0].close()
            silent.accept()[0].close()

        closing = threading.Thread(target=close_at_once)
        closing.start()
        with pytest.raises(ConnectError, match="TLS"):
            enroll(join, Role.CLIENT, "x", seconds=5)
        closing.join(10)


def test_a_desk_signs_nothing_but_proper_requests() -> None:
    issuer = CertificateIssuer(AUTHORITY, DIGESTS)
    for request in (b"", b"no request", AUTHORITY.pem):
        answer = issuer.answer(Enroll("client", "x", TOKENS[Role.CLIENT], request))
        assert isinstance(answer, NotEnrolled)
        assert "request" in answer.reason
    good = signing_request(make_key(), "x")
    assert isinstance(issuer.answer(Enroll("client", "x", TOKENS[Role.CLIENT], good)), Enrolled)
    assert isinstance(issuer.answer(Enroll("client", "x", "", good)), NotEnrolled)


@pytest.mark.parametrize("name", ["é" * 64, "\U0001f600" * 64, "the host agent of " + "機" * 40, "a" * 100, "\0", ""])
def test_a_process_may_have_any_name(name: str) -> None:
    request = Enroll("client", name, TOKENS[Role.CLIENT], signing_request(make_key(), name))
    assert isinstance(CertificateIssuer(AUTHORITY, DIGESTS).answer(request), Enrolled)


def test_without_tokens_of_its_roles_a_desk_lets_nobody_join() -> None:
    issuer = CertificateIssuer(AUTHORITY, {Role.CLIENT: "", Role.HOST: ""})
    assert isinstance(issuer.answer(Enroll("client", "x", "", signing_request(make_key(), "x"))), NotEnrolled)


# ---- renewal


def with_certificates_for(seconds: float) -> CertificateAuthority:
    """Return the same authority with certificates that are valid for `seconds`."""
    return CertificateAuthority.parse(AUTHORITY.with_key, "a test", seconds)


def test_a_certificate_is_renewed_before_its_end_also_after_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrollment, "_RETRY_SECONDS", 0.02)
    short = with_certificates_for(3.0)
    own = Identity(short.certificate_for(Role.HOST, "first"))
    ends, renewed = own.certificate.ends, threading.Event()
    asked: list[float] = []

    def renew():  # type: ignore[no-untyped-def]
        asked.append(time.time())
        if len(asked) < 3:
            raise ConnectError("the controller is being restarted")
        renewed.set()
        return AUTHORITY.certificate_for(Role.HOST, "second")

    renewal = Renewal(own, renew)
    assert renewed.wait(20)
    renewal.close()
    assert len(asked) == 3
    assert asked[0] < ends, "it is asked for in time"
    assert own.certificate.ends > ends + 3600


def test_a_certificate_is_renewed_in_time_although_the_clock_was_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        monotonic = staticmethod(time.monotonic)
        behind = 0.0

        @classmethod
        def time(cls) -> float:
            return time.time() - cls.behind

    def renew():  # type: ignore[no-untyped-def]
        renewed.set()
        return AUTHORITY.certificate_for(Role.HOST, "second")

    monkeypatch.setattr(enrollment, "time", Clock)
    short = with_certificates_for(3.0)
    renewed = threading.Event()
    renewal = Renewal(Identity(short.certificate_for(Role.HOST, "first")), renew)
    Clock.behind = 10 * 3600.0
    assert renewed.wait(20)
    renewal.close()


def test_a_process_whose_token_was_changed_asks_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrollment, "_RETRY_SECONDS", 0.02)
    expired = with_certificates_for(-1.0)
    own = Identity(expired.certificate_for(Role.CLIENT, "first"))
    asked: list[float] = []
    done = threading.Event()

    def renew():  # type: ignore[no-untyped-def]
        asked.append(time.monotonic())
        if len(asked) == 7:
            done.set()
        raise AccessError("its token is not the cluster's")

    renewal = Renewal(own, renew)
    assert done.wait(20)
    renewal.close()
    pauses = [after - before for before, after in pairwise(asked)]
    assert all(pause >= 0.02 * 2**i * 0.75 for i, pause in enumerate(pauses[:6]))


@pytest.mark.parametrize("blocks", [True, False])
def test_a_dial_with_an_expired_certificate_waits_until_it_is_renewed(
    monkeypatch: pytest.MonkeyPatch, blocks: bool
) -> None:
    """After a process was stopped, or its clock was set ahead, it dials before the thread looks at the clock."""
    short = with_certificates_for(10.0)
    own = Identity(short.certificate_for(Role.HOST, "first"))
    renewal = Renewal(own, lambda: AUTHORITY.certificate_for(Role.HOST, "second"))
    own.certificate = replace(own.certificate, ends=time.time() - 1.0)
    roles: list[str] = []

    async def main() -> None:
        server, address = await listen(
            Address(host="127.0.0.1", tls=True),
            lambda: Connection(Any, print, lambda reason: None, on_made=lambda made: roles.append(made.peer_role)),
            identity(Role.CONTROLLER, AUTHORITY),
        )
        if blocks:
            stream = await asyncio.to_thread(dial_stream, address, Role.CONTROLLER, own)
            stream.close()
        else:
            connection = await connect(address, Any, print, print, name="the controller", identity=own)
            connection.close()
        assert not own.has_expired
        while not roles:
            await asyncio.sleep(0.01)
        server.close()
        await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert roles == [Role.HOST]
    renewal.close()


def test_a_dial_waits_for_no_renewal_that_has_failed_or_that_nobody_does() -> None:
    expired = with_certificates_for(-1.0)
    own = Identity(expired.certificate_for(Role.CLIENT, "first"))
    began = time.monotonic()
    own.await_renewal()
    failed = threading.Event()

    def renew() -> Certificate:
        failed.set()
        raise AccessError("its token is not the cluster's")

    renewal = Renewal(own, renew)
    assert failed.wait(20)
    while not renewal._has_failed:
        time.sleep(0.01)
    own.await_renewal()
    renewal.close()
    own.await_renewal()
    assert time.monotonic() - began < RENEWAL_SECONDS
    assert own.has_expired


# ---- roles


@pytest.mark.parametrize(
    ("certified", "says"),
    [("client", {"proxy", "operator"}), ("host", {"worker", "agent"}), ("engine", {"engine"}), ("controller", set())],
)
def test_a_certificates_role_says_what_its_holder_may_be(certified: str, says: set[str]) -> None:
    everything = {"proxy", "operator", "worker", "agent", "engine", "controller", "nobody"}
    assert {each for each in everything if may_claim(certified, each)} == says
    assert all(may_claim("", each) for each in everything), "without certificates the tokens decide"


def test_hosts_and_the_engine_have_a_token_of_their_own() -> None:
    assert [each for each in ("proxy", "operator", "worker", "agent", "engine") if is_of_the_cluster(each)] == [
        "worker",
        "agent",
        "engine",
    ]


def test_a_certificate_is_renewed_by_whoever_has_taken_over() -> None:
    with controller() as served:
        join = served.join(Role.HOST)
        own = Identity(enroll(join, Role.HOST, "m"))
    with controller() as later:
        own.elsewhere = (later.address,)
        assert access.renewed(own, join, "m").ends >= own.certificate.ends


def test_while_a_standby_has_not_taken_over_its_controller_renews() -> None:
    with controller() as served:
        own = Identity(enroll(served.join(Role.HOST), Role.HOST, "m"))
        own.elsewhere = (Address(host="127.0.0.1", port=free_port(), tls=True),)
        assert access.renewed(own, served.join(Role.HOST), "m").role == Role.HOST


def test_a_process_joins_at_the_controller_also_if_its_join_token_names_a_standby_first() -> None:
    with standby() as first, controller() as second:
        both = replace(first.address, others=(second.address,))
        own = access.joined(replace(second.join(Role.HOST), address=both), Role.HOST, "m")
        assert own.ordered(both).each == (second.address, first.address)
        assert access.renewed(own, replace(second.join(Role.HOST), address=both), "m").role == Role.HOST


@contextlib.contextmanager
def without_tls() -> Iterator[Address]:
    """Return the address of a server that answers each connection with bytes that are not TLS."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as sock:
                        sock.recv(4096)
                        sock.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield Address(host="127.0.0.1", port=listening.getsockname()[1], tls=True)
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@contextlib.contextmanager
def impostor(own: Identity, authority: CertificateAuthority, answer: Any = None) -> Iterator[Address]:
    made = Controller(own, Impostor(authority, answer or AuthorityIs(authority.pem, time.time())))
    with contextlib.closing(made):
        yield made.address


OTHER = CertificateAuthority.make("somebody else's")


@pytest.mark.parametrize(
    "strangers",
    [
        without_tls,
        lambda: impostor(identity(Role.CONTROLLER, OTHER), OTHER),
        lambda: impostor(identity(Role.CONTROLLER, OTHER), AUTHORITY),
        lambda: impostor(identity(Role.CONTROLLER, OTHER), OTHER, AuthorityIs(b"\xff", 0.0)),
        lambda: impostor(identity(Role.CONTROLLER, OTHER), OTHER, NotEnrolled(TOO_MANY)),
    ],
    ids=["without TLS", "another authority", "without the authority's key", "no certificate", "a refusal"],
)
def test_who_is_not_verified_keeps_nobody_from_the_next_address(strangers: Any) -> None:
    with strangers() as first, controller() as served:
        join = replace(served.join(Role.HOST), address=replace(first, others=(served.address,)))
        own = access.joined(join, Role.HOST, "m")
        assert own.ordered(join.address).each == (served.address, first)
        assert access.renewed(own, join, "m").role == Role.HOST


def test_a_verified_refusal_is_final() -> None:
    issuer = Impostor(AUTHORITY, AuthorityIs(AUTHORITY.pem, time.time()))
    with (
        controller() as first,
        contextlib.closing(Controller(identity(Role.CONTROLLER, AUTHORITY), issuer)) as second,
    ):
        where = replace(first.address, others=(second.address,))
        with pytest.raises(AccessError, match=f"{first.address.port} refuses to let this host join: its token"):
            access.joined(JoinToken(where, AUTHORITY.fingerprint, "guessed"), Role.HOST, "m", 10.0)
    assert issuer.asked == []


def test_the_error_is_of_who_is_not_trusted_if_nobody_answers_elsewhere() -> None:
    with impostor(identity(Role.CONTROLLER, OTHER), OTHER) as first, standby() as second:
        join = replace(second.join(Role.HOST), address=replace(first, others=(second.address,)))
        words = f"{first.port} is not that of the join token: .*The attempt also failed at {second.address}"
        with pytest.raises(AccessError, match=words):
            access.joined(join, Role.HOST, "m")


def test_a_stranger_at_one_address_does_not_end_the_attempts_at_one_that_is_not_up_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with impostor(identity(Role.CONTROLLER, OTHER), OTHER) as first, controller() as served:
        absent = replace(first, others=(Address(host="127.0.0.1", port=free_port(), tls=True),))
        present = replace(first, others=(served.address,))
        joins = iter((absent, absent, present))

        def enroll_where(join: JoinToken, role: Role, name: str) -> Any:
            return enrollment.enroll_anywhere(replace(join, address=next(joins)), role, name)

        monkeypatch.setattr(access, "enroll_anywhere", enroll_where)
        assert access.joined(served.join(Role.HOST), Role.HOST, "m", 60.0).role == Role.HOST


def test_the_requests_of_a_process_share_an_identity_until_it_is_old_or_refused() -> None:
    now = [time.time()]
    kept = access.KeptIdentities(lambda: now[0])
    with controller() as served:
        join = served.join(Role.CLIENT)
        first = kept.of(join, "a command")
        assert kept.of(join, "a command") is first
        kept.forget(join)
        second = kept.of(join, "a command")
        assert second is not first
        validity = second.certificate.ends - now[0]
        now[0] += 0.4 * validity
        assert kept.of(join, "a command") is second
        now[0] += 0.2 * validity
        assert kept.of(join, "a command") is not second


def test_the_error_names_all_addresses_of_a_join_token_at_which_nobody_answered() -> None:
    with standby() as first, standby() as second:
        join = replace(second.join(Role.HOST), address=replace(first.address, others=(second.address,)))
        with pytest.raises(ConnectError, match=f"{second.address.port} .*standby.*{first.address.port}"):
            access.joined(join, Role.HOST, "m")


def test_the_order_of_addresses_stays_for_an_identity_from_elsewhere() -> None:
    with controller() as served:
        own = access.joined(served.join(Role.HOST), Role.HOST, "m")
    others = Address(host="a", port=1, tls=True, others=(Address(host="b", port=2, tls=True),))
    assert own.ordered(others) is others
