"""Manifests of a cluster for Kubernetes: a controller, and a JobSet for each island.

Each island is an indexed Job of as many pods as it has hosts, in a JobSet (jobset.x-k8s.io/v1alpha2, which must be
installed there): Kubernetes starts a pod again that ends, on another node if need be, and the cluster takes it as the
same host of the same island. The controller is a Deployment of one pod behind a Service; when it ends, the hosts wait
for the next one. What each kind of process proves itself with is in a Secret of its own, and so are the tenants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atoll.cluster.topology import Topology
from atoll.manifests.tenant_files import FILE as TENANTS_FILE

Manifest = dict[str, Any]

PORT = 7000
# In which a host that is to end may move what is on it elsewhere (`atoll host --grace`); and a little more, to end.
GRACE_SECONDS = 25
_END_SECONDS = 10
# Kubernetes has given this many times to each host before it gives the island up.
_RESTARTS = 1_000_000

# Where the cluster's file is, in the controller's pod; the suffix of the object that has it.
_DIRECTORY, _FILE, _CLUSTER = "/etc/atoll", "cluster.toml", "-cluster"
# The same of the tenants.
_TENANTS_DIRECTORY, _TENANTS = "/etc/atoll-tenants", "-tenants"

# What a pod asks for to get devices of a platform.
DEVICE_RESOURCES = {"cuda": "nvidia.com/gpu", "gpu": "nvidia.com/gpu", "rocm": "amd.com/gpu", "tpu": "google.com/tpu"}


@dataclass(frozen=True)
class KubernetesCluster:
    """What the manifests are to say. `settings` are further flags of `atoll up`; `resources` of each host's pod."""

    name: str
    topology: Topology
    image: str
    platform: str = ""
    namespace: str = ""
    settings: Sequence[str] = ()
    resources: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    file: str = ""  # the content of a cluster file, in place of the topology's short form
    has_tenants: bool = False

    @property
    def address(self) -> str:
        """Where the controller is reached, from everywhere in the namespace."""
        return f"{self.name}:{PORT}"


def manifests(
    cluster: KubernetesCluster, credentials: Mapping[str, Mapping[str, str]], tenants: Mapping[str, str] | None = None
) -> list[Manifest]:
    """All that the cluster is, in the order in which it is to be applied.

    `credentials` is the environment that nobody else may read, of its "controller", "host" and "client": each in a
    Secret NAME-controller and so on. `tenants` are the files of the Secret NAME-tenants. What is not given is there
    already.
    """
    content = {**credentials, _TENANTS[1:]: tenants} if tenants else credentials
    secrets = [
        _object(cluster, "v1", "Secret", f"-{component}") | {"type": "Opaque", "stringData": dict(data)}
        for component, data in content.items()
    ]
    islands = [_island(cluster, number) for number in range(cluster.topology.islands)]
    files = [_object(cluster, "v1", "ConfigMap", _CLUSTER) | {"data": {_FILE: cluster.file}}] if cluster.file else []
    return [*secrets, *files, _service(cluster), _controller(cluster), *islands]


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
            "strategy": {"type": "Recreate"},  # never two at a time
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
    """The pod of one host. Kubernetes says which by JOB_COMPLETION_INDEX."""
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
        # Hosts of an island that share a node share its fate, and its devices.
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
    # A Service's links would be variables that begin with its name, as those that Atoll reads do.
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
