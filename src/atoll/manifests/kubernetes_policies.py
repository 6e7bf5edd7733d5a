"""The objects that protect a cluster's pods: from disruption, from the network, and from the API of Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Manifest = dict[str, Any]
Labels = Mapping[str, str]
Make = Callable[[str, str, str], Manifest]  # of an API version, a kind, and a suffix of the name

# The label of pods that may connect to a cluster, with the name of the cluster as its value.
CLIENT_LABEL = "atoll-client"

# The user of the image, who must be able to write to the volumes.
USER_ID = 1000

_VERSION_OF_POLICIES = "policy/v1"
_NETWORKING = "networking.k8s.io/v1"
_AUTHORIZATION = "rbac.authorization.k8s.io/v1"
# Of API servers, as pods reach them: that of their Service, and those that it leads to.
_API_PORTS = (443, 6443)


def pod_security(seccomp: str) -> Manifest:
    """Return the security context of a pod, which the Pod Security level "restricted" accepts with RuntimeDefault."""
    profile: Manifest = {"type": seccomp}
    if "/" in seccomp:
        profile = {"type": "Localhost", "localhostProfile": seccomp}
    ids = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID, "fsGroupChangePolicy": "OnRootMismatch"}
    return {"runAsNonRoot": True, **ids, "seccompProfile": profile}


def container_security() -> Manifest:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}


def disruption_budgets(
    make: Make, controller: Labels, hosts: Labels, count: int, *, has_standby: bool = False
) -> list[Manifest]:
    """Return the budgets: no voluntary eviction of the controller, and of one host at a time.

    The eviction of the controller ends all sessions, so a person decides about it. If it has a standby, one of the two
    can be evicted at a time. Kubernetes does not scale Jobs, and so requires a number of pods for their budget.
    """
    allowed = {"minAvailable": 1} if has_standby else {"maxUnavailable": 0}
    found = [
        make(_VERSION_OF_POLICIES, "PodDisruptionBudget", "-controller")
        | {"spec": {**allowed, "selector": {"matchLabels": dict(controller)}}}
    ]
    if count > 1:
        spec = {"minAvailable": count - 1, "selector": {"matchLabels": dict(hosts)}}
        found.append(make(_VERSION_OF_POLICIES, "PodDisruptionBudget", "-hosts") | {"spec": spec})
    return found


def network_policies(
    make: Make,
    name: str,
    instance: Labels,
    controller: Labels,
    hosts: Labels,
    ports: Mapping[str, int],
) -> list[Manifest]:
    """Return the policies: pods of the cluster, and pods of any namespace with the label of clients, may connect.

    Collectives between hosts use unencrypted connections on any port, so others must not reach the hosts. `ports` are
    those of the controller's pod that are open to everybody, because they require a key.
    """
    peers = [
        {"podSelector": {"matchLabels": dict(instance)}},
        {"namespaceSelector": {}, "podSelector": {"matchLabels": {CLIENT_LABEL: name}}},
    ]
    public = [{"ports": [{"port": port, "protocol": "TCP"}]} for port in ports.values()]

    def policy(suffix: str, selected: Labels, rules: list[Manifest]) -> Manifest:
        spec = {"podSelector": {"matchLabels": dict(selected)}, "policyTypes": ["Ingress"], "ingress": rules}
        return make(_NETWORKING, "NetworkPolicy", suffix) | {"spec": spec}

    return [policy("-controller", controller, [{"from": peers}, *public]), policy("-hosts", hosts, [{"from": peers}])]


def lease_egress(make: Make, instance: Labels, controller: Labels) -> Manifest:
    """Return the policy that lets controllers reach the API server, also where others forbid it.

    No selector matches the API server. So its usual ports are open, and those of DNS.
    """
    ports = [*((53, each) for each in ("UDP", "TCP")), *((each, "TCP") for each in _API_PORTS)]
    rules = [
        {"to": [{"podSelector": {"matchLabels": dict(instance)}}]},
        {"ports": [{"port": port, "protocol": protocol} for port, protocol in ports]},
    ]
    spec = {"podSelector": {"matchLabels": dict(controller)}, "policyTypes": ["Egress"], "egress": rules}
    return make(_NETWORKING, "NetworkPolicy", "-lease") | {"spec": spec}


def service_account(make: Make) -> Manifest:
    """Return an account without a token, for processes that do not use the API of Kubernetes."""
    return make("v1", "ServiceAccount", "") | {"automountServiceAccountToken": False}


def api_access(make: Make, lease: str) -> list[Manifest]:
    """Return the account of two controllers, and its permissions, which are those for the Lease with this name.

    Kubernetes does not know the name of an object that is created, so the account can create Leases of any name.
    Containers get a token from a volume.
    """
    suffix = "-controller"
    account = make("v1", "ServiceAccount", suffix) | {"automountServiceAccountToken": False}
    role = make(_AUTHORIZATION, "Role", suffix)
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    role["rules"] = [leases | {"verbs": ["get", "update"], "resourceNames": [lease]}, leases | {"verbs": ["create"]}]
    binding = make(_AUTHORIZATION, "RoleBinding", suffix)
    name = role["metadata"]["name"]
    binding["roleRef"] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    # Without a namespace, the subject is in the namespace of the binding.
    binding["subjects"] = [{"kind": "ServiceAccount", "name": account["metadata"]["name"]}]
    return [account, role, binding]
