"""Credentials for a cluster that another system starts: environments of its processes, and a file of its tenants."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import msgspec

from atoll.cluster.environment_variables import AUTHORITY, HOST_TOKEN, JOIN, TOKEN
from atoll.cluster.tenant_settings import TenantSettings
from atoll.security.certificate_authority import CertificateAuthority
from atoll.security.join_token import JoinToken
from atoll.security.start_security import new_environment
from atoll.wire.address import parse_address

TENANTS_FILE = "tenants.toml"
# Fields of TenantSettings that the file does not repeat: the name is the key, and the token replaces its hash.
_OMITTED = ("name", "token_hash")


def make_credentials(address: str, tenants: Mapping[str, str] | None = None) -> dict[str, dict[str, str]]:
    """Return the environments of the "controller", of each "host" and of the "client" of a new cluster.

    Args:
        address: HOST:PORT of the controller.
        tenants: Tokens by tenant. Each tenant adds an environment "client-NAME".
    """
    controller = new_environment()
    authority = CertificateAuthority.parse(controller[AUTHORITY.variable].encode(), AUTHORITY.variable)
    secured = parse_address(address).secured()

    def join(token: str) -> dict[str, str]:
        return {JOIN.variable: str(JoinToken(secured, authority.fingerprint, token))}

    return {
        "controller": controller,
        "host": join(controller[HOST_TOKEN.variable]),
        "client": join(controller[TOKEN.variable]),
        **{f"client-{name}": join(token) for name, token in (tenants or {}).items()},
    }


def tenants_directory(tenants: Iterable[TenantSettings], tokens: Mapping[str, str]) -> dict[str, str]:
    """Return the files of one directory by name: TENANTS_FILE, and one file per token in `tokens`."""
    text = "\n".join(_entry(each, each.name in tokens) for each in tenants)
    return {TENANTS_FILE: text, **{_token_file(name): token for name, token in tokens.items()}}


def _entry(tenant: TenantSettings, has_token: bool) -> str:
    lines = [f"[tenant.{json.dumps(tenant.name)}]"]
    if has_token:
        lines.append(f"token = {json.dumps('./' + _token_file(tenant.name))}")
    defaults = TenantSettings(tenant.name)
    for name, value in msgspec.structs.asdict(tenant).items():
        if name not in _OMITTED and value != getattr(defaults, name):
            lines.append(f"{name} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def _token_file(tenant: str) -> str:
    return f"{tenant}.token"
