"""The tenants of a running cluster, and their use of quotas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from atoll.cluster.sandbox.grants import PythonRules, View
from atoll.cluster.settings import ClusterSettings, OnOff
from atoll.cluster.tenant_settings import DEFAULT_NAME, DEFAULT_TENANT, MAX_TENANTS, TenantRole, TenantSettings
from atoll.errors import Code, Details, Kind, Status, StatusError, failure, invalid, not_found
from atoll.state.memory_ledger import MemoryLedger


@dataclass(slots=True, eq=False)
class Tenant:
    """A tenant, with counts of what its sessions use. Only its methods change the counts."""

    settings: TenantSettings  # may change while sessions run
    sessions: int = 0  # open, or waiting for the cluster to be complete
    launches: int = 0  # in flight
    running: int = 0  # number of gangs that have their memory and have not ended
    memory: MemoryLedger | None = None  # memory of its sessions, if the cluster has tenants besides `default`
    is_one_of_several: bool = False  # the cluster has tenants besides `default`
    rejected_publications: int = 0  # number of all requests to publish that were refused
    refusals: dict[str, int] = field(default_factory=dict)  # number of refused requests, by quota or resource

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def host_name(self) -> str:
        """Return the name under which hosts compile its programs separately, or "" if the cluster has no tenants."""
        return self.name if self.is_one_of_several else ""

    @property
    def has_native_code(self) -> bool:
        """Whether its sessions may load shared libraries into workers. Without tenants, all users are one user."""
        return not self.is_one_of_several or self.settings.native_code

    @property
    def is_operator(self) -> bool:
        return self.settings.role is TenantRole.OPERATOR

    def admit(self) -> Status | None:
        """Count a session until `left` is called, or return the reason why the tenant may not open one."""
        advice = "end one of its sessions (`atoll status` lists them), or have an operator raise the quota"
        exceeded = self.refused("sessions", 1, self.sessions, advice)
        self.sessions += exceeded is None
        return exceeded

    def left(self) -> None:
        self.sessions -= 1

    def count_launch(self) -> None:
        self.launches += 1

    def ended(self, launches: int) -> None:
        """Note that launches have ended."""
        self.launches -= launches

    def count_rejected_publication(self) -> None:
        self.rejected_publications += 1

    def count_refusal(self, limit: str) -> None:
        """Count a request that was refused because this quota was reached, or this resource was exhausted."""
        self.refusals[limit] = self.refusals.get(limit, 0) + 1

    def took_memory(self, gangs: int) -> None:
        self.running += gangs

    def gave_back(self) -> None:
        """Note that a gang has returned its memory, because it has ended or will not run."""
        self.running -= 1

    def exceeded(self, quota: str, wanted: int, has: int, text: str) -> Status | None:
        """Return RESOURCE_EXHAUSTED if the tenant has reached a quota, or None.

        Args:
          quota: the name of the quota among the settings.
          wanted: the amount that is requested.
          has: the amount in use.
          text: the end of the message.
        """
        limit = int(getattr(self.settings, quota))
        if not limit or has + wanted <= limit:
            return None
        message = f"tenant {self.name} has reached its quota `{quota}` of {limit}: {text}"
        return failure(Code.RESOURCE_EXHAUSTED, message, Details(Kind.LIMIT, limit=quota, retriable=True))

    def refused(self, quota: str, wanted: int, has: int, text: str) -> Status | None:
        """Return the error of a request that exceeds a quota, as `exceeded` does, and count it; None if it fits."""
        status = self.exceeded(quota, wanted, has, text)
        if status is not None:
            self.count_refusal(quota)
        return status


class Tenants:
    """All tenants, by name. The tenant `default`, who has the cluster's own token, always exists."""

    def __init__(self, settings: Iterable[TenantSettings] = ()) -> None:
        self.by_name = {each.name: _one_of_several(each) for each in settings}
        self.are_told_apart = bool(self.by_name)
        if self.are_told_apart:
            self.by_name.setdefault(DEFAULT_NAME, _one_of_several(DEFAULT_TENANT))
        else:
            self.by_name[DEFAULT_NAME] = Tenant(DEFAULT_TENANT)

    @property
    def default(self) -> Tenant:
        return self.by_name[DEFAULT_NAME]

    def settings(self) -> list[TenantSettings]:
        return [tenant.settings for tenant in self.by_name.values()]

    def python_rules(self, tenant: Tenant, cluster: ClusterSettings) -> PythonRules:
        """Return the rules for the Python processes of a tenant's session.

        On a cluster without tenants, all users are the user who started it, so Python sees all of that user's files.
        """
        network = cluster.python_network is OnOff.ON
        if not self.are_told_apart:
            return PythonRules(network=network)
        write = (*cluster.python_write, *tenant.settings.write)
        read = tuple(each for each in (*cluster.python_read, *tenant.settings.read) if each not in write)
        return PythonRules(View.GRANTED, read, write, network, cluster.insecure_sandbox)

    def put(self, settings: TenantSettings, is_new: bool) -> Tenant:
        """Add or change a tenant. Raise StatusError if that is not possible."""
        tenant = self.by_name.get(settings.name)
        if tenant is None and not is_new:
            raise not_found(f"tenant {settings.name} does not exist (atoll tenants lists them)")
        if tenant is not None and is_new:
            raise invalid(f"tenant {settings.name} already exists")
        for other in self.by_name.values():
            is_same = settings.token_hash and other.settings.token_hash == settings.token_hash
            if is_same and other.name != settings.name:
                raise invalid(f"the tenants {other.name} and {settings.name} cannot have the same token")
        if settings.name == DEFAULT_NAME and settings.role is not TenantRole.OPERATOR:
            raise invalid(f"the tenant {DEFAULT_NAME} has the cluster's own token, so its role has to be operator")
        if settings.name == DEFAULT_NAME and settings.token_hash:
            raise invalid(
                f"the tenant {DEFAULT_NAME} has the cluster's own token, which changes only with the next cluster (see "
                'the page "Sharing")'
            )
        if tenant is None:
            if len(self.by_name) >= MAX_TENANTS:
                raise StatusError(Code.RESOURCE_EXHAUSTED, f"a cluster cannot have more than {MAX_TENANTS} tenants")
            tenant = self.by_name[settings.name] = _one_of_several(settings)
        else:
            tenant.settings = settings
        return tenant

    def remove(self, name: str) -> Tenant:
        """Remove and return a tenant. Raise StatusError if it does not exist or if it is `default`."""
        if name == DEFAULT_NAME:
            raise invalid(f"the tenant {DEFAULT_NAME} has the cluster's own token, so it cannot be removed")
        tenant = self.by_name.pop(name, None)
        if tenant is None:
            raise not_found(f"tenant {name} does not exist (atoll tenants lists them)")
        return tenant


def _one_of_several(settings: TenantSettings) -> Tenant:
    return Tenant(settings, memory=MemoryLedger(), is_one_of_several=True)
