"""The file of tenants for a cluster that is started elsewhere: with each token in a file of its own beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import msgspec

from atoll.cluster.tenant_settings import TenantSettings

FILE = "tenants.toml"
# What the file says of a token, and what nobody but the cluster says.
_NOT_SAID = ("name", "token_hash")


def tenants_directory(tenants: Iterable[TenantSettings], tokens: Mapping[str, str]) -> dict[str, str]:
    """The files of one directory, by their names: FILE, and the token of each tenant in `tokens`."""
    text = "\n".join(_entry(each, each.name in tokens) for each in tenants)
    return {FILE: text, **{_token_file(name): token for name, token in tokens.items()}}


def _entry(tenant: TenantSettings, has_token: bool) -> str:
    lines = [f"[tenant.{json.dumps(tenant.name)}]"]
    if has_token:
        lines.append(f"token = {json.dumps('./' + _token_file(tenant.name))}")
    defaults = TenantSettings(tenant.name)
    for name, value in msgspec.structs.asdict(tenant).items():
        if name not in _NOT_SAID and value != getattr(defaults, name):
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _token_file(tenant: str) -> str:
    return f"{tenant}.token"
