"""Names of published arrays, and the patterns in the file of tenants that grant access to them.

A name belongs to a tenant. Other tenants refer to it as `tenant/name`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from atoll.errors import SettingsError, invalid

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_PATTERN = re.compile(r"[A-Za-z0-9_.*-]{1,128}")
SEPARATOR = "/"
MAX_PATTERNS = 256


def check_array_name(name: str) -> str:
    """Return `name`. Raise INVALID_ARGUMENT if it is not a valid name of published arrays, without a tenant."""
    if not _NAME.fullmatch(name):
        raise invalid(
            f"invalid name of arrays {name[:150]!r}: expected at most 128 letters, digits, '_', '-' and '.', the first "
            "of which is a letter or digit"
        )
    return name


def split_name(text: str, tenant: str) -> tuple[str, str]:
    """Return the owner and the name of `tenant/name`, or of a `name` of `tenant`. Raise INVALID_ARGUMENT."""
    owner, separator, name = text.rpartition(SEPARATOR)
    if not separator:
        return tenant, check_array_name(text)
    return check_array_name(owner), check_array_name(name)


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns matches the name. In a pattern, `*` stands for any characters."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_patterns(key: str, patterns: tuple[str, ...], has_owner: bool) -> None:
    """Raise SettingsError if one of the patterns is invalid. With `has_owner`, they have the form `tenant/pattern`."""
    if len(patterns) > MAX_PATTERNS:
        raise SettingsError(f"{key} has {len(patterns)} patterns: at most {MAX_PATTERNS} are allowed")
    for pattern in patterns:
        owner, separator, name = pattern.rpartition(SEPARATOR)
        parts = (owner, name) if has_owner else (name,)
        if bool(separator) != has_owner or not all(map(_PATTERN.fullmatch, parts)):
            form = "tenant/name, such as trainer/policy-*" if has_owner else "a name, such as policy-*"
            raise SettingsError(f"{key} has the invalid pattern {pattern[:150]!r}: expected {form}")
