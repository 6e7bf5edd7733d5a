"""TLS for browsers and scrapers: by the user's own certificate, or by one that the cluster's authority signs.

A cluster's authority is made for its roles (the room `security`). What it signs for a page names the page's host, as
browsers want it, and opens no door of the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from atoll.errors import AccessError, AddressError, AtollError
from atoll.security.start_security import authority_file, certificate_seconds, load_authority, own_address
from atoll.wire.address import Address
from atoll.wire.tls.identity import use_certificate

_log = logging.getLogger(__name__)

# A certificate that its owner replaces, as certbot does, is looked at so often.
_RENEWED_SECONDS = 3600.0


class PageTls:
    """What a page is served with. `pem()` is the present certificate with its key; it is asked for again and again."""

    def __init__(self, pem: Callable[[], bytes], authority: bytes = b"", every: float = _RENEWED_SECONDS) -> None:
        self.authority = authority  # the certificate of who has signed it, in PEM, where that is the cluster's
        self._pem = pem
        self._every = every
        self.context = _context()
        self.renew()

    def renew(self) -> None:
        """Connections that are open go on. Raises AccessError, and then serves on with what it had."""
        pem = self._pem()
        for context in (_context(), self.context):  # what is not usable does not reach the one in use
            try:
                use_certificate(context, pem)
            except ssl.SSLError as error:
                raise AccessError(
                    "the page's certificate cannot be used: expected a certificate and the private key that belongs to "
                    f"it, in PEM, without a passphrase ({error.reason or error})"
                ) from None

    async def keep_new(self) -> None:
        """Renews it until it is cancelled."""
        while True:
            await asyncio.sleep(self._every)
            try:
                self.renew()
            except AtollError as error:
                _log.warning("%s; the one from before is served on", error)


def tls_of_files(certificate: Path, key: Path | None) -> PageTls:
    """By the user's own certificate, whose key may be in the same file. Raises AccessError."""

    def pem() -> bytes:
        content = b""
        for file in (certificate, key):
            try:
                content += file.read_bytes() + b"\n" if file else b""
            except OSError as error:
                raise AccessError(f"cannot read {file}: {error.strerror}") from None
        return content

    return PageTls(pem)


def tls_of_cluster(directory: str, address: Address) -> PageTls:
    """By a certificate of the authority of the cluster in `directory`, for who opens the page at `address`.

    Raises AccessError where there is none that this user could read.
    """
    authority, hosts = load_authority(directory), _hosts(address)
    every = min(_RENEWED_SECONDS, certificate_seconds() / 3)
    return PageTls(lambda: authority.page_certificate(hosts), authority.pem, every)


def has_authority(directory: str) -> bool:
    return bool(directory) and authority_file(directory).exists()


def page_tls(
    address: Address, certificate: Path | None, key: Path | None, directory: str, insecure: bool
) -> PageTls | None:
    """How a page is served at `address`: None without TLS, as on loopback where nothing asks for it.

    `directory` is that of its cluster, where it is this user's. Raises AccessError, and AddressError where strangers
    could read along.
    """
    if certificate is not None:
        return tls_of_files(certificate, key)
    if key is not None:
        raise AccessError(f"a key ({key}) is of use with its certificate alone")
    if not address.tls and (address.is_local or insecure):
        return None
    if has_authority(directory):
        return tls_of_cluster(directory, address)
    raise AddressError(
        f"{address.host_and_port}: a page for other machines, or at tls://, needs a certificate, and no authority of "
        "the cluster's is here to sign one: give --tls-certificate and --tls-key, or --insecure on a network that "
        "nobody else reads"
    )


def _hosts(address: Address) -> list[str]:
    """The names and addresses by which a browser may come."""
    hosts = dict.fromkeys((address.host,))
    if address.is_everywhere:
        hosts = dict.fromkeys((socket.gethostname(), own_address(address.host)))
    if address.is_everywhere or address.is_local:
        hosts |= dict.fromkeys(("localhost", "127.0.0.1", "::1"))
    return list(hosts)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
