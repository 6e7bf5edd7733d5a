"""The certificate authority (CA), tokens and join tokens with which a cluster starts.

The engine writes them to files in the cluster's private directory, which is deleted with the cluster, and passes them
to the processes that it starts in environment variables. With `atoll up --authority FILE`, the CA and the tokens
come from a file that outlives the cluster, so that hosts that wait for the next cluster (`atoll host --stay`) and join
tokens stay valid.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from atoll.atomic_files import write_atomically
from atoll.cluster.environment_variables import (
    AUTHORITY,
    AUTHORITY_IS_KEPT,
    CERTIFICATE_SECONDS,
    HOST_TOKEN,
    JOIN,
    TOKEN,
)
from atoll.decodable import decodable
from atoll.errors import AccessError, SettingsError
from atoll.security.access import token_file
from atoll.security.join_token import JoinToken, host_join_file, join_file
from atoll.wire.address import Address, parse_address

if TYPE_CHECKING:  # few clusters need it
    from atoll.security.certificate_authority import CertificateAuthority

_DAY_SECONDS = 24 * 3600.0


def authority_file(directory: str | Path) -> Path:
    return Path(directory) / "authority.pem"


def start_security(
    directory: str,
    listen: Address,
    advertise: str = "",
    has_agents: bool = False,
    has_tenants: bool = False,
    standby: str = "",
) -> None:
    """Create the cluster's credentials, and pass them to child processes in the environment.

    `advertise` is the address at which others reach the controller; see `advertised`. Without TLS, host agents use the
    token that the user has chosen for hosts, or that for all. With tenants, clients always need a token. `standby` is
    the address of the controller that a standby follows: its join tokens also contain this address, and so lead to the
    cluster at once. Raises AccessError, SettingsError, AddressError or OSError.
    """
    os.environ.pop(JOIN.variable, None)  # of another cluster
    given = os.environ.pop(AUTHORITY.variable, "") if listen.tls else ""
    if has_tenants and not TOKEN.text():
        token = os.environ[TOKEN.variable] = secrets.token_urlsafe(_TOKEN_BYTES)
        write_atomically(token_file(directory), token.encode(), replace=False)
    if not given and (not has_agents or listen.tls):
        os.environ.pop(HOST_TOKEN.variable, None)
        if not listen.is_unix or TOKEN.text():
            os.environ[HOST_TOKEN.variable] = secrets.token_urlsafe(_TOKEN_BYTES)
    if not listen.tls:
        return
    from atoll.security.certificate_authority import CertificateAuthority

    if given:
        authority = CertificateAuthority.parse(given.encode(), AUTHORITY.variable, certificate_seconds())
        os.environ.setdefault(HOST_TOKEN.variable, secrets.token_urlsafe(_TOKEN_BYTES))
    else:
        authority = CertificateAuthority.make(seconds=certificate_seconds())
    os.environ[AUTHORITY_IS_KEPT.variable] = "1" if given else ""
    authority.save(authority_file(directory))
    token = os.environ.setdefault(TOKEN.variable, "") or secrets.token_urlsafe(_TOKEN_BYTES)
    os.environ[TOKEN.variable] = token
    own = advertised(listen, advertise)
    known = _with_others(own, parse_address(standby)) if standby else own
    JoinToken(known, authority.fingerprint, token).save(join_file(directory))
    hosts = JoinToken(own, authority.fingerprint, os.environ[HOST_TOKEN.variable])
    replace(hosts, address=known).save(host_join_file(directory))
    os.environ[JOIN.variable] = str(hosts)


def _with_others(own: Address, others: Address) -> Address:
    """Return an address of `own`, and then of `others`, each once."""
    first, *rest = dict.fromkeys((*own.each, *others.secured().each))
    return replace(first, others=tuple(rest))


def load_certificate_authority(directory: str | Path) -> CertificateAuthority:
    """Load the CA that `start_security` saved. Raises AccessError or SettingsError."""
    from atoll.security.certificate_authority import CertificateAuthority

    return CertificateAuthority.load(authority_file(directory), certificate_seconds())


def certificate_seconds() -> float:
    """Return the validity of certificates in seconds. Raises SettingsError."""
    return CERTIFICATE_SECONDS.get() or _DAY_SECONDS


def advertised(listen: Address, advertise: str = "") -> Address:
    """Return the address at which others reach the server that listens at `listen`.

    `advertise` is HOST, HOST:PORT, or several of these separated by commas for different networks. If it is "", the
    address is `listen`, or this machine's own address if `listen` covers all interfaces. Raises AddressError.
    """
    first, comma, rest = advertise.partition(",")
    if comma:
        known, others = advertised(listen, first.strip()), advertised(listen, rest.strip())
        return replace(known, others=others.each)
    if advertise:
        host = advertise.removeprefix("[").removesuffix("]")
        if ":" not in advertise or (advertise.startswith("[") and advertise.endswith("]")):
            return replace(listen, host=host)
        return replace(parse_address(advertise), tls=listen.tls)
    return replace(listen, host=own_address(listen.host)) if listen.is_everywhere else listen


def own_address(everywhere: str = "0.0.0.0") -> str:
    """Return the address that this machine uses towards other networks, or its host name if it has no such address."""
    is_v6 = ":" in everywhere
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("2001:db8::1" if is_v6 else "192.0.2.1", 9))  # documentation addresses; nothing is sent
            return str(sock.getsockname()[0])
        except OSError:
            return own_address() if is_v6 else socket.gethostname()


_TOKEN_BYTES = 32


class _Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    authority: str  # certificate and key, in PEM
    token: str
    host_token: str


def kept_environment(file: Path, token: str = "", *, must_exist: bool = False) -> dict[str, str]:
    """Return the environment variables for a cluster with the credentials in `file`, which is created if it is missing.

    With `must_exist`, a missing file is an error: the cluster exists and has its file elsewhere. Raises AccessError if
    the file cannot be read or written or if other users can access it, and SettingsError if `token` is neither "" nor
    the token in the file.
    """
    if must_exist and not file.exists():
        raise AccessError(
            f"{file} does not exist: copy the controller's --authority file to this machine, with mode 0600"
        )
    if not file.exists():
        try:
            content = msgspec.json.format(msgspec.json.encode(_new_credentials()))
            write_atomically(file, content, durable=True, replace=False)
        except FileExistsError:  # another command created it at the same time
            pass
        except OSError as error:
            raise AccessError(f"cannot keep the cluster's CA in {file}: {error.strerror}") from None
    environment = _environment(_read_file(file))
    if token and token != environment[TOKEN.variable]:
        raise SettingsError(f"ATOLL_TOKEN is not the token in {file}: unset it, or use another file")
    return environment


def new_environment() -> dict[str, str]:
    """Return the environment variables for a cluster with a new CA and new tokens."""
    return _environment(_new_credentials())


def _new_credentials() -> _Credentials:
    from atoll.security.certificate_authority import CertificateAuthority

    token, host_token = secrets.token_urlsafe(_TOKEN_BYTES), secrets.token_urlsafe(_TOKEN_BYTES)
    return _Credentials(CertificateAuthority.make().with_key.decode(), token, host_token)


def _read_file(file: Path) -> _Credentials:
    try:
        is_open, content = bool(file.stat().st_mode & 0o077), file.read_bytes()
    except OSError as error:
        raise AccessError(f"cannot read the cluster's CA in {file}: {error.strerror}") from None
    if is_open:
        raise AccessError(f"other users can read or write {file}, which holds the cluster's CA: chmod 600 it")
    try:
        return msgspec.json.decode(content, type=decodable(_Credentials))
    except msgspec.MsgspecError as error:
        raise AccessError(f"{file} was not written by `atoll up --authority`: {error}") from None


def _environment(credentials: _Credentials) -> dict[str, str]:
    return {
        AUTHORITY.variable: credentials.authority,
        TOKEN.variable: credentials.token,
        HOST_TOKEN.variable: credentials.host_token,
    }
