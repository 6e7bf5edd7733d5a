"""Clusters that other systems start: `atoll kubernetes`, `atoll slurm`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from atoll.cluster.settings import DEFAULT_PLATFORM, SETTINGS, ClusterSettings
from atoll.cluster.tenant_settings import TENANT_MARK
from atoll.errors import SettingsError
from atoll.operate.command.command_options import (
    ClusterOptions,
    Islands,
    settings_of,
    tenant_tokens,
    tenants_file,
    with_option_groups,
)

# Names of Kubernetes objects, short enough for a suffix.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
# The suffix in the name of an object.
_OBJECT = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def _pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """Parse KEY=VALUE texts."""
    found = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals or not value:
            raise typer.BadParameter(f"{option} {text!r}: expected KEY=VALUE")
        found[key] = value
    return found


def _toleration(text: str) -> dict[str, str]:
    """Parse KEY:EFFECT or KEY=VALUE:EFFECT."""
    pair, _, effect = text.rpartition(":")
    key, equals, value = pair.partition("=")
    if not key or effect not in ("NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise typer.BadParameter(
            f"--toleration {text!r}: expected KEY:EFFECT or KEY=VALUE:EFFECT with the effect NoSchedule, "
            "PreferNoSchedule or NoExecute"
        )
    if not equals:
        return {"key": key, "operator": "Exists", "effect": effect}
    return {"key": key, "operator": "Equal", "value": value, "effect": effect}


@with_option_groups
def kubernetes(
    *,
    islands: Islands = None,
    image: Annotated[
        str, typer.Option(help="Image with atoll, JAX for the platform, and scripts' dependencies.", metavar="IMAGE")
    ],
    cluster: ClusterOptions,
    name: Annotated[
        str, typer.Option(help="Name of the cluster, and prefix of its objects' names.", metavar="NAME")
    ] = "atoll",
    namespace: Annotated[
        str, typer.Option(help="Namespace of all objects. Defaults to kubectl's.", metavar="NAME")
    ] = "",
    resource: Annotated[
        list[str] | None,
        typer.Option(
            help="Resource of each host's pod, such as cpu=8 or memory=64Gi. Repeat the option for several. Devices of "
            "cuda, rocm and tpu are requested automatically.",
            metavar="KEY=AMOUNT",
        ),
    ] = None,
    node_selector: Annotated[
        list[str] | None,
        typer.Option(
            help="Label of the hosts' nodes, such as cloud.google.com/gke-tpu-topology=2x4. Repeat the option for "
            "several.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    storage: Annotated[
        str,
        typer.Option(
            help="Size of the volume for the controller's journal and usage. Without one (--storage none), they "
            "end with its pod.",
            metavar="AMOUNT",
        ),
    ] = "10Gi",
    storage_class: Annotated[
        str, typer.Option(help="Class of this volume. Defaults to that of Kubernetes.", metavar="NAME")
    ] = "",
    controller_resource: Annotated[
        list[str] | None,
        typer.Option(
            help="Resource of the controller. Repeat the option for several. Defaults to cpu=1 and memory=2Gi.",
            metavar="KEY=AMOUNT",
        ),
    ] = None,
    controller_node_selector: Annotated[
        list[str] | None,
        typer.Option(
            help="Label of the controller's node, which should not be preemptible. Repeat the option for several.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    toleration: Annotated[
        list[str] | None,
        typer.Option(
            help="Taint that all pods tolerate: KEY:EFFECT or KEY=VALUE:EFFECT. Repeat the option for several.",
            metavar="TAINT",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Label of all objects and pods, such as kueue.x-k8s.io/queue-name=team. Repeat the option for "
            "several.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    shared_memory: Annotated[
        str, typer.Option(help="Size of /dev/shm on the hosts, which counts as memory of the pod.", metavar="AMOUNT")
    ] = "8Gi",
    seccomp: Annotated[
        str,
        typer.Option(
            help="Seccomp profile of hosts: RuntimeDefault, Unconfined, or the path of a profile on the nodes. The "
            "sandbox of users' Python needs a profile that allows user namespaces.",
            metavar="PROFILE",
        ),
    ] = "RuntimeDefault",
    web: Annotated[
        bool, typer.Option("--web", help="Also serve the web page and the metrics, on NAME-web:8473.")
    ] = False,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby",
            help="Run a second controller on another node, which takes over if the first one or its node is lost. A "
            "Lease decides which of the two serves the cluster.",
        ),
    ] = False,
    existing_secrets: Annotated[
        bool,
        typer.Option(
            "--existing-secrets", help="Print no Secrets, because those of an earlier run of this command exist."
        ),
    ] = False,
    kustomize: Annotated[
        Path | None,
        typer.Option(
            help="Write the manifests to this directory as a base for kustomize, instead of printing them. The Secrets "
            "are in its secrets.yaml, which is not part of the base.",
            metavar="DIRECTORY",
        ),
    ] = None,
) -> None:
    """Print the manifests of a cluster for Kubernetes.

    For example: `atoll kubernetes --islands 2x4x8 --image IMAGE | kubectl apply -f -`.

    The manifests have a Deployment and a Service for the controller, and a JobSet per island; JobSet (jobset.x-k8s.io)
    must be installed. The Secrets hold the cluster's credentials, which differ in each run of this command: keep them
    like passwords. Scripts run in pods of the namespace, with the environment of the Secret NAME-client, or
    NAME-client-TENANT, and `JAX_PLATFORMS=atoll`.
    """
    from atoll.manifests.credentials import make_credentials, tenants_directory
    from atoll.manifests.kubernetes import DEVICE_RESOURCES, KubernetesCluster, as_yaml, manifests
    from atoll.manifests.kustomize import write_base

    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise typer.BadParameter(f"--namespace {namespace!r}: expected up to 63 of a-z, 0-9 and -")
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(f"--name {name!r}: expected up to 40 of a-z, 0-9 and -, beginning with a letter")
    settings, tokens = _settings(islands, cluster), tenant_tokens(cluster)
    resources = _pairs(resource, "--resource")
    for platform in settings.topology.platforms:
        if platform == "gpu":
            raise typer.BadParameter("--platform gpu: give cuda or rocm, so that pods request the right devices")
        device = DEVICE_RESOURCES.get(platform)
        if device in resources:
            raise typer.BadParameter(f"--resource {device}: each pod requests the devices of its island already")
    for tenant in tokens:
        if not _OBJECT.fullmatch(tenant):
            raise typer.BadParameter(f"--tenants: invalid name {tenant!r} for a Secret: use only a-z, 0-9 and -")
    wanted = KubernetesCluster(
        name,
        settings.topology,
        image,
        _platform(settings),
        namespace,
        _flags(cluster),
        resources,
        _pairs(node_selector, "--node-selector"),
        _content(cluster),
        bool(settings.tenants),
        "" if storage == "none" else storage,
        storage_class,
        {"cpu": "1", "memory": "2Gi"} | _pairs(controller_resource, "--controller-resource"),
        _pairs(controller_node_selector, "--controller-node-selector"),
        [_toleration(each) for each in toleration or ()],
        _pairs(label, "--label"),
        shared_memory,
        seccomp,
        web,
        standby,
    )
    credentials = {} if existing_secrets else make_credentials(wanted.address, tokens)
    tenants = None if existing_secrets or not settings.tenants else tenants_directory(settings.tenants, tokens)
    documents = manifests(wanted, credentials, tenants)
    if kustomize is None:
        print(as_yaml(documents), end="")
        return
    try:
        print("\n".join(str(kustomize / each) for each in write_base(kustomize, documents)))
    except OSError as error:
        raise SettingsError(f"cannot write {error.filename or kustomize}: {error.strerror}") from None


@with_option_groups
def slurm(
    command: Annotated[
        list[str], typer.Argument(help="Command to run on the cluster, such as: python train.py", metavar="COMMAND")
    ],
    *,
    islands: Islands = None,
    cluster: ClusterOptions,
    name: Annotated[str, typer.Option(help="Name of the job.", metavar="NAME")] = "atoll",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            help="Directive of sbatch, such as `--sbatch=--time=2:00:00`. Repeat the option for several.",
            metavar="FLAG",
        ),
    ] = None,
    join_file: Annotated[
        Path | None,
        typer.Option(
            "--join-file",
            help="File for the join token of clients, in a directory that they share with the first node. The job "
            "writes it as `atoll up --join-file` does, and removes it at the end. With --tenants, {tenant} in the name "
            "makes one file per tenant.",
            metavar="FILE",
        ),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the controller's journal, such as one that the nodes share: a controller that exits is "
            "restarted without loss. Each job has its own subdirectory, and removes it at its end.",
            metavar="DIRECTORY",
        ),
    ] = None,
    notice: Annotated[
        int,
        typer.Option(
            min=1, help="Seconds before the job's time limit at which the command gets SIGTERM.", metavar="SECONDS"
        ),
    ] = 60,
    requeue: Annotated[
        bool,
        typer.Option(
            "--requeue",
            help="Run the job again if the command ends with a status other than 0 after that SIGTERM, or if a node "
            "fails.",
        ),
    ] = False,
) -> None:
    """Print a batch script for Slurm.

    For example: `atoll slurm --islands 2x4x8 -- python train.py | sbatch`.

    The job has one node per host. The controller and the command run on the first node, and the cluster ends with the
    command.
    """
    from atoll.manifests.slurm import SlurmJob, batch_script

    settings = _settings(islands, cluster)
    for each in [name, *(sbatch or ())]:
        if "\n" in each:
            raise typer.BadParameter("the name and the directives of sbatch must be one line each")
    flags, tenants = _flags(cluster), tenants_file(cluster)
    if tenants is not None:
        # The job reads the file, because Slurm stores the script, which must not contain tokens.
        flags += ["--tenants", str(tenants.absolute())]
        if join_file is None or TENANT_MARK not in join_file.name:
            raise typer.BadParameter(
                f"--tenants: give a --join-file with {TENANT_MARK} in its name, so that tenants can join"
            )
    job = SlurmJob(
        name,
        settings.topology,
        command,
        _platform(settings),
        flags,
        sbatch or (),
        _content(cluster),
        str(join_file.absolute()) if join_file is not None else "",
        list(tenant_tokens(cluster)),
        notice,
        requeue,
        str(journal.absolute()) if journal is not None else "",
    )
    print(batch_script(job), end="")


def _settings(islands: str | None, cluster: ClusterOptions) -> ClusterSettings:
    """Return the settings of the cluster; end the command if the islands are missing."""
    if islands is None and cluster.cluster_file is None:
        raise typer.BadParameter("no islands: give --islands or --cluster")
    return settings_of(islands, cluster)


def _platform(settings: ClusterSettings) -> str:
    return "" if settings.platform == DEFAULT_PLATFORM else settings.platform


def _content(cluster: ClusterOptions) -> str:
    """Return the content of the cluster file."""
    return cluster.cluster_file.read_text(encoding="utf-8") if cluster.cluster_file is not None else ""


def _flags(cluster: ClusterOptions) -> list[str]:
    """Return the other options for `atoll up`."""
    engine = cluster.settings.get("engine", "hosts")
    if engine != "hosts":
        raise typer.BadParameter(
            f"--engine {engine}: machines of this cluster join by themselves, so only --engine hosts works"
        )
    flags = []
    for field, value in cluster.settings.items():
        form, name = SETTINGS[field].form, f"--{SETTINGS[field].name}"
        if field in ("engine", "platform") or field.startswith("ray_"):
            continue
        if form.is_flag:
            flags += [name] if value else []
        else:
            flags += [part for each in (value if form.check_item else [form.text(value)]) for part in (name, each)]
    return flags
