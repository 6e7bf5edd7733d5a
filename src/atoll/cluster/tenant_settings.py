"""The tenants of a cluster, from a file in TOML.

    [tenant.research]
    token = "/etc/atoll/research.token"
    share = 3

    [tenant.operations]
    token = "..."
    role = "operator"
    priority = 1

A tenant authenticates with its token, of which only the hash is stored. The key `token` is the token itself, or the
path of a file with it if it begins with /, ~ or a dot. Without a file there is one tenant, `default`, with all
permissions.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from atoll.atomic_files import write_atomically
from atoll.cluster.array_names import SEPARATOR, check_patterns, matches
from atoll.cluster.directories import expand_home
from atoll.cluster.sandbox.grants import check_grant
from atoll.cluster.validation_errors import split_place
from atoll.decodable import decodable
from atoll.errors import SettingsError
from atoll.quantities import counted, human_bytes, parse_bytes

DEFAULT_NAME = "default"
TENANT_MARK = "{tenant}"  # stands for the name of each tenant in the name of a join token file
MAX_TENANTS = 4096
MAX_SHARE = 1_000_000.0
MAX_PRIORITY = 1_000_000
MAX_RESERVE = 50  # percent of device time
MIN_TOKEN = 16  # characters, since an attacker who has the hash could guess a short token offline
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HASH_PREFIX = b"atoll tenant token\0"

_Share = Annotated[float, msgspec.Meta(gt=0, le=MAX_SHARE)]
_Priority = Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]
_Limit = Annotated[int, msgspec.Meta(ge=0)]
_Percent = Annotated[int, msgspec.Meta(ge=0, le=MAX_RESERVE)]


class TenantRole(StrEnum):
    """The role of a tenant, which has the permissions of `protocol.permissions`."""

    USER = "user"
    OPERATOR = "operator"


class TenantSettings(msgspec.Struct, frozen=True):
    """A tenant. Limits apply to all of its sessions together; 0 stands for no limit."""

    name: str
    token_hash: str = ""  # "" if nobody can authenticate as this tenant
    share: _Share = 1.0  # of device time, relative to other tenants of its priority
    priority: _Priority = 0  # its work precedes all uncommitted work of lower priorities
    role: TenantRole = TenantRole.USER
    memory: _Limit = 0  # bytes on each device
    total_memory: _Limit = 0  # bytes on all devices
    disk: _Limit = 0  # bytes of the files of its published arrays
    devices: _Limit = 0  # in the slices of its sessions
    sessions: _Limit = 0
    launches: _Limit = 0  # in flight
    uploads: _Limit = 0  # buffers that no launch has used yet
    compiles: _Limit = 0  # functions that are being compiled
    # Directories of the hosts that its sessions' Python processes see: see `cluster.sandbox`.
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    reserve: _Percent = 0  # of device time that it gets even if higher priorities have work
    # Limits while other tenants have sessions: see `state.rates`.
    launch_rate: _Limit = 2000  # launches per second
    compile_seconds: _Limit = 60  # seconds of compilations per minute
    upload_rate: _Limit = 1 << 30  # bytes per second
    # Limit of one run while other tenants wait for its devices: see `controller.islands.overruns`.
    run_seconds: _Limit = 600
    # Whether its sessions may load shared libraries with FFI handlers into workers, where they can do anything.
    native_code: bool = False
    # Patterns of the names under which its sessions may publish arrays, and of the arrays of other tenants that they
    # may read, as `tenant/name`: see `cluster.array_names`.
    publish: tuple[str, ...] = ("*",)
    subscribe: tuple[str, ...] = ()


# The limits that can change while programs run, with their texts.
LIMIT_TEXTS: dict[str, Callable[[int], str]] = {
    "memory": lambda value: f"{human_bytes(value)} per device",
    "total_memory": lambda value: f"{human_bytes(value)} in total",
    "disk": lambda value: f"{human_bytes(value)} in files",
    "devices": lambda value: counted(value, "device"),
    "sessions": lambda value: counted(value, "session"),
    "launches": lambda value: counted(value, "launch"),
    "uploads": lambda value: counted(value, "upload"),
    "compiles": lambda value: counted(value, "compile"),
    "reserve": lambda value: f"reserve {value} %",
    "launch_rate": lambda value: f"{counted(value, 'launch')} per second",
    "compile_seconds": lambda value: f"{value} s of compilation per minute",
    "upload_rate": lambda value: f"{human_bytes(value)} of uploads per second",
    "run_seconds": lambda value: f"{value} s per run",
}


def limit_text(name: str, value: int) -> str:
    """Describe the limit with this name in `TenantSettings`, such as "256.0 MiB per device" or "1 session"."""
    if not value:
        return "no reserve" if name == "reserve" else f"no limit of {name.replace('_', ' ')}"
    return LIMIT_TEXTS[name](value)


# The only tenant of a cluster without a file of tenants, and the tenant of the user who started a cluster with one.
DEFAULT_TENANT = TenantSettings(DEFAULT_NAME, role=TenantRole.OPERATOR)


def may_read(reader: TenantSettings, owner: str, name: str) -> bool:
    """Return whether a tenant may read the arrays that tenant `owner` publishes under this name."""
    return owner == reader.name or matches(reader.subscribe, f"{owner}{SEPARATOR}{name}")


def token_hash(token: str) -> str:
    """Return the stored hash of a token."""
    return hashlib.sha256(_HASH_PREFIX + token.encode()).hexdigest()


def whose(tenants: Iterable[TenantSettings], presented: str) -> str | None:
    """Return the name of the tenant whose token has the hash `presented`, None if there is no such tenant."""
    if not presented:
        return None
    found = None
    for tenant in tenants:
        if tenant.token_hash and hmac.compare_digest(tenant.token_hash, presented):
            found = tenant.name
    return found


def keep_tenants(directory: str, tenants: tuple[TenantSettings, ...]) -> None:
    """Write the tenants to the cluster's directory for its processes, since other users can read command lines."""
    write_atomically(_kept(directory), msgspec.json.encode(tenants), replace=False)


def persisted_tenants(directory: str) -> tuple[TenantSettings, ...]:
    """Return the tenants that `keep_tenants` has written to the directory, if any."""
    if not directory:
        return ()
    try:
        return msgspec.json.decode(_kept(directory).read_bytes(), type=decodable(tuple[TenantSettings, ...]))
    except FileNotFoundError:
        return ()


def _kept(directory: str) -> Path:
    return Path(directory) / "tenants"


def check_tenant_name(name: str) -> str:
    """Return `name`. Raise SettingsError if it is not a valid name of a tenant."""
    if not _NAME.fullmatch(name):
        raise SettingsError(
            f"invalid tenant name {name[:100]!r}: expected at most 64 letters, digits, '_', '-' and '.', the first of "
            "which is a letter or digit"
        )
    return name


_AMOUNTS = ("memory", "total_memory", "disk", "upload_rate")  # also as text, such as 8GiB
# A tenant in a file: it has a token in place of a name and a hash.
_Entry: Any = msgspec.defstruct(
    "_Entry",
    [
        ("token", str, ""),
        *(
            (each.name, int | str if each.name in _AMOUNTS else each.type, each.default)
            for each in msgspec.structs.fields(TenantSettings)
            if each.name not in ("name", "token_hash")
        ),
    ],
    forbid_unknown_fields=True,
)
_File: Any = msgspec.defstruct(
    "_File",
    # The entries are checked one by one, since an error of msgspec does not name the key of a table.
    [("tenant", Annotated[dict[str, dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_TENANTS)])],
    forbid_unknown_fields=True,
)


def read_tenants(path: str | Path) -> tuple[TenantSettings, ...]:
    """Return the tenants of a file, including `default`. Raise a SettingsError that names the file and the key."""
    path = expand_home(path)
    tenants = [_tenant(name, entry, path) for name, entry in _read(path).items()]
    hashes: dict[str, str] = {}
    for tenant in tenants:
        other = hashes.setdefault(tenant.token_hash, tenant.name) if tenant.token_hash else tenant.name
        if other != tenant.name:
            raise SettingsError(f"{path}: the tenants {other} and {tenant.name} have the same token")
    if all(tenant.name != DEFAULT_NAME for tenant in tenants):
        tenants.insert(0, DEFAULT_TENANT)
    return tuple(tenants)


def read_tenant_tokens(path: str | Path) -> dict[str, str]:
    """Return the token of each tenant of a file except `default`, for join tokens. Raise SettingsError."""
    path = expand_home(path)
    entries = {name: entry for name, entry in _read(path).items() if name != DEFAULT_NAME}
    return {name: read_token(entry.token, path.parent, f"{path}: tenant.{name}") for name, entry in entries.items()}


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of a file by tenant."""
    import tomllib  # most processes read no such file

    try:
        content = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), decodable(_File))
    except OSError as error:
        raise SettingsError(f"cannot read the file of tenants {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise SettingsError(f"{path}: {error}; a file of tenants has only tables [tenant.NAME]") from None
    return {name: _entry(entry, f"{path}: tenant.{name}") for name, entry in content.tenant.items()}


def _entry(content: dict[str, Any], where: str) -> Any:
    unknown = [key for key in content if key not in _Entry.__struct_fields__]
    if unknown:
        known = ", ".join(_Entry.__struct_fields__)
        raise SettingsError(f"{where}: unknown field `{unknown[0]}`; the known ones are: {known}")
    try:
        return msgspec.convert(content, decodable(_Entry))
    except msgspec.ValidationError as error:
        what, key = split_place(str(error))
        raise SettingsError(f"{where}{key and f'.{key}'}: {what}") from None


def _tenant(name: str, entry: Any, path: Path) -> TenantSettings:
    where = f"{path}: tenant.{name}"
    settings = msgspec.structs.asdict(entry)
    token = settings.pop("token")
    try:
        check_tenant_name(name)
        for key in _AMOUNTS:
            if isinstance(settings[key], str):
                settings[key] = parse_bytes(settings[key])
            if settings[key] < 0:
                raise SettingsError(f"{key} must not be negative")
        for each in (*entry.read, *entry.write):
            check_grant(each)
        check_patterns("publish", entry.publish, has_owner=False)
        check_patterns("subscribe", entry.subscribe, has_owner=True)
    except (SettingsError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from None
    if name != DEFAULT_NAME:
        return TenantSettings(name, token_hash(read_token(token, path.parent, where)), **settings)
    if token:
        raise SettingsError(
            f"{where}: remove its token: this tenant uses that of the cluster (ATOLL_TOKEN, or the join token's)"
        )
    return TenantSettings(name, **settings | {"role": TenantRole.OPERATOR})


def read_token(text: str, base: Path, where: str) -> str:
    """Return the token `text`, or that of the file that it names. Raise a SettingsError that does not contain it."""
    if text.startswith(("/", "~", ".")):
        file = base / expand_home(text)
        try:
            text = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise SettingsError(f"{where}.token: cannot read {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"{where}.token: {file} does not contain a token") from None
    if len(text) < MIN_TOKEN:
        raise SettingsError(
            f"{where}.token: a token needs at least {MIN_TOKEN} characters: make one with `openssl rand -hex 32`"
        )
    return text
