"""A cluster's own certificate authority, made when the cluster starts and gone with it.

It signs for roles (`roles`), and for addresses only what browsers meet (`atoll web`), which proves nothing to the
cluster. Its key is in the cluster's directory, for the engine, the controller and its user's own commands. Made with
the package `cryptography`; processes that have nothing to do with TLS do not import this module.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import AccessError
from atoll.security.roles import Role
from atoll.wire.tls.identity import Certificate, server_name

_AUTHORITY_SECONDS = 20 * 365 * 24 * 3600.0
# Certificates are valid from so long ago on: the machines' clocks differ.
_SKEW_SECONDS = 3600.0
_MOST_NAME = 64  # characters of a common name

Key = ec.EllipticCurvePrivateKey


def make_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def signing_request(key: Key, name: str) -> bytes:
    """What a joiner sends: its public key, and that it has the private one."""
    request = x509.CertificateSigningRequestBuilder().subject_name(_named(name)).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def fingerprint(certificate: bytes) -> str:
    """SHA-256 of a certificate in PEM, in hexadecimal. Raises AccessError where it is none."""
    try:
        return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()
    except ValueError:
        raise AccessError("what was sent as the cluster's authority is no certificate") from None


def received(certificate: bytes, key: Key, authority: bytes, role: str) -> Certificate:
    """What a joiner has got, with its own key. Raises AccessError where it is no certificate."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        raise AccessError("what was sent as this process's certificate is none") from None
    begins, ends = parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()
    return Certificate(certificate, key_pem(key), authority, role, begins, ends)


class Authority:
    """Signs certificates that are valid for `seconds`."""

    def __init__(self, key: Key, certificate: x509.Certificate, seconds: float = 24 * 3600.0) -> None:
        self._key = key
        self._certificate = certificate
        self.seconds = seconds
        self.pem = certificate.public_bytes(serialization.Encoding.PEM)
        self.fingerprint = certificate.fingerprint(hashes.SHA256()).hex()

    @classmethod
    def make(cls, name: str = "Atoll cluster", seconds: float = 24 * 3600.0) -> Authority:
        """A new authority, which nobody knows yet."""
        key, subject = make_key(), _named(name)
        usage = _usage(key_cert_sign=True, crl_sign=True)
        certificate = (
            _builder(subject, subject, _AUTHORITY_SECONDS)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate, seconds)

    # ---- in a file

    def save(self, file: Path) -> None:
        """For this user alone, from the moment the file exists."""
        with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(self.with_key)

    @property
    def with_key(self) -> bytes:
        """Its certificate and private key, in PEM."""
        return self.pem + key_pem(self._key)

    @classmethod
    def load(cls, file: Path, seconds: float = 24 * 3600.0) -> Authority:
        """What `save` has written. Raises AccessError where it cannot be read."""
        try:
            content = file.read_bytes()
        except OSError as error:
            raise AccessError(f"the cluster's authority in {file} cannot be read: {error}") from None
        return cls.parse(content, str(file), seconds)

    @classmethod
    def parse(cls, content: bytes, where: str, seconds: float = 24 * 3600.0) -> Authority:
        """That of `with_key`, which was found at `where`. Raises AccessError."""
        try:
            key = serialization.load_pem_private_key(content, None)
            certificate = x509.load_pem_x509_certificate(content)
        except (TypeError, ValueError) as error:
            raise AccessError(f"the cluster's authority in {where} cannot be read: {error}") from None
        if not isinstance(key, Key):
            raise AccessError(f"the cluster's authority in {where} has no key of an elliptic curve")
        return cls(key, certificate, seconds)

    # ---- certificates

    def certificate_for(self, role: Role, name: str) -> Certificate:
        """A certificate with a new key, for a process on this machine that has the authority itself."""
        key = make_key()
        return received(self._sign(key.public_key(), role, name), key, self.pem, role)

    def sign(self, request: bytes, role: Role, name: str) -> bytes:
        """The certificate for a joiner's request, in PEM. Raises AccessError for what is no request."""
        try:
            parsed = x509.load_pem_x509_csr(request)
            key = parsed.public_key()
            good = (
                parsed.is_signature_valid
                and isinstance(key, ec.EllipticCurvePublicKey)
                and key.curve.name == "secp256r1"
            )
        except Exception as error:  # cryptography has errors of many kinds for what is no request
            raise AccessError(f"this is no request for a certificate: {error}") from None
        if not good:
            raise AccessError("a request for a certificate is signed by its own key, one of P-256")
        assert isinstance(key, ec.EllipticCurvePublicKey)
        return self._sign(key, role, name)

    def page_certificate(self, hosts: Sequence[str]) -> bytes:
        """A certificate with a new key, in PEM, for who serves browsers by these names or addresses of a machine.

        It is no client's: nobody introduces himself to the cluster with it. Raises AccessError for a role's name.
        """
        key, names = make_key(), [_general_name(host) for host in hosts]
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH]
        return self._signed(key.public_key(), "Atoll page", names, purposes) + key_pem(key)

    def _sign(self, key: ec.EllipticCurvePublicKey, role: Role, name: str) -> bytes:
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        return self._signed(key, name, [x509.DNSName(server_name(role))], purposes)

    def _signed(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        names: Sequence[x509.GeneralName],
        purposes: Sequence[x509.ObjectIdentifier],
    ) -> bytes:
        certificate = (
            _builder(_named(name), self._certificate.subject, self.seconds)
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
    now = datetime.fromtimestamp(time.time(), UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(seconds=_SKEW_SECONDS))
        .not_valid_after(now + timedelta(seconds=seconds))
    )


def _named(name: str) -> x509.Name:
    printable = "".join(each if each.isprintable() else "?" for each in name)[:_MOST_NAME] or "Atoll"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, printable)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if host.endswith(server_name("")):
        raise AccessError(f"{host} is the name of a role, and of no machine")
    try:
        return x509.DNSName(host)
    except ValueError:
        raise AccessError(f"{host!r} is no name that a certificate can have") from None


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
