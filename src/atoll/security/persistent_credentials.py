"""A cluster's authority and tokens in a file that outlives it: the next cluster has the same, and its join tokens.

For hosts that wait for the next cluster at the same address (`atoll host --stay`), and for whoever has a join token.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from atoll.errors import AccessError, SettingsError
from atoll.security.access import HOST_TOKEN_VARIABLE, TOKEN_VARIABLE
from atoll.security.start_security import AUTHORITY_VARIABLE

_TOKEN_BYTES = 32


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    authority: str  # certificate and key, in PEM
    token: str
    host_token: str


def kept_environment(file: Path, token: str = "") -> dict[str, str]:
    """The environment of a cluster with what is kept in `file`, which is made where it does not exist.

    Raises AccessError where it cannot be read or written, or where others can read it; SettingsError where the user
    wants another `token` than that which is kept.
    """
    if not file.exists():
        try:
            _make(file)
        except FileExistsError:  # by another command, just now
            pass
        except OSError as error:
            raise AccessError(f"cannot keep the cluster's authority in {file}: {error.strerror}") from None
    environment = _environment(_read(file))
    if token and token != environment[TOKEN_VARIABLE]:
        raise SettingsError(f"ATOLL_TOKEN is not the token that is kept in {file}: unset it, or use another file")
    return environment


def _make(file: Path) -> None:
    """All of it at once, and not in the place of another. Raises OSError."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        with open(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(_new())))
        os.link(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def new_environment() -> dict[str, str]:
    """The environment of a cluster with an authority and tokens that nobody knows yet."""
    return _environment(_new())


def _new() -> _Kept:
    from atoll.security.authority import Authority

    token, host_token = secrets.token_urlsafe(_TOKEN_BYTES), secrets.token_urlsafe(_TOKEN_BYTES)
    return _Kept(Authority.make().with_key.decode(), token, host_token)


def _read(file: Path) -> _Kept:
    try:
        is_open, content = bool(file.stat().st_mode & 0o077), file.read_bytes()
    except OSError as error:
        raise AccessError(f"cannot read the cluster's authority in {file}: {error.strerror}") from None
    if is_open:
        raise AccessError(f"others can read or write {file}, which has the cluster's authority: chmod 600 it")
    try:
        return msgspec.json.decode(content, type=_Kept)
    except msgspec.MsgspecError as error:
        raise AccessError(f"{file} is no file of `atoll up --authority`: {error}") from None


def _environment(kept: _Kept) -> dict[str, str]:
    return {AUTHORITY_VARIABLE: kept.authority, TOKEN_VARIABLE: kept.token, HOST_TOKEN_VARIABLE: kept.host_token}
