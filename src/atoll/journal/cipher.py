"""Encrypts and authenticates the files of a journal: what is in them admits to a cluster, and snapshots are pickles.

Each file has a key of its own, derived from the user's key and a random salt in the file's header. Its parts are
encrypted in order with AES-256-GCM, and their numbers are the nonces. A part that was changed, moved or copied from
another file is not read.
"""

from __future__ import annotations

import hmac
import secrets

from atoll.errors import JournalError
from atoll.security.user_key import user_key

TAG_BYTES = 16  # that a sealed part has more
_SALT_BYTES = 16
_NONCE_BYTES = 12


def journal_key() -> bytes:
    """Return the key of this user's journals. Raises AccessError."""
    return user_key("journal")


def new_salt() -> str:
    return secrets.token_hex(_SALT_BYTES)


class FileCipher:
    """Seals the parts of one file, or opens them, in order. Not both."""

    def __init__(self, key: bytes, salt: str) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(hmac.digest(key, b"file " + salt.encode(), "sha256"))
        self._invalid = InvalidTag
        self._number = 0

    def seal(self, part: bytes | memoryview, *, is_last: bool = False) -> bytes:
        """Encrypt the next part."""
        return self._aead.encrypt(self._nonce(is_last), part, None)

    def open(self, part: bytes | memoryview, *, is_last: bool = False) -> bytes:
        """Decrypt the next part. Raises JournalError if it is not the one that was sealed in this place."""
        try:
            return self._aead.decrypt(self._nonce(is_last), part, None)
        except self._invalid:
            raise JournalError("a part was changed, or written with another key") from None

    def _nonce(self, is_last: bool) -> bytes:
        self._number += 1
        return (2 * self._number + is_last).to_bytes(_NONCE_BYTES, "little")
