"""The string that lets a process join a cluster: address, fingerprint of the authority, and token.

    atoll://HOST:PORT/FINGERPRINT/TOKEN

Of a controller that is reached on several networks there are several HOST:PORT, separated by commas. The fingerprint is
SHA-256 in hexadecimal, of the authority's certificate. Who has the string can join in the role that its token is for,
so it is kept like a password: in a file for its user alone, or in the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from atoll.errors import AccessError, AddressError
from atoll.wire.address import Address, parse_address

JOIN_VARIABLE = "ATOLL_JOIN"
_SCHEME = "atoll://"
_FINGERPRINT = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class JoinToken:
    """`address` is with TLS."""

    address: Address
    fingerprint: str
    token: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.address.host_and_port}/{self.fingerprint}/{quote(self.token, safe='')}"

    def __repr__(self) -> str:
        return f"JoinToken({self.address})"  # without the token

    def save(self, file: Path) -> None:
        """Writes it for this user alone, in the place of what was there. Raises OSError."""
        partial = file.with_name(file.name + ".partial")
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w") as out:
            out.write(f"{self}\n")
        partial.rename(file)


def read_join(text: str) -> JoinToken:
    """Reads a join token, or the file that one is in. Raises AccessError; its text never has the token."""
    text = text.strip()
    if not text.startswith(_SCHEME):
        try:
            content = Path(text).expanduser().read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise AccessError(
                f"{text[:200]!r} is neither a join token (atoll://HOST:PORT/FINGERPRINT/TOKEN) nor a file with one: "
                f"{reason}"
            ) from None
        if not content.startswith(_SCHEME):
            raise AccessError(f"there is no join token in {text}: one begins with {_SCHEME}")
        text = content
    where, _, rest = text.removeprefix(_SCHEME).partition("/")
    found, _, token = rest.partition("/")
    try:
        address = parse_address(where).secured()
    except AddressError:
        raise AccessError(f"a join token begins with {_SCHEME}HOST:PORT/, and this one with {where[:200]!r}") from None
    if not _FINGERPRINT.fullmatch(found) or not token:
        raise AccessError("a join token ends with /FINGERPRINT/TOKEN: this one was cut, or is not one")
    return JoinToken(address, found, unquote(token))


def join_of_environment() -> JoinToken | None:
    """That of ATOLL_JOIN. Raises AccessError where it cannot be read."""
    text = os.environ.get(JOIN_VARIABLE, "")
    return read_join(text) if text else None
