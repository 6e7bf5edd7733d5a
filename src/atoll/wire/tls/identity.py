"""What a process proves itself with over TLS, and whom it believes.

All certificates of a cluster are signed by its own authority, and each names a role: `host`, say. A peer is verified by
its role and never by its address, so machines may have any addresses and names. Who dials asks for a role by the name
of the server (SNI); who is dialed looks at the role of the certificate that came.

Certificates are short-lived. A new one takes the place of the old one in new connections; those that are open go on.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from typing import Any

from atoll.wire.address import Address

HANDSHAKE_SECONDS = 10.0
_SUFFIX = ".atoll"


@dataclass(frozen=True)
class Certificate:
    """A certificate, its private key and the authority that has signed it, in PEM. Times are of the machine's clock."""

    certificate: bytes
    key: bytes
    authority: bytes
    role: str
    begins: float  # seconds since 1970
    ends: float

    def __repr__(self) -> str:
        return f"Certificate({self.role})"  # without the key


def server_name(role: str) -> str:
    """The name by which a process of that role is asked for, and which its certificate has."""
    return role + _SUFFIX


def role_of(certificate: dict[str, Any] | None) -> str:
    """The role in a verified certificate, as `getpeercert` gives it; "" without one."""
    names = [name for kind, name in (certificate or {}).get("subjectAltName", ()) if kind == "DNS"]
    return names[0].removesuffix(_SUFFIX) if names else ""


def name_of(certificate: dict[str, Any] | None) -> str:
    """What its holder is called in a certificate, as `getpeercert` gives it; "" without one."""
    fields = {key: value for part in (certificate or {}).get("subject", ()) for key, value in part}
    return str(fields.get("commonName", ""))


class Identity:
    """A certificate in use. For any thread; contexts are made anew rather than changed while others use them.

    There is one for who dials, and two for who is dialed. Who serves takes it at each connection: the newest. A
    controller may be found `elsewhere` that renews it, beside the one that gave it.
    """

    def __init__(self, certificate: Certificate) -> None:
        self.certificate = certificate
        self.elsewhere: tuple[Address, ...] = ()
        self.dialing = _context(certificate, ssl.PROTOCOL_TLS_CLIENT, ssl.CERT_REQUIRED)
        self.serving = _context(certificate, ssl.PROTOCOL_TLS_SERVER, ssl.CERT_REQUIRED)
        # This one lets in who has no certificate yet, as a joiner; who serves with it has to look at the role.
        self.admitting = _context(certificate, ssl.PROTOCOL_TLS_SERVER, ssl.CERT_OPTIONAL)

    @property
    def role(self) -> str:
        return self.certificate.role

    def renew(self, certificate: Certificate) -> None:
        """From now on, new connections are made with this one."""
        fresh = Identity(certificate)
        self.certificate, self.dialing, self.serving = certificate, fresh.dialing, fresh.serving
        self.admitting = fresh.admitting


def _context(certificate: Certificate, protocol: int, verify: ssl.VerifyMode) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = verify
    context.load_verify_locations(cadata=certificate.authority.decode())
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # nobody resumes: they would be one more message after each handshake
    use_certificate(context, certificate.certificate + certificate.key)
    return context


def use_certificate(context: ssl.SSLContext, pem: bytes) -> None:
    """From now on, what is connected with the context is so with this certificate, whose key is in `pem`, too.

    Raises ssl.SSLError where there are no two that belong together, or the key needs a passphrase.
    """
    # OpenSSL reads files alone; this one is in memory, and nobody else's.
    descriptor = os.memfd_create("atoll-certificate", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(pem)
        # With a passphrase given, OpenSSL asks for none at the terminal.
        context.load_cert_chain(f"/proc/self/fd/{descriptor}", password="")
    finally:
        os.close(descriptor)
