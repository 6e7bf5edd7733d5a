"""The certificate authority of a cluster, created when the cluster starts and deleted with it.

The CA signs certificates for roles (see `roles`). For host names and addresses it signs only the certificates
that `atoll web` shows to browsers, which the cluster does not accept. The engine, the controller and the user's own
commands read the key from the cluster's directory. Only processes that use TLS import this module, because
`cryptography` is slow to import.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.atomic_files import write_atomically
from atoll.errors import AccessError
from atoll.security.roles import Role
from atoll.wire.tls.identity import Certificate, server_name

_AUTHORITY_SECONDS = 20 * 365 * 24 * 3600.0
# A clock may be set back, by any amount, after a certificate was issued. The operator must be able to stop the cluster.
_VALID_FROM = datetime(1970, 1, 1, tzinfo=UTC)
_SKEW_SECONDS = 3600.0  # certificates for browsers, which limit their duration, are valid from this long ago
_MAX_NAME = 64  # bytes of a common name in UTF-8

Key = ec.EllipticCurvePrivateKey


def make_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def signing_request(key: Key, name: str) -> bytes:
    """Return a certificate signing request in PEM: the public key, and proof that the joiner holds the private key."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def with_fingerprint(pem: bytes) -> tuple[bytes, str]:
    """Return the certificate of a CA, encoded again, and its SHA-256 in hexadecimal.

    Only the returned certificate has this fingerprint: `pem` can contain further ones, or text that OpenSSL reads in
    another way. Raises AccessError if `pem` is not exactly one certificate.
    """
    parsed = _only_certificate(pem, "certificate of the cluster's CA")
    return parsed.public_bytes(serialization.Encoding.PEM), parsed.fingerprint(hashes.SHA256()).hex()


def signed_certificate(certificate: bytes, key: Key, authority: bytes, role: str) -> Certificate:
    """Combine a signed certificate with the joiner's `key`. Raises AccessError if `certificate` is invalid."""
    parsed = _only_certificate(certificate, "certificate for this process")
    begins, ends = parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()
    return Certificate(certificate, key_pem(key), authority, role, begins, ends)


def _only_certificate(pem: bytes, what: str) -> x509.Certificate:
    try:
        found = x509.load_pem_x509_certificates(pem)
    except (ValueError, x509.InvalidVersion):
        raise AccessError(f"the controller sent an invalid {what}") from None
    if len(found) != 1:
        raise AccessError(f"the controller sent an invalid {what}: {len(found)} certificates, expected one")
    return found[0]


class CertificateAuthority:
    """A certificate authority. Its certificates are valid for `seconds`."""

    def __init__(self, key: Key, certificate: x509.Certificate, seconds: float = 24 * 3600.0) -> None:
        self._key = key
        self._certificate = certificate
        self.seconds = seconds
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.fingerprint = certificate.fingerprint(hashes.SHA256()).hex()

    @classmethod
    def make(cls, name: str = "Atoll cluster", seconds: float = 24 * 3600.0) -> CertificateAuthority:
        """Create a CA with a new key."""
        key, subject = make_key(), _named(name)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(subject, subject, _AUTHORITY_SECONDS)
            .not_valid_before(_VALID_FROM)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate, seconds)

    # ---- in a file

    def save(self, file: Path) -> None:
        """Write the certificate and the key to a new file that only this user can read."""
        write_atomically(file, self.with_key, replace=False)

    @property
    def with_key(self) -> bytes:
        """Return the certificate and the private key, in PEM."""
        return self.pem + key_pem(self._key)

    @classmethod
    def load(cls, file: Path, seconds: float = 24 * 3600.0) -> CertificateAuthority:
        """Read the file that `save` wrote. Raises AccessError if it cannot be read."""
        try:
            content = file.read_bytes()
        except OSError as error:
            raise AccessError(f"cannot read the cluster's CA in {file}: {error}") from None
        return cls.parse(content, str(file), seconds)

    @classmethod
    def parse(cls, content: bytes, where: str, seconds: float = 24 * 3600.0) -> CertificateAuthority:
        """Parse the content of `with_key`. Errors name `where` as its source. Raises AccessError."""
        try:
            key = serialization.load_pem_private_key(content, None)
            certificate = x509.load_pem_x509_certificate(content)
        except (TypeError, ValueError) as error:
            raise AccessError(f"cannot read the cluster's CA in {where}: {error}") from None
        if not isinstance(key, Key):
            raise AccessError(f"the cluster's CA in {where} does not have an elliptic-curve key")
        return cls(key, certificate, seconds)

    # ---- certificates

    def certificate_for(self, role: Role, name: str) -> Certificate:
        """Return a certificate with a new key, for a process on this machine that holds the CA."""
        key = make_key()
        return signed_certificate(self._sign(key.public_key(), role, name), key, self.pem, role)

    def sign(self, request: bytes, role: Role, name: str) -> bytes:
        """Return the certificate for a joiner's request, in PEM. Raises AccessError if the request is invalid."""
        try:
            parsed = x509.load_pem_x509_csr(request)
            key = parsed.public_key()
            good = (
                parsed.is_signature_valid
                and isinstance(key, ec.EllipticCurvePublicKey)
                and key.curve.name == "secp256r1"
            )
        except Exception as error:  # cryptography raises many types of errors for invalid requests
            raise AccessError(f"invalid certificate signing request: {error}") from None
        if not good:
            raise AccessError("a certificate signing request must be signed with its own P-256 key")
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return self._sign(key, role, name)

    def page_certificate(self, hosts: Sequence[str]) -> bytes:
        """Return a certificate with a new key, in PEM, for a web server with these host names or addresses.

        The cluster accepts the certificate for no role. Raises AccessError for a name that belongs to a role.
        """
        key, names = make_key(), [_general_name(host) for host in hosts]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        begins = _now() - timedelta(seconds=_SKEW_SECONDS)
        return self._signed(key.public_key(), "Atoll page", names, purposes, begins) + key_pem(key)

    def _sign(self, key: ec.EllipticCurvePublicKey, role: Role, name: str) -> bytes:
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return self._signed(key, name, [x509.DNSName(server_name(role))], purposes)

    def _signed(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        names: Sequence[x509.GeneralName],
        purposes: Sequence[x509.ObjectIdentifier],
        begins: datetime = _VALID_FROM,
    ) -> bytes:
        certificate = (
            _builder(_named(name), self._certificate.subject, self.seconds)
            .not_valid_before(begins)
            .public_key(key)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM)


def _builder(subject: x509.Name, issuer: x509.Name, seconds: float) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_after(_now() + timedelta(seconds=seconds))
    )


def _now() -> datetime:
    return datetime.fromtimestamp(time.time(), UTC)


def _named(name: str) -> x509.Name:
    printable = "".join(each if each.isprintable() else "?" for each in name[:_MAX_NAME])
    short = printable.encode()[:_MAX_NAME].decode(errors="ignore") or "Atoll"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, short)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if host.endswith(server_name("")):
        raise AccessError(f"{host} is the name of a role, not of a machine")
    try:
        return x509.DNSName(host)
    except ValueError:
        raise AccessError(f"{host!r} is not a valid host name for a certificate") from None


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )
