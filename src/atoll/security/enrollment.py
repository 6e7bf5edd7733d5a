"""How a process with a join token gets a certificate, and renews it before it expires.

A joiner connects twice to the controller's port. On the first connection, which it does not trust, it asks for the
CA's certificate and compares its fingerprint with that in the join token. On the second, it verifies the
controller using that CA, sends the token and a public key, and receives a certificate for the token's role. The
private key never leaves the process that created it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.decodable import decodable
from atoll.errors import AccessError, AtollError, ConnectError, FrameError
from atoll.retries import Retry
from atoll.security.join_token import JoinToken
from atoll.security.roles import JOINING, Role
from atoll.security.tokens import TOO_MANY, Guesses, Tokens, digest
from atoll.wire.address import Address
from atoll.wire.connection import Connection
from atoll.wire.framing import HEADER_BYTES, NO_MESSAGE, frame_header, frame_length
from atoll.wire.sockets import dial, try_each
from atoll.wire.tls.identity import Certificate, Identity, server_name
from atoll.wire.tls.tls_errors import explained

_log = logging.getLogger(__name__)

ENROLL_SECONDS = 10.0
_MAX_BYTES = 64 * 1024  # per message
_RENEWED_AFTER = 2 / 3  # of a certificate's validity
_RETRY_SECONDS = 5.0
_MAX_RETRY_SECONDS = 600.0  # while a controller refuses an expired certificate's process, as after a change of tokens
_CHECK_SECONDS = 60.0  # between looks at the wall clock
_CONTROLLER_NAME = "the controller"
_SHOWN = 16  # digits of a fingerprint


class AskAuthority(msgspec.Struct, frozen=True, array_like=True, tag="authority?"):
    """Request the CA's certificate."""


class AuthorityIs(msgspec.Struct, frozen=True, array_like=True, tag="authority"):
    """The CA's certificate in PEM, and the controller's clock in seconds since 1970."""

    certificate: bytes
    seconds: float


class Enroll(msgspec.Struct, frozen=True, array_like=True, tag="enroll"):
    """Request a certificate. `name` is for people; `request` comes from `certificate_authority.signing_request`."""

    role: str
    name: str
    token: str
    request: bytes


class Enrolled(msgspec.Struct, frozen=True, array_like=True, tag="enrolled"):
    certificate: bytes


class NotEnrolled(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    reason: str


FromJoiner = AskAuthority | Enroll
ToJoiner = AuthorityIs | Enrolled | NotEnrolled


class CertificateIssuer:
    """Answer the messages of joiners, in the controller.

    `tokens` maps each role to the digest of its token. `is_tenants(digest)` returns whether a digest is that of a
    tenant's token, which admits clients.
    """

    clock = staticmethod(time.time)

    def __init__(
        self, authority: Any, tokens: Mapping[Role, str], is_tenants: Callable[[str], bool] = lambda token_digest: False
    ) -> None:
        self._authority = authority  # a `certificate_authority.CertificateAuthority`; its module is slow to import
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        self._is_tenants = is_tenants

    def answer(self, message: FromJoiner) -> ToJoiner:
        if isinstance(message, AskAuthority):
            return AuthorityIs(self._authority.pem, self.clock())
        if message.role not in JOINING:
            return NotEnrolled(f"cannot join as {message.role!r}: expected {' or '.join(JOINING)}")
        role = Role(message.role)
        if not self._is_right(role, message.token):
            (other,) = (each for each in JOINING if each is not role)
            if self._is_right(other, message.token):
                return NotEnrolled(
                    f"this join token is for a {other}, not for a {role}: hosts join with the token that "
                    "`atoll up --host-join-file` writes, clients with that of `--join-file`"
                )
            return NotEnrolled("its token is not the cluster's: use the cluster's current join token")
        try:
            return Enrolled(self._authority.sign(message.request, role, message.name))
        except AccessError as error:
            return NotEnrolled(str(error))

    def _is_right(self, role: Role, token: str) -> bool:
        if not token:
            return False
        token_digest = digest(token)
        is_of_cluster = hmac.compare_digest(token_digest.encode(), self._tokens[role])
        return is_of_cluster or (role is Role.CLIENT and self._is_tenants(token_digest))


class Joiners:
    """Answer connections over TLS that have no certificate, limiting wrong tokens per address.

    `identity` is the controller's own certificate, which this object signs and renews. Joiners bypass the pure core:
    issuing a certificate needs clocks and random numbers, and changes none of the core's decisions.
    """

    # `authority` is a `certificate_authority.CertificateAuthority`.
    def __init__(self, authority: Any, tokens: Tokens) -> None:
        self._issuer = CertificateIssuer(
            authority,
            {Role.CLIENT: tokens.client, Role.HOST: tokens.host},
            lambda token_digest: tokens.tenant_of(token_digest) is not None,
        )
        self._guesses = Guesses()
        self.identity = Identity(authority.certificate_for(Role.CONTROLLER, _CONTROLLER_NAME))
        self._renewal = Renewal(self.identity, lambda: authority.certificate_for(Role.CONTROLLER, _CONTROLLER_NAME))

    def serve(self, connection: Connection) -> None:
        """Answer one message of the connection, and close it after `ENROLL_SECONDS` if none arrives."""
        connection.name = "a process that joins"
        deadline = asyncio.get_running_loop().call_later(ENROLL_SECONDS, connection.close)
        connection.expect(FromJoiner, partial(self._answer, connection), lambda reason: deadline.cancel())

    def _answer(self, connection: Connection, message: Any) -> None:
        now, peer = asyncio.get_running_loop().time(), connection.peer
        if not self._guesses.may_try(peer, now):
            answer: Any = NotEnrolled(TOO_MANY)
        else:
            answer = self._issuer.answer(message)
            if isinstance(answer, NotEnrolled):
                self._guesses.wrong(peer, now)
        if isinstance(answer, NotEnrolled):
            connection.refuse(answer.reason)
        connection.send(answer)
        connection.close()

    def close(self) -> None:
        """Stop renewing the controller's certificate."""
        self._renewal.close()


# ---- Joiner


def enroll_anywhere(join: JoinToken, role: Role, name: str) -> tuple[Certificate, Address]:
    """Return a new certificate for `role`, and the one of the addresses in the join token that has issued it.

    A standby that has not taken over accepts connections and closes them, and another server may listen at an address.
    So the addresses are tried in turn until a controller that was verified answers. Raises as `enroll` does.
    """

    def ask(address: Address, seconds: float) -> tuple[Certificate | NotEnrolled, JoinToken]:
        there = replace(join, address=address)
        return _answer(there, role, name, ENROLL_SECONDS, seconds), there

    answer, there = try_each(join.address, ENROLL_SECONDS, ask)  # also after an AccessError: a peer may be any process
    return _accepted(answer, there, role), there.address


def enroll(
    join: JoinToken, role: Role, name: str, seconds: float = ENROLL_SECONDS, dial_seconds: float = ENROLL_SECONDS
) -> Certificate:
    """Return a new certificate for `role`. Blocks, for at most `seconds` once it is connected.

    Raises AccessError if the join token, the certificates or the clocks are wrong, and ConnectError if the controller
    does not answer.
    """
    return _accepted(_answer(join, role, name, seconds, dial_seconds), join, role)


def _accepted(answer: Certificate | NotEnrolled, join: JoinToken, role: Role) -> Certificate:
    if isinstance(answer, NotEnrolled):
        raise AccessError(
            f"the cluster at {join.address.host_and_port} refuses to let this {role} join: {answer.reason}"
        )
    return answer


def _answer(join: JoinToken, role: Role, name: str, seconds: float, dial_seconds: float) -> Certificate | NotEnrolled:
    """Return what a controller that was verified answers. Raises as `enroll` does."""
    from atoll.security.certificate_authority import make_key, signed_certificate, signing_request

    deadline = time.monotonic() + seconds
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    answer = _ask(join, unverified, AskAuthority(), deadline, dial_seconds)
    if not isinstance(answer, AuthorityIs):
        raise _not_expected(answer, join.address)
    authority = _verified(answer.certificate, join, role)
    verified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verified.load_verify_locations(cadata=authority.decode())
    key = make_key()
    request = Enroll(role, name, join.token, signing_request(key, name))
    try:
        reply = _ask(join, verified, request, deadline, dial_seconds)
    except AccessError as error:
        skew = time.time() - answer.seconds
        if abs(skew) < 60:
            raise
        ahead = "ahead of" if skew > 0 else "behind"
        text = f"{error}. This machine's clock is {abs(skew):.0f} s {ahead} the controller's"
        raise type(error)(text) from None
    if isinstance(reply, NotEnrolled):
        return reply
    if not isinstance(reply, Enrolled):
        raise _not_expected(reply, join.address)
    return signed_certificate(reply.certificate, key, authority, role)


def _verified(certificate: bytes, join: JoinToken, role: Role) -> bytes:
    """Return the CA's certificate from the answer of an unverified peer, if it is that of the join token.

    Use the returned PEM, and never the peer's, in which further certificates may follow. Raises AccessError.
    """
    from atoll.security.certificate_authority import with_fingerprint

    authority, fingerprint = with_fingerprint(certificate)
    if hmac.compare_digest(fingerprint, join.fingerprint):
        return authority
    found, expected = _where_they_differ(fingerprint, join.fingerprint)
    option = "--host-join-file" if role is Role.HOST else "--join-file"
    raise AccessError(
        f"the cluster at {join.address.host_and_port} is not that of the join token: its CA has the "
        f"fingerprint {found}, expected {expected}. If the cluster was restarted, use its current join token, "
        f"which `atoll up {option}` writes; with `--authority FILE` the token stays the same. Otherwise another "
        "server answers at this address"
    )


def _not_expected(answer: ToJoiner, address: Address) -> ConnectError:
    """Return the error for an answer of another type, from a peer that may be any process."""
    who = _who(address)
    if isinstance(answer, NotEnrolled) and answer.reason == TOO_MANY:
        return AccessError(f"{who} does not answer this machine: {TOO_MANY}")
    return ConnectError(f"{who} sent an invalid answer: a message of the type {type(answer).__name__}")


def _who(address: Address) -> str:
    return f"the Atoll controller at {address.host_and_port}"


def _ask(
    join: JoinToken, context: ssl.SSLContext, question: FromJoiner, deadline: float, dial_seconds: float
) -> ToJoiner:
    """Open a connection, send one message, and return the reply."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    address = join.address
    who = _who(address)
    left = max(0.1, deadline - time.monotonic())
    sock = dial(address, what="the Atoll controller", timeout=min(dial_seconds, left))
    try:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        tls = context.wrap_socket(sock, server_hostname=server_name(Role.CONTROLLER), suppress_ragged_eofs=True)
        with tls:
            body = msgspec.msgpack.encode(question)
            tls.sendall(frame_header(len(body)) + body)
            length = frame_length(_exactly(tls, HEADER_BYTES, deadline), _MAX_BYTES)
            reply: ToJoiner = msgspec.msgpack.decode(_exactly(tls, length, deadline), type=decodable(ToJoiner))
            return reply
    except EOFError:
        text = f"{who} closed the connection without answering, as a standby does that has not taken over"
        raise ConnectError(text) from None
    except (FrameError, *NO_MESSAGE) as error:
        raise ConnectError(f"{who} sent an invalid answer: {error}") from None
    except AtollError:
        raise
    except OSError as error:
        raise explained(error, who) from None
    finally:
        with contextlib.suppress(OSError):
            sock.close()


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    content = b""
    while len(content) < count:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(count - len(content))
        if not part:
            raise EOFError
        content += part
    return content


# ---- Renewal


class _Due:
    """A deadline, which is reached when either clock has advanced by `seconds`.

    Certificates expire by the wall clock, which advances while the machine is suspended. But it may be set back, while
    the clocks of the peers, which check the certificate, are right.
    """

    def __init__(self, seconds: float) -> None:
        self._wall, self._monotonic = time.time() + seconds, time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, min(self._wall - time.time(), self._monotonic - time.monotonic()))


class Renewal:
    """A thread that renews an identity well before its certificate expires, until it is closed.

    `renewed()` returns a new certificate. If it raises AtollError or OSError, the thread calls it again later.

    After the certificate has expired, each AccessError doubles the pause. Each attempt may send a wrong token, and the
    controller limits these per address: many processes with a former token would exclude the others of their machine.

    A dial with an expired certificate makes the thread renew it at once, unless the last attempt failed.
    """

    def __init__(self, identity: Identity, renewed: Callable[[], Certificate]) -> None:
        self._identity = identity
        self._renewed = renewed
        self._wake = threading.Event()
        self._is_closing = self._has_failed = False
        identity.renew_with(self._renew_now)
        self._thread = threading.Thread(target=self._run, args=(self._due(),), name="atoll-renewal", daemon=True)
        self._thread.start()

    def _run(self, due: _Due) -> None:
        refusals = Retry(_RETRY_SECONDS, _MAX_RETRY_SECONDS)
        while not self._is_closing:
            is_asked = self._wake.wait(min(_CHECK_SECONDS, due.left)) and self._identity.has_expired
            self._wake.clear()
            if self._is_closing or (due.left and not is_asked):
                continue
            try:
                self._identity.renew(self._renewed())
            except (AtollError, OSError) as error:
                left = self._identity.certificate.ends - time.time()
                is_refused = left <= 0 and isinstance(error, AccessError)
                due = _Due(max(refusals.next_pause() if is_refused else _RETRY_SECONDS, left / 10))
                self._has_failed = True
                _log.warning("cannot renew the certificate of this %s, will retry: %s", self._identity.role, error)
            else:
                due = self._due()
                self._has_failed = False
                refusals.reset()

    def _renew_now(self) -> bool:
        """Renew the certificate at once. Return False if the next attempt must wait, since the last one failed."""
        if self._has_failed:
            return False
        self._wake.set()
        return True

    def _due(self) -> _Due:
        """Return when to renew next, with jitter so that the processes of a cluster do not all renew at once."""
        return _Due((self._identity.certificate.ends - time.time()) * _RENEWED_AFTER * random.uniform(0.9, 1.0))

    def close(self) -> None:
        self._identity.renew_with(lambda: False)
        self._is_closing = True
        self._wake.set()
        self._thread.join()


def _where_they_differ(found: str, expected: str) -> tuple[str, str]:
    """Return the same digits of two fingerprints, up to and including the first that differs."""
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
    start = 0 if same < _SHOWN else same - _SHOWN // 2
    shown = [each[start : start + _SHOWN] for each in (found, expected)]
    return tuple(f"{'...' if start else ''}{each}..." for each in shown)  # type: ignore[return-value]
