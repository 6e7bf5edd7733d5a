"""What a cluster on TCP is started with: its authority, and the strings that let others join it. The engine makes them.

They are files in the cluster's directory, which is its user's alone and goes with the cluster. The environment tells
the processes that the engine starts.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import SettingsError
from atoll.security.access import HOST_TOKEN_VARIABLE, TOKEN_VARIABLE, token_file
from atoll.security.join_token import JOIN_VARIABLE, JoinToken
from atoll.wire.address import Address, parse_address

if TYPE_CHECKING:  # few clusters need it
    from atoll.security.authority import Authority

CERTIFICATE_VARIABLE = "ATOLL_CERTIFICATE_SECONDS"
# An authority, with its key, that was made before the cluster; ATOLL_TOKEN and ATOLL_HOST_TOKEN then come along.
AUTHORITY_VARIABLE = "ATOLL_AUTHORITY"
# Set by `start_security` for the processes that the engine starts: the next cluster may have this authority, too.
KEPT_VARIABLE = "ATOLL_AUTHORITY_IS_KEPT"
_DAY_SECONDS = 24 * 3600.0
_LEAST_SECONDS = 1.0


def authority_file(directory: str | Path) -> Path:
    return Path(directory) / "authority.pem"


def join_file(directory: str | Path) -> Path:
    """That of clients."""
    return Path(directory) / "join"


def host_join_file(directory: str | Path) -> Path:
    return Path(directory) / "join-hosts"


def start_security(
    directory: str, listen: Address, advertise: str = "", has_agents: bool = False, has_tenants: bool = False
) -> None:
    """Tells the processes that this one starts how they prove themselves, and makes an authority where they need one.

    `advertise` is the address that others know the controller by; "": where it listens, or what this machine is reached
    by where that is everywhere. Without TLS, host agents bring the token that the user has chosen for hosts, or for
    all. With tenants, clients always bring a token. Raises AccessError, SettingsError, AddressError, OSError.
    """
    os.environ.pop(JOIN_VARIABLE, None)  # of another cluster
    given = os.environ.pop(AUTHORITY_VARIABLE, "") if listen.tls else ""
    if has_tenants and not os.environ.get(TOKEN_VARIABLE):
        token = os.environ[TOKEN_VARIABLE] = secrets.token_urlsafe(32)
        with open(os.open(token_file(directory), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as out:
            out.write(token)
    if not given and (not has_agents or listen.tls):
        os.environ.pop(HOST_TOKEN_VARIABLE, None)
        if not listen.is_unix or os.environ.get(TOKEN_VARIABLE):
            os.environ[HOST_TOKEN_VARIABLE] = secrets.token_urlsafe(32)
    if not listen.tls:
        return
    from atoll.security.authority import Authority

    if given:
        authority = Authority.parse(given.encode(), AUTHORITY_VARIABLE, certificate_seconds())
        os.environ.setdefault(HOST_TOKEN_VARIABLE, secrets.token_urlsafe(32))
    else:
        authority = Authority.make(seconds=certificate_seconds())
    os.environ[KEPT_VARIABLE] = "1" if given else ""
    authority.save(authority_file(directory))
    token = os.environ.setdefault(TOKEN_VARIABLE, "") or secrets.token_urlsafe(32)
    os.environ[TOKEN_VARIABLE] = token
    known = advertised(listen, advertise)
    JoinToken(known, authority.fingerprint, token).save(join_file(directory))
    hosts = JoinToken(known, authority.fingerprint, os.environ[HOST_TOKEN_VARIABLE])
    hosts.save(host_join_file(directory))
    os.environ[JOIN_VARIABLE] = str(hosts)


def load_authority(directory: str | Path) -> Authority:
    """The one that `start_security` has made. Raises AccessError, SettingsError."""
    from atoll.security.authority import Authority

    return Authority.load(authority_file(directory), certificate_seconds())


def certificate_seconds() -> float:
    """For how long certificates are valid. Raises SettingsError."""
    text = os.environ.get(CERTIFICATE_VARIABLE, "")
    try:
        seconds = float(text or _DAY_SECONDS)
    except ValueError:
        seconds = 0.0
    if not _LEAST_SECONDS <= seconds < 10 * 365 * 24 * 3600:
        raise SettingsError(f"{CERTIFICATE_VARIABLE} is {text!r}: expected seconds, such as 86400")
    return seconds


def advertised(listen: Address, advertise: str = "") -> Address:
    """The address by which others know what listens at `listen`: HOST, HOST:PORT, or "" for what is most likely.

    Several, separated by commas, are for networks that reach it by different addresses. Raises AddressError.
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
    """The address of this machine towards the rest of the world; its name where it has no such."""
    is_v6 = ":" in everywhere
    with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("2001:db8::1" if is_v6 else "192.0.2.1", 9))  # for documentation: nothing is sent there
            return str(sock.getsockname()[0])
        except OSError:
            return own_address() if is_v6 else socket.gethostname()
