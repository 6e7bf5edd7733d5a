"""How a process that has a join token gets a certificate, and a new one before it ends.

A joiner connects twice to the controller's port. First it asks for the authority's certificate, believing nothing, and
compares its fingerprint with that of the join token. Then it verifies the controller by that authority; it sends the
token and a public key, and gets a certificate for the role that the token is for. The private key stays where it was
made.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from atoll.errors import AccessError, AtollError, ConnectError
from atoll.security.join_token import JoinToken
from atoll.security.roles import JOINING, Role
from atoll.security.tokens import digest
from atoll.wire.framing import HEADER_BYTES, frame_header, frame_length
from atoll.wire.sockets import dial
from atoll.wire.tls.identity import Certificate, Identity, server_name
from atoll.wire.tls.tls_errors import explained

_log = logging.getLogger(__name__)

ENROLL_SECONDS = 10.0
_MOST_BYTES = 64 * 1024  # of a message
_RENEWED_AFTER = 2 / 3  # of the time that a certificate is valid
_RETRY_SECONDS = 5.0
_LOOKS_SECONDS = 60.0


class AskAuthority(msgspec.Struct, frozen=True, array_like=True, tag="authority?"):
    """Which authority is it?"""


class AuthorityIs(msgspec.Struct, frozen=True, array_like=True, tag="authority"):
    """Its certificate in PEM, and the controller's clock, in seconds since 1970."""

    certificate: bytes
    seconds: float


class Enroll(msgspec.Struct, frozen=True, array_like=True, tag="enroll"):
    """Asks for a certificate. `name` is for people, `request` what `authority.signing_request` makes."""

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


class Desk:
    """Gives joiners their certificates, in the controller. `tokens` are the digests of the tokens that roles need.

    `is_tenants(digest)`: it is that of a tenant of the cluster, who is a client by that.
    """

    clock = staticmethod(time.time)

    def __init__(
        self, authority: Any, tokens: Mapping[Role, str], is_tenants: Callable[[str], bool] = lambda said: False
    ) -> None:
        self._authority = authority  # an `authority.Authority`, which few processes import
        self._tokens = {role: token.encode() for role, token in tokens.items()}
        self._is_tenants = is_tenants

    def answer(self, message: FromJoiner) -> ToJoiner:
        if isinstance(message, AskAuthority):
            return AuthorityIs(self._authority.pem, self.clock())
        if message.role not in JOINING:
            return NotEnrolled(f"nobody joins as {message.role!r}: expected {' or '.join(JOINING)}")
        role = Role(message.role)
        if not self._is_right(role, message.token):
            (other,) = (each for each in JOINING if each is not role)
            if self._is_right(other, message.token):
                return NotEnrolled(
                    f"this join token is for a {other}, and a {role} was asked for: hosts join with the token of "
                    "`atoll up --host-join-file`, clients by that of `--join-file`"
                )
            return NotEnrolled("its token is not the cluster's: take the cluster's present join token")
        try:
            return Enrolled(self._authority.sign(message.request, role, message.name))
        except AccessError as error:
            return NotEnrolled(str(error))

    def _is_right(self, role: Role, token: str) -> bool:
        if not token:
            return False
        said = digest(token)
        is_of_cluster = hmac.compare_digest(said.encode(), self._tokens[role])
        return is_of_cluster or (role is Role.CLIENT and self._is_tenants(said))


# ---- the joiner


def enroll(join: JoinToken, role: Role, name: str, seconds: float = ENROLL_SECONDS) -> Certificate:
    """A certificate of that role. Blocks, for `seconds` at most once it is connected.

    Raises AccessError that says what is wrong with the join token, the certificates or the clocks; ConnectError where
    nobody answers.
    """
    from atoll.security.authority import fingerprint, make_key, received, signing_request

    deadline = time.monotonic() + seconds
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    said = _ask(join, unverified, AskAuthority(), deadline)
    assert isinstance(said, AuthorityIs)
    if not hmac.compare_digest(fingerprint(said.certificate), join.fingerprint):
        found, expected = _where_they_differ(fingerprint(said.certificate), join.fingerprint)
        option = "--host-join-file" if role is Role.HOST else "--join-file"
        raise AccessError(
            f"the cluster at {join.address.host_and_port} is not that of the join token: its authority has the "
            f"fingerprint {found}, expected {expected}. It was "
            f"started anew since: take its present join token (`atoll up {option}` writes it, and with "
            "`--authority FILE` it stays the same); or somebody else answers in its place"
        )
    verified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    verified.load_verify_locations(cadata=said.certificate.decode())
    key = make_key()
    request = Enroll(role, name, join.token, signing_request(key, name))
    try:
        reply = _ask(join, verified, request, deadline)
    except AccessError as error:
        skew = time.time() - said.seconds
        if abs(skew) < 60:
            raise
        ahead = "ahead of" if skew > 0 else "behind"
        raise AccessError(f"{error}. This machine's clock is {abs(skew):.0f} s {ahead} the controller's") from None
    if isinstance(reply, NotEnrolled):
        raise AccessError(
            f"the cluster at {join.address.host_and_port} refuses to let this {role} join: {reply.reason}"
        )
    assert isinstance(reply, Enrolled)
    return received(reply.certificate, key, said.certificate, role)


def _ask(join: JoinToken, context: ssl.SSLContext, question: FromJoiner, deadline: float) -> ToJoiner:
    """One message there and one back, on a connection of their own."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    address = join.address
    who = f"the Atoll controller at {address.host_and_port}"
    left = max(0.1, deadline - time.monotonic())
    # Named without the scheme: that is how the user knows it.
    sock = dial(address, what="the Atoll controller", timeout=left)
    try:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        tls = context.wrap_socket(sock, server_hostname=server_name(Role.CONTROLLER), suppress_ragged_eofs=True)
        with tls:
            body = msgspec.msgpack.encode(question)
            tls.sendall(frame_header(len(body)) + body)
            length = frame_length(_exactly(tls, HEADER_BYTES, deadline), _MOST_BYTES)
            reply: ToJoiner = msgspec.msgpack.decode(_exactly(tls, length, deadline), type=ToJoiner)
            return reply
    except EOFError:
        raise ConnectError(f"{who} closed the connection before it had answered") from None
    except msgspec.MsgspecError as error:
        raise ConnectError(f"{who} answers what is none: {error}") from None
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


# ---- renewal


class Renewal:
    """Renews an identity on a thread of its own, well before its certificate ends, until it is closed.

    `renewed()` gives a new certificate, and may raise AtollError: then it is asked again, somewhat later.
    """

    def __init__(self, identity: Identity, renewed: Callable[[], Certificate]) -> None:
        self._identity = identity
        self._renewed = renewed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="atoll-renewal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        due = self._due()
        # The clock on the wall counts, which may be set, and goes on while the machine is suspended.
        while not self._closing.wait(min(_LOOKS_SECONDS, max(0.0, due - time.time()))):
            if time.time() < due:
                continue
            try:
                self._identity.renew(self._renewed())
            except (AtollError, OSError) as error:
                due = time.time() + max(_RETRY_SECONDS, (self._identity.certificate.ends - time.time()) / 10)
                _log.warning("the certificate of this %s cannot be renewed for now: %s", self._identity.role, error)
            else:
                due = self._due()

    def _due(self) -> float:
        """It differs from process to process: a cluster's certificates are not all renewed at once."""
        now = time.time()
        return now + (self._identity.certificate.ends - now) * _RENEWED_AFTER * random.uniform(0.9, 1.0)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def _where_they_differ(found: str, expected: str, most: int = 16) -> tuple[str, str]:
    """Return the same digits of two fingerprints: the first ones, up to and including one that differs."""
    same = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(expected))
    start = 0 if same < most else same - most // 2
    shown = [each[start : start + most] for each in (found, expected)]
    return tuple(f"{'...' if start else ''}{each}..." for each in shown)  # type: ignore[return-value]
