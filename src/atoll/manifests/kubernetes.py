"""Manifests of a cluster for Kubernetes: a controller, and a JobSet for each island.

Each island is a JobSet (jobset.x-k8s.io/v1alpha2) with one indexed Job that has one pod per host. Kubernetes restarts
a pod that ends, on another node if necessary, and the pod rejoins as the same host. The controller is a Deployment of
one pod behind a Service. If it ends, the hosts wait for the next one. Each kind of process has a Secret with its
credentials, and one more Secret holds the tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.cluster.topology import Topology
from atoll.errors import SettingsError
from atoll.manifests.credentials import TENANTS_FILE

Manifest = dict[str, Any]

PORT = 7000
# Seconds for a terminating host to move its arrays to other hosts (`atoll host --grace`), and to exit afterwards.
GRACE_SECONDS = 25
_END_SECONDS = 10
# Restarts of a host or an island before Kubernetes reports that it failed: practically unlimited.
_RESTARTS = 1_000_000

# Mount point and name of the cluster file in the controller's pod, and suffix of its ConfigMap's name.
_DIRECTORY, _FILE, _CLUSTER = "/etc/atoll", "cluster.toml", "-cluster"
# Mount point of the tenants' files in the controller's pod, and suffix of their Secret's name.
_TENANTS_DIRECTORY, _TENANTS = "/etc/atoll-tenants", "-tenants"

# Resource that a pod requests to get devices of a platform.
DEVICE_RESOURCES = {"cuda": "nvidia.com/gpu", "gpu": "nvidia.com/gpu", "rocm": "amd.com/gpu", "tpu": "google.com/tpu"}


@dataclass(frozen=True)
class KubernetesCluster:
    """The cluster to describe. `settings` are more flags for `atoll up`, `resources` belong to each host's pod."""

    name: str
    topology: Topology
    image: str
    platform: str = ""
    namespace: str = ""
    settings: Sequence[str] = ()
    resources: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    file: str = ""  # content of a cluster file, which replaces `--islands`
    has_tenants: bool = False

    @property
    def address(self) -> str:
        """Address of the controller, valid in the cluster's namespace."""
        return f"{self.name}:{PORT}"


def manifests(
    cluster: KubernetesCluster, credentials: Mapping[str, Mapping[str, str]], tenants: Mapping[str, str] | None = None
) -> list[Manifest]:
    """Return all manifests of the cluster, in the order in which to apply them.

    Args:
        cluster: The cluster to describe.
        credentials: Secret environments by component ("controller", "host", "client", ...). Each becomes a Secret
            NAME-COMPONENT. Pass none if the Secrets already exist.
        tenants: Files of the Secret NAME-tenants.
    """
    content = {**credentials, _TENANTS[1:]: tenants} if tenants else credentials
    secrets = [
        _object(cluster, "v1", "Secret", f"-{component}") | {"type": "Opaque", "stringData": dict(data)}
        for component, data in content.items()
    ]
    islands = [_island(cluster, number) for number in range(cluster.topology.islands)]
    files = [_object(cluster, "v1", "ConfigMap", _CLUSTER) | {"data": {_FILE: cluster.file}}] if cluster.file else []
    return [*secrets, *files, _service(cluster), _controller(cluster), *islands]


def as_yaml(documents: Iterable[dict[str, Any]]) -> str:
    """Return `documents` as YAML without aliases, with strings of several lines as literal blocks.

    Raises SettingsError if PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError:
        raise SettingsError("printing manifests requires PyYAML: pip install 'atoll[kubernetes]'") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    written: str = yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)
    return written


def _service(cluster: KubernetesCluster) -> Manifest:
    return _object(cluster, "v1", "Service") | {
        "spec": {
            "selector": _labels(cluster, "controller"),
            "ports": [{"name": "control", "port": PORT, "targetPort": "control"}],
        }
    }


def _controller(cluster: KubernetesCluster) -> Manifest:
    islands = ["--cluster", f"{_DIRECTORY}/{_FILE}"] if cluster.file else ["--islands", str(cluster.topology)]
    command = ["atoll", "up", "--foreground", "--engine", "hosts", *islands]
    command += ["--listen", f"0.0.0.0:{PORT}", "--advertise", cluster.address]
    if cluster.platform:
        command += ["--platform", cluster.platform]
    container = _container(cluster, "controller", [*command, *cluster.settings]) | {
        "ports": [{"name": "control", "containerPort": PORT}],
        "readinessProbe": {"tcpSocket": {"port": "control"}, "periodSeconds": 5},
    }
    volumes = {}
    if cluster.file:
        volumes["cluster"] = (_DIRECTORY, {"configMap": {"name": cluster.name + _CLUSTER}})
    if cluster.has_tenants:
        container["command"] += ["--tenants", f"{_TENANTS_DIRECTORY}/{TENANTS_FILE}"]
        volumes["tenants"] = (_TENANTS_DIRECTORY, {"secret": {"secretName": cluster.name + _TENANTS}})
    pod = _pod([container])
    if volumes:
        container["volumeMounts"] = [
            {"name": name, "mountPath": directory, "readOnly": True} for name, (directory, _) in volumes.items()
        ]
        pod["volumes"] = [{"name": name, **source} for name, (_, source) in volumes.items()]
    labels = _labels(cluster, "controller")
    return _object(cluster, "apps/v1", "Deployment") | {
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # never run two controllers at a time
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": pod,
            },
        }
    }


def _island(cluster: KubernetesCluster, number: int) -> Manifest:
    hosts = cluster.topology.shapes[number].hosts
    labels = _labels(cluster, f"island-{number}")
    return _object(cluster, "jobset.x-k8s.io/v1alpha2", "JobSet", f"-island-{number}") | {
        "spec": {
            "failurePolicy": {"maxRestarts": _RESTARTS},
            "replicatedJobs": [
                {
                    "name": "host",
                    "replicas": 1,
                    "template": {
                        "spec": {
                            "parallelism": hosts,
                            "completions": hosts,
                            "completionMode": "Indexed",
                            "backoffLimit": _RESTARTS,
                            "template": {"metadata": {"labels": labels}, "spec": _host(cluster, number, labels)},
                        }
                    },
                }
            ],
        }
    }


def _host(cluster: KubernetesCluster, island: int, labels: Mapping[str, str]) -> Manifest:
    """Return the pod of one host. Kubernetes sets JOB_COMPLETION_INDEX to the host's rank in the island."""
    command = ["atoll", "host", "--address", cluster.address, "--advertise", "$(POD_IP)"]
    command += ["--grace", str(GRACE_SECONDS), "--stay"]
    container = _container(cluster, "host", command)
    container["env"] = [
        {"name": "JOB_INDEX", "value": str(island)},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    amounts = dict(cluster.resources)
    shape = cluster.topology.shapes[island]
    device = DEVICE_RESOURCES.get(shape.platform)
    if device is not None:
        amounts.setdefault(device, str(shape.devices))
    if amounts:
        container["resources"] = {"requests": amounts, "limits": amounts}
    spec = _pod([container]) | {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE_SECONDS + _END_SECONDS,
        # Prefer one node per host: hosts on the same node fail together and share its devices.
        "affinity": {
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 100,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": dict(labels)},
                        },
                    }
                ]
            }
        },
    }
    if cluster.node_selector:
        spec["nodeSelector"] = dict(cluster.node_selector)
    return spec


def _pod(containers: list[Manifest]) -> Manifest:
    # Service links would add variables that begin with the Service's name, and Atoll reads variables named ATOLL_*.
    return {"automountServiceAccountToken": False, "enableServiceLinks": False, "containers": containers}


def _container(cluster: KubernetesCluster, name: str, command: Sequence[str]) -> Manifest:
    return {
        "name": name,
        "image": cluster.image,
        "command": list(command),
        "envFrom": [{"secretRef": {"name": f"{cluster.name}-{name}"}}],
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _object(cluster: KubernetesCluster, version: str, kind: str, suffix: str = "") -> Manifest:
    metadata: Manifest = {"name": cluster.name + suffix, "labels": {"app.kubernetes.io/name": "atoll"}}
    if cluster.namespace:
        metadata["namespace"] = cluster.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _labels(cluster: KubernetesCluster, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "atoll",
        "app.kubernetes.io/instance": cluster.name,
        "app.kubernetes.io/component": component,
    }
