"""The join token: a string with which a process joins a cluster.

    atoll://HOST:PORT/FINGERPRINT/TOKEN

If the controller is reachable on several networks, the string has several HOST:PORT, separated by commas. FINGERPRINT
is the SHA-256 of the CA's certificate in hexadecimal. Anyone who has the string can join in the role of its
token, so keep it like a password: in a file that only its user can read, or in the environment.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.directories import expand_home
from atoll.cluster.environment_variables import JOIN
from atoll.errors import AccessError, AddressError
from atoll.wire.address import Address, parse_address

_SCHEME = "atoll://"
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


class JoinToken(msgspec.Struct, frozen=True):
    """A parsed join token. Its `address` uses TLS."""

    address: Address
    fingerprint: str
    token: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.address.host_and_port}/{self.fingerprint}/{quote(self.token, safe='')}"

    def __repr__(self) -> str:
        return f"JoinToken({self.address})"  # without the token

    def save(self, file: Path) -> None:
        """Write the string to `file`, replacing it, readable by this user only. Raises OSError."""
        write_atomically(file, f"{self}\n".encode())


def join_file(directory: str | Path) -> Path:
    """Return the path of the join token of clients in the cluster's private directory."""
    return Path(directory) / "join"


def host_join_file(directory: str | Path) -> Path:
    """Return the path of the join token of hosts in the cluster's private directory."""
    return Path(directory) / "join-hosts"


def read_join(text: str) -> JoinToken:
    """Parse a join token, or read the file that contains one. Raises AccessError, whose text never has the token."""
    text = text.strip()
    if not text.startswith(_SCHEME):
        try:
            content = expand_home(text).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            where = "" if text.startswith(("/", "~")) else " in the working directory; give an absolute path"
            raise AccessError(
                f"{text[:200]!r} is neither a join token (atoll://HOST:PORT/FINGERPRINT/TOKEN) nor a file with one: "
                f"{reason}{where}"
            ) from None
        if not content.startswith(_SCHEME):
            raise AccessError(f"{text} does not contain a join token, which begins with {_SCHEME}")
        text = content
    where, _, rest = text.removeprefix(_SCHEME).partition("/")
    found, _, token = rest.partition("/")
    try:
        address = parse_address(where).secured()
    except AddressError:
        raise AccessError(f"a join token begins with {_SCHEME}HOST:PORT/, but this one with {where[:200]!r}") from None
    if not _FINGERPRINT.fullmatch(found) or not token:
        raise AccessError("a join token ends with /FINGERPRINT/TOKEN: this one was cut off, or is not a join token")
    return JoinToken(address, found, unquote(token))


def join_of_environment() -> JoinToken | None:
    """Return the join token of ATOLL_JOIN, or None if it is not set. Raises AccessError if it is invalid."""
    text = JOIN.text()
    return read_join(text) if text else None
