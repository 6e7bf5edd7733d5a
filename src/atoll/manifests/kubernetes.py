"""Manifests of a cluster for Kubernetes: a controller, and a JobSet for each island.

Each island is a JobSet (jobset.x-k8s.io/v1alpha2) with one indexed Job that has one pod per host. Kubernetes restarts
a pod that ends, on another node if necessary, and the pod rejoins as the same host. The controller is a Deployment of
one pod behind a Service, with a volume for its journal and its logs. If the pod ends, the hosts wait for the next one.
With a standby there are two such pods on different nodes. Each one follows the other or serves the cluster, and a Lease
decides which of them serves (`operate.controller_pair`). Each kind of process has a Secret with its credentials, and
one more Secret holds the tenants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from atoll.cluster.environment_variables import CACHE_DIRECTORY, RUNTIME_DIRECTORY, STATE_DIRECTORY
from atoll.cluster.topology import Topology
from atoll.errors import SettingsError
from atoll.manifests.credentials import TENANTS_FILE
from atoll.manifests.kubernetes_policies import (
    api_access,
    container_security,
    disruption_budgets,
    lease_egress,
    network_policies,
    pod_security,
    service_account,
)

Manifest = dict[str, Any]
Volumes = Mapping[str, tuple[str, Manifest]]  # by name: the directory and the source

PORT = 7000
WEB_PORT = 8473
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
DEVICE_RESOURCES = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu", "tpu": "google.com/tpu"}
# The annotation of a JobSet whose pods occupy domains of a topology exclusively, and such a domain of GKE: a TPU slice.
_EXCLUSIVE, _GKE_NODE_POOL = "alpha.jobset.sigs.k8s.io/exclusive-topology", "cloud.google.com/gke-nodepool"

# Directories in the pods. STATE outlives the controller's pod, the others end with their pod.
STATE, RUN, CACHE = "/var/lib/atoll", "/run/atoll", "/var/cache/atoll"
_TEMPORARY = "/tmp"
_SHARED_MEMORY = "/dev/shm"
# The directory in which clients of the API of Kubernetes expect the credentials of the pod.
_ACCOUNT, _TOKEN_SECONDS = "/var/run/secrets/kubernetes.io/serviceaccount", 3600
# Of probes, in seconds. The command `atoll status` takes most of a second of CPU time.
_PROBE_PERIOD, _PROBE_TIMEOUT, _PROBE_FAILURES, _START_FAILURES = 20, 10, 3, 60
_HEALTH = "/healthz"  # the path of the page that needs no key


@dataclass(frozen=True)
class KubernetesCluster:
    """The cluster to describe.

    Attributes:
      settings: More flags for `atoll up`.
      resources: The resources of each host's pod.
      node_selector: The labels of the nodes of hosts.
      file: The content of a cluster file, which replaces `--islands`.
      storage: The size of the volume for journal, logs and usage; "" for none.
      storage_class: The class of the volume; "" for the default of Kubernetes.
      controller_resources: The resources of the controller's container.
      controller_node_selector: The labels of the nodes of the controller.
      tolerations: The tolerations of all pods.
      labels: More labels of all objects and pods.
      shared_memory: The size of /dev/shm on the hosts.
      seccomp: The seccomp profile of hosts: RuntimeDefault, Unconfined, or the path of a profile on the nodes.
      has_web: Whether the controller's pod also serves the page.
      has_standby: Whether there is a second controller, on another node.
    """

    name: str
    topology: Topology
    image: str
    platform: str = ""
    namespace: str = ""
    settings: Sequence[str] = ()
    resources: Mapping[str, str] = field(default_factory=dict)
    node_selector: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    has_tenants: bool = False
    storage: str = "10Gi"
    storage_class: str = ""
    controller_resources: Mapping[str, str] = field(default_factory=lambda: {"cpu": "1", "memory": "2Gi"})
    controller_node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    shared_memory: str = "8Gi"
    seccomp: str = "RuntimeDefault"
    has_web: bool = False
    has_standby: bool = False

    @property
    def address(self) -> str:
        """Address of the controller, or addresses of both, valid in the cluster's namespace."""
        return ",".join(f"{self.name}{each.suffix}:{PORT}" for each in self.controllers)

    @property
    def controllers(self) -> Sequence[ControllerPod]:
        return (CONTROLLER, STANDBY) if self.has_standby else (CONTROLLER,)


@dataclass(frozen=True)
class ControllerPod:
    """A pod that runs a controller: its component label, and the suffix in the names of its objects."""

    component: str
    suffix: str


CONTROLLER, STANDBY = ControllerPod("controller", ""), ControllerPod("standby", "-standby")


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
    make = partial(_object, cluster)
    hosts = _instance(cluster) | {_ROLE: "host"}
    controller = _instance(cluster) | {_ROLE: "controller"} if cluster.has_standby else _labels(cluster, "controller")
    count = sum(each.hosts for each in cluster.topology.shapes)
    ports = {"web": WEB_PORT} if cluster.has_web else {}
    policies = [
        service_account(make),
        *disruption_budgets(make, controller, hosts, count, has_standby=cluster.has_standby),
        *network_policies(make, cluster.name, _instance(cluster), controller, hosts, ports),
    ]
    if cluster.has_standby:
        policies += [*api_access(make, cluster.name), lease_egress(make, _instance(cluster), controller)]
    volumes = [_volume_claim(cluster, each) for each in cluster.controllers] if cluster.storage else []
    controllers = [_controller(cluster, each) for each in cluster.controllers]
    return [*secrets, *files, *policies, *volumes, *_services(cluster), *controllers, *islands]


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


def _services(cluster: KubernetesCluster) -> list[Manifest]:
    services = [(each, each.suffix, "control", PORT) for each in cluster.controllers]
    if cluster.has_web:
        services.append((CONTROLLER, "-web", "web", WEB_PORT))
    return [
        _object(cluster, "v1", "Service", suffix)
        | {
            "spec": {
                "selector": _labels(cluster, pod.component),
                "ports": [{"name": name, "port": port, "targetPort": name}],
            }
        }
        for pod, suffix, name, port in services
    ]


def _volume_claim(cluster: KubernetesCluster, pod: ControllerPod) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": cluster.storage}}}
    if cluster.storage_class:
        spec["storageClassName"] = cluster.storage_class
    return _object(cluster, "v1", "PersistentVolumeClaim", f"{pod.suffix}-state") | {"spec": spec}


def _controller(cluster: KubernetesCluster, which: ControllerPod) -> Manifest:
    islands = ["--cluster", f"{_DIRECTORY}/{_FILE}"] if cluster.file else ["--islands", str(cluster.topology)]
    command = ["atoll", "up", "--foreground", "--engine", "hosts", *islands]
    command += ["--listen", f"0.0.0.0:{PORT}", "--advertise", f"{cluster.name}{which.suffix}:{PORT}"]
    if cluster.platform:
        command += ["--platform", cluster.platform]
    if cluster.storage or cluster.has_standby:
        command += ["--journal", f"{STATE}/journal", "--continue"]
    if cluster.has_standby:
        (other,) = (each for each in cluster.controllers if each != which)
        command += ["--standby", f"{cluster.name}{other.suffix}:{PORT}"]
        command += ["--leader-lease", f"kubernetes://$(POD_NAMESPACE)/{cluster.name}"]
    state: Manifest = {"persistentVolumeClaim": {"claimName": f"{cluster.name}{which.suffix}-state"}}
    volumes = {"state": (STATE, state if cluster.storage else {"emptyDir": {}}), **_writable()}
    if cluster.file:
        volumes["cluster"] = (_DIRECTORY, {"configMap": {"name": cluster.name + _CLUSTER}})
    if cluster.has_tenants:
        command += ["--tenants", f"{_TENANTS_DIRECTORY}/{TENANTS_FILE}"]
        volumes["tenants"] = (_TENANTS_DIRECTORY, {"secret": {"secretName": cluster.name + _TENANTS}})
    answers = {"exec": {"command": ["atoll", "status", "--json"]}, "timeoutSeconds": _PROBE_TIMEOUT}
    container = _container(cluster, "controller", [*command, *cluster.settings], volumes) | {
        "ports": [{"name": "control", "containerPort": PORT}],
        # The command asks the controller's process, which may hang while its port accepts connections.
        "startupProbe": answers | {"periodSeconds": 5, "failureThreshold": _START_FAILURES},
        "readinessProbe": {"tcpSocket": {"port": "control"}, "periodSeconds": 5},
        "livenessProbe": answers | {"periodSeconds": _PROBE_PERIOD, "failureThreshold": _PROBE_FAILURES},
        "resources": _resources(cluster.controller_resources),
    }
    containers = [container]
    has_web = cluster.has_web and which is CONTROLLER
    if has_web:
        page = ["atoll", "web", "--listen", f"0.0.0.0:{WEB_PORT}", "--key-file", f"{STATE}/web-key"]
        # With a standby, the page finds the cluster by the addresses in the join token of clients.
        web = _container(cluster, "client" if cluster.has_standby else "controller", page, volumes) | {"name": "web"}
        web["ports"] = [{"name": "web", "containerPort": WEB_PORT}]
        web["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}}
        # No readiness probe: it would take the controller out of its Service while only the page does not answer.
        answer = {"httpGet": {"path": _HEALTH, "port": "web", "scheme": "HTTPS"}, "timeoutSeconds": _PROBE_TIMEOUT}
        web["startupProbe"] = answer | {"periodSeconds": 5, "failureThreshold": _START_FAILURES}
        web["livenessProbe"] = answer | {"periodSeconds": _PROBE_PERIOD, "failureThreshold": _PROBE_FAILURES}
        containers.append(web)
    pod = _pod(cluster, containers, volumes) | {
        "securityContext": pod_security("RuntimeDefault"),
        "terminationGracePeriodSeconds": _END_SECONDS + GRACE_SECONDS,
    }
    if has_web and not cluster.has_standby:
        pod["shareProcessNamespace"] = True  # the page finds the cluster by the processes of its record
    if cluster.controller_node_selector:
        pod["nodeSelector"] = dict(cluster.controller_node_selector)
    labels = _labels(cluster, which.component)
    pod_labels = labels | dict(cluster.labels)
    if cluster.has_standby:
        pod_labels |= {_ROLE: "controller"}
        _use_lease(cluster, pod, container)
    return _object(cluster, "apps/v1", "Deployment", which.suffix) | {
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # never run two controllers at a time
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": pod_labels}, "spec": pod},
        }
    }


def _use_lease(cluster: KubernetesCluster, pod: Manifest, container: Manifest) -> None:
    """Give this container of a pod the token for the Lease, and keep the pods of the two controllers on two nodes."""
    pod["serviceAccountName"] = f"{cluster.name}-controller"
    pod["affinity"] = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "topologyKey": "kubernetes.io/hostname",
                    "labelSelector": {"matchLabels": _instance(cluster) | {_ROLE: "controller"}},
                }
            ]
        }
    }
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_SECONDS}}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    pod["volumes"].append({"name": "account", "projected": {"sources": [token, authority]}})
    container["volumeMounts"].append({"name": "account", "mountPath": _ACCOUNT, "readOnly": True})
    container["env"].append({"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}})


def _island(cluster: KubernetesCluster, number: int) -> Manifest:
    hosts = cluster.topology.shapes[number].hosts
    labels = _labels(cluster, f"island-{number}")
    pod_labels = labels | {_ROLE: "host"} | dict(cluster.labels)
    jobset = _object(cluster, "jobset.x-k8s.io/v1alpha2", "JobSet", f"-island-{number}")
    if cluster.topology.shapes[number].platform == "tpu":
        jobset["metadata"]["annotations"] = {_EXCLUSIVE: _GKE_NODE_POOL}
    return jobset | {
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
                            "template": {"metadata": {"labels": pod_labels}, "spec": _host(cluster, number, labels)},
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
    # The state has the key of compiled programs, and sessions on disk, which outlive the controller's pod.
    volumes = _writable() | {
        "state": (STATE, {"emptyDir": {}}),
        "shared-memory": (_SHARED_MEMORY, _memory(cluster.shared_memory)),
    }
    container = _container(cluster, "host", command, volumes)
    container["env"] += [
        {"name": "JOB_INDEX", "value": str(island)},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    amounts = dict(cluster.resources)
    shape = cluster.topology.shapes[island]
    device = DEVICE_RESOURCES.get(shape.platform)
    if device is not None:
        amounts.setdefault(device, str(shape.devices))
    if amounts:
        container["resources"] = _resources(amounts)
    spec = _pod(cluster, [container], volumes) | {
        "restartPolicy": "OnFailure",
        "securityContext": pod_security(cluster.seccomp),
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


def _pod(cluster: KubernetesCluster, containers: list[Manifest], volumes: Volumes) -> Manifest:
    pod: Manifest = {
        "serviceAccountName": cluster.name,
        "automountServiceAccountToken": False,
        # Service links would add variables that begin with the Service's name, and Atoll reads variables named ATOLL_*.
        "enableServiceLinks": False,
        "containers": containers,
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }
    if cluster.tolerations:
        pod["tolerations"] = [dict(each) for each in cluster.tolerations]
    return pod


def _container(cluster: KubernetesCluster, name: str, command: Sequence[str], volumes: Volumes) -> Manifest:
    home = {
        "HOME": _TEMPORARY,
        STATE_DIRECTORY.variable: STATE,
        CACHE_DIRECTORY.variable: CACHE,
        RUNTIME_DIRECTORY.variable: RUN,
    }
    return {
        "name": name,
        "image": cluster.image,
        "command": list(command),
        "envFrom": [{"secretRef": {"name": f"{cluster.name}-{name}"}}],
        "env": [{"name": variable, "value": value} for variable, value in home.items()],
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": name, "mountPath": path} | ({} if _is_writable(source) else {"readOnly": True})
            for name, (path, source) in volumes.items()
        ],
    }


def _is_writable(source: Manifest) -> bool:
    return "configMap" not in source and "secret" not in source


def _writable() -> dict[str, tuple[str, Manifest]]:
    """Return the volumes for files that end with the pod, since the image is read-only. Sockets need a private one."""
    paths = {"run": RUN, "cache": CACHE, "temporary": _TEMPORARY}
    return {name: (path, {"emptyDir": {}}) for name, path in paths.items()}


def _memory(size: str) -> Manifest:
    return {"emptyDir": {"medium": "Memory", "sizeLimit": size}}


def _resources(amounts: Mapping[str, str]) -> Manifest:
    """Return requests and limits. CPU time has no limit: a limit would slow a process down while its node is idle."""
    return {"requests": dict(amounts), "limits": {name: amount for name, amount in amounts.items() if name != "cpu"}}


def _object(cluster: KubernetesCluster, version: str, kind: str, suffix: str = "") -> Manifest:
    labels = _instance(cluster) | dict(cluster.labels)
    metadata: Manifest = {"name": cluster.name + suffix, "labels": labels}
    if cluster.namespace:
        metadata["namespace"] = cluster.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


_ROLE = "atoll-role"  # label of the pods of all islands


def _instance(cluster: KubernetesCluster) -> dict[str, str]:
    return {"app.kubernetes.io/name": "atoll", "app.kubernetes.io/instance": cluster.name}


def _labels(cluster: KubernetesCluster, component: str) -> dict[str, str]:
    return _instance(cluster) | {"app.kubernetes.io/component": component}
