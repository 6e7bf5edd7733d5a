"""The tenants of a running cluster: who they are now, and what of their quotas they use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from atoll.cluster.sandbox.grants import PythonRules, View
from atoll.cluster.settings import ClusterSettings, OnOff
from atoll.cluster.tenant_settings import DEFAULT_NAME, DEFAULT_TENANT, MOST_TENANTS, TenantRole, TenantSettings
from atoll.errors import Code, Status, StatusError, invalid, not_found
from atoll.state.memory_ledger import MemoryLedger


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant, with what its sessions have at this moment, which its methods alone count.

    `settings` may change while they run.
    """

    settings: TenantSettings
    sessions: int = 0  # open, or waiting for the cluster to be complete
    launches: int = 0  # in flight
    running: int = 0  # gangs that have their memory and have not ended
    memory: MemoryLedger | None = None  # what of all memory its sessions have, where tenants are told apart
    is_one_of_several: bool = False  # the cluster has tenants besides `default`

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def host_name(self) -> str:
        """The name under which hosts compile its programs apart from others'; "" if the cluster has no tenants."""
        return self.name if self.is_one_of_several else ""

    @property
    def is_operator(self) -> bool:
        return self.settings.role is TenantRole.OPERATOR

    def admit(self) -> Status | None:
        """Counts one more session, until it has `left`; or says why there may be none."""
        exceeded = self.exceeded("sessions", 1, self.sessions, "these are open (atoll status lists them)")
        self.sessions += exceeded is None
        return exceeded

    def left(self) -> None:
        self.sessions -= 1

    def launched(self) -> None:
        self.launches += 1

    def ended(self, launches: int) -> None:
        """So many of what was launched are in flight no more."""
        self.launches -= launches

    def took_memory(self, gangs: int) -> None:
        self.running += gangs

    def gave_back(self) -> None:
        """The memory of one gang, which has ended, or will not run."""
        self.running -= 1

    def exceeded(self, quota: str, wanted: int, has: int, text: str) -> Status | None:
        """Why it may not have `wanted` more where it has so much: RESOURCE_EXHAUSTED that names the quota."""
        limit = int(getattr(self.settings, quota))
        if not limit or has + wanted <= limit:
            return None
        return Status(Code.RESOURCE_EXHAUSTED, f"tenant {self.name} has reached its quota `{quota}` of {limit}: {text}")


class Tenants:
    """All tenants, by name. `default` is always there: who has the cluster's own token."""

    def __init__(self, settings: Iterable[TenantSettings] = ()) -> None:
        self.by_name = {each.name: _one_of_several(each) for each in settings}
        self.are_told_apart = bool(self.by_name)
        self.by_name.setdefault(DEFAULT_NAME, Tenant(DEFAULT_TENANT, is_one_of_several=self.are_told_apart))

    @property
    def default(self) -> Tenant:
        return self.by_name[DEFAULT_NAME]

    def settings(self) -> list[TenantSettings]:
        return [tenant.settings for tenant in self.by_name.values()]

    def python_rules(self, tenant: Tenant, cluster: ClusterSettings) -> PythonRules:
        """Return what the Python processes of a session of `tenant` may see and use.

        Without tenants, all users of the cluster are the one who started it, who keeps the view of his own files.
        """
        network = cluster.python_network is OnOff.ON
        if not self.are_told_apart:
            return PythonRules(network=network)
        write = (*cluster.python_write, *tenant.settings.write)
        read = tuple(each for each in (*cluster.python_read, *tenant.settings.read) if each not in write)
        return PythonRules(View.GRANTED, read, write, network, cluster.insecure_sandbox)

    def put(self, settings: TenantSettings, is_new: bool) -> Tenant:
        """Adds a tenant, or changes one. Raises StatusError."""
        tenant = self.by_name.get(settings.name)
        if (tenant is None) != is_new:
            what = "there is a tenant" if is_new else "there is no tenant"
            raise invalid(f"{what} {settings.name}") if is_new else not_found(f"{what} {settings.name}")
        for other in self.by_name.values():
            is_same = settings.token_hash and other.settings.token_hash == settings.token_hash
            if is_same and other.name != settings.name:
                raise invalid(f"the tenants {other.name} and {settings.name} cannot have the same token")
        if settings.name == DEFAULT_NAME and settings.role is not TenantRole.OPERATOR:
            raise invalid(f"the tenant {DEFAULT_NAME}, who has the cluster's own token, is an operator")
        if tenant is None:
            if len(self.by_name) >= MOST_TENANTS:
                raise StatusError(Code.RESOURCE_EXHAUSTED, f"there are {MOST_TENANTS} tenants, and no more may be")
            tenant = self.by_name[settings.name] = _one_of_several(settings)
        else:
            tenant.settings = settings
        return tenant

    def remove(self, name: str) -> Tenant:
        """The tenant, who is none any more. Raises StatusError."""
        if name == DEFAULT_NAME:
            raise invalid(f"the tenant {DEFAULT_NAME} has the cluster's own token: it stays")
        tenant = self.by_name.pop(name, None)
        if tenant is None:
            raise not_found(f"there is no tenant {name}")
        return tenant


def _one_of_several(settings: TenantSettings) -> Tenant:
    return Tenant(settings, memory=MemoryLedger(), is_one_of_several=True)


def without_tokens(settings: TenantSettings) -> TenantSettings:
    """The same for whoever may look at it."""
    return msgspec.structs.replace(settings, token_hash="")
