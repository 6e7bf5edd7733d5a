"""The certificates with which processes authenticate each other.

The cluster's own certificate authority (CA) signs all certificates, and each certificate names a role, such as `host`.
Processes verify the role of a peer and never its address, so machines can have any addresses and names. A dialer
requests a role with the server name (SNI), and an acceptor reads the role from the peer's certificate.

Certificates are short-lived. New connections use a renewed certificate, and open connections continue. A process that
was stopped, or whose clock was set ahead, may dial before its certificate is renewed: the dial waits for that.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.wire.address import Address

HANDSHAKE_SECONDS = 10.0
RENEWAL_SECONDS = 5.0  # for which a dial waits until an expired certificate is renewed
_SUFFIX = ".atoll"


class Certificate(msgspec.Struct, frozen=True):
    """A certificate, its private key and the CA that signed it, in PEM. Times are in seconds since 1970."""

    certificate: bytes
    key: bytes
    authority: bytes
    role: str
    begins: float
    ends: float

    def __repr__(self) -> str:
        return f"Certificate({self.role})"  # without the key


def server_name(role: str) -> str:
    """Return the server name (SNI) for a role, which is also the DNS name in the role's certificates."""
    return role + _SUFFIX


def role_of(certificate: dict[str, Any] | None) -> str:
    """Return the role in a certificate from `getpeercert`, or "" without a certificate."""
    names = [name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]
    return names[0].removesuffix(_SUFFIX) if names else ""


def name_of(certificate: dict[str, Any] | None) -> str:
    """Return the common name in a certificate from `getpeercert`, or "" without a certificate."""
    fields = {key: value for part in (certificate or {}).get("subject", ()) for key, value in part}
    return str(fields.get("commonName", ""))


class Identity:
    """The current certificate of a process and its SSL contexts. Thread-safe.

    `renew` replaces the contexts instead of changing contexts in use. Code that uses a context must read it for each
    connection. A controller at one of the addresses `elsewhere` can also renew the certificate. `issuer` is the address
    of the controller that issued the first one, if this process has joined with a join token.
    """

    def __init__(self, certificate: Certificate, issuer: Address | None = None) -> None:
        self.certificate = certificate
        self._issuer = issuer
        self._changed = threading.Condition()
        self._renews: Callable[[], bool] = lambda: False
        self.elsewhere: tuple[Address, ...] = ()
        self.dialing = _context(certificate, ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)
        self.serving = _context(certificate, ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED)
        # Also accepts peers without a certificate, such as joiners, so its users must check the role.
        self.admitting = _context(certificate, ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)

    @property
    def role(self) -> str:
        return self.certificate.role

    def ordered(self, address: Address) -> Address:
        """Return the address with that of the issuer first: a standby may listen at the others."""
        if self._issuer is None or self._issuer not in address.each:
            return address
        return replace(self._issuer, others=tuple(each for each in address.each if each != self._issuer))

    def renew(self, certificate: Certificate) -> None:
        """Use `certificate` for new connections."""
        fresh = Identity(certificate)
        with self._changed:
            self.certificate, self.dialing, self.serving = certificate, fresh.dialing, fresh.serving
            self.admitting = fresh.admitting
            self._changed.notify_all()

    def renew_with(self, renews: Callable[[], bool]) -> None:
        """Let `renews()` begin to renew the certificate at once. It returns False if that must wait."""
        self._renews = renews

    @property
    def has_expired(self) -> bool:
        return time.time() >= self.certificate.ends

    def await_renewal(self) -> None:
        """Wait until an expired certificate is renewed, for at most `RENEWAL_SECONDS`. Call this before a dial."""
        if self.has_expired and self._renews():
            with self._changed:
                self._changed.wait_for(lambda: not self.has_expired, RENEWAL_SECONDS)


def _context(certificate: Certificate, protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = verify
    context.load_verify_locations(cadata=certificate.authority.decode())
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes sessions, and tickets add a message to each handshake
    use_certificate(context, certificate.certificate + certificate.key)
    return context


def use_certificate(context: ssl.SSLContext, pem: bytes) -> None:
    """Use the certificate and the key in `pem` for new connections of the context.

    Raise ssl.SSLError if they do not match or the key needs a passphrase.
    """
    # OpenSSL reads only files. Without a password argument, it would ask for a passphrase at the terminal.
    if not hasattr(os, "memfd_create"):  # macOS: a file that only this user can read, and that is removed at once
        with tempfile.NamedTemporaryFile(prefix="atoll-certificate-") as file:
            file.write(pem)
            file.flush()
            context.load_cert_chain(file.name, password="")
        return
    descriptor = os.memfd_create("atoll-certificate", os.MFD_CLOEXEC)  # in memory, and private to the process
    try:
        with open(descriptor, "wb", closefd=False) as memory:
            memory.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)
