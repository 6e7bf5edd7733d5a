"""TLS for browsers and scrapers, with the user's own certificate or with one that the cluster's CA signs.

The CA signs the page's certificate for the page's host, as browsers require. That certificate has no role (see
`security`), so it gives no access to the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from atoll.errors import AccessError, AddressError, AtollError
from atoll.security.start_security import authority_file, certificate_seconds, load_certificate_authority, own_address
from atoll.wire.address import Address
from atoll.wire.tls.identity import use_certificate

_log = logging.getLogger(__name__)

# Interval for reading a certificate that its owner replaces, as certbot does.
_RENEWED_SECONDS = 3600.0


class PageTls:
    """The TLS context of a page. `pem()` returns the current certificate with its key, and is called at each renewal.

    `authority` is the certificate of the cluster's CA in PEM, if that has signed the page's certificate.
    """

    def __init__(self, pem: Callable[[], bytes], authority: bytes = b"", every: float = _RENEWED_SECONDS) -> None:
        self.authority = authority
        self._pem = pem
        self._every = every
        self.context = _context()
        self.renew()

    def renew(self) -> None:
        """Load the current certificate; open connections keep the old one.

        Raises AccessError for an unusable certificate, and keeps serving with the old one.
        """
        pem = self._pem()
        for context in (_context(), self.context):  # test the certificate before the context in use loads it
            try:
                use_certificate(context, pem)
            except ssl.SSLError as error:
                raise AccessError(
                    "cannot use the page's certificate: expected a certificate and its private key, in PEM, without a "
                    f"passphrase ({error.reason or error})"
                ) from None

    async def keep_new(self) -> None:
        """Renew the certificate periodically until canceled."""
        while True:
            await asyncio.sleep(self._every)
            try:
                self.renew()
            except AtollError as error:
                _log.warning("%s; continuing with the previous certificate", error)


def tls_of_files(certificate: Path, key: Path | None) -> PageTls:
    """Return TLS with the user's own certificate, whose key may be in the same file. Raises AccessError."""

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
    """Return TLS with a certificate signed by the CA of the cluster in `directory`, for a page at `address`.

    Raises AccessError if this user cannot read the CA.
    """
    authority, hosts = load_certificate_authority(directory), _hosts(address)
    every = min(_RENEWED_SECONDS, certificate_seconds() / 3)
    return PageTls(lambda: authority.page_certificate(hosts), authority.pem, every)


def page_tls(
    address: Address, certificate: Path | None, key: Path | None, directory: str, insecure: bool
) -> PageTls | None:
    """Return the TLS for a page at `address`, or None to serve without TLS, which is the default on loopback.

    `directory` is that of the cluster if it belongs to this user. Raises AccessError for an unusable certificate, and
    AddressError if other machines could read unencrypted traffic.
    """
    if certificate is not None:
        return tls_of_files(certificate, key)
    if key is not None:
        raise AccessError(f"--tls-key {key} needs --tls-certificate")
    if not address.tls and (address.is_local or insecure):
        return None
    if directory and authority_file(directory).exists():
        return tls_of_cluster(directory, address)
    raise AddressError(
        f"{address.host_and_port}: a page for other machines, or at tls://, needs a certificate: give "
        "--tls-certificate and --tls-key, or --insecure on a trusted network. To get one from the cluster's CA, run "
        "this command as the user who ran `atoll up`, on that machine"
    )


def _hosts(address: Address) -> list[str]:
    """Return the names and addresses under which browsers may reach the page."""
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
