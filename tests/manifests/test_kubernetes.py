"""Tests of manifests for Kubernetes: they are valid according to its schemas, and Atoll's processes accept their
contents.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from atoll.cluster.tenant_settings import read_tenants
from atoll.leadership.kubernetes_lease import SERVICE_ACCOUNT
from atoll.web.page_key import HEALTH
from tests.cluster_process import User, finish, first_line, free_port

VERSION = "1.37"


# Outputs of commands by their options, unless the options name files.
_printed: dict[tuple[str, ...], str] = {}


@pytest.fixture(scope="module", autouse=True)
def _reads_each_schema_once() -> Iterator[None]:
    """Keep the schemas of Kubernetes, two megabytes, which are read for each document otherwise."""
    utils = kubernetes_validate.utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


def loaded(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML file. The loader in C takes a fifth of the time of the one in Python."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


def manifests(user: User, *options: str) -> list[dict[str, Any]]:
    image = () if "--image" in options else ("--image", "example.org/a")
    printed = _printed.get(options) or user.atoll("kubernetes", *image, *options).check().stdout
    if not any("/" in each for each in options):
        _printed[options] = printed
    return loaded(printed)


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in documents if each["kind"] == kind]


def jobs(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the Job of each JobSet, as JobSet's controller makes it."""
    found = []
    for jobset in of_kind(documents, "JobSet"):
        (replicated,) = jobset["spec"]["replicatedJobs"]
        found.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": jobset["metadata"]} | replicated["template"])
    return found


def containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = document["spec"]["template"]["spec"]["containers"]
    return found


def named(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in of_kind(documents, kind) if each["metadata"]["name"] == name]
    return found


def volume_of(document: dict[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the mount and the source of a volume."""
    pod = document["spec"]["template"]["spec"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == name]
    (volume,) = [each for each in pod["volumes"] if each["name"] == name]
    return mount, volume


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the template of each pod."""
    return [each["spec"]["template"] for each in (*of_kind(documents, "Deployment"), *jobs(documents))]


ALL_OPTIONS = (
    "--web --toleration google.com/tpu:NoSchedule --toleration a=b:NoExecute --label team=red --storage-class ssd "
    "--controller-resource memory=8Gi --controller-node-selector pool=system --seccomp profiles/atoll.json"
)


@pytest.mark.parametrize(
    "options",
    [
        ("--islands", "1x2x2", *ALL_OPTIONS.split()),
        ("--islands", "1x2x2", "--storage", "none"),
        ("--islands", "1x2x2", "--standby", *ALL_OPTIONS.split()),
        ("--islands", "1x2x2", "--standby", "--storage", "none", "--existing-secrets"),
        ("--islands", "2x4x8", "--platform", "tpu", "--node-selector", "cloud.google.com/gke-tpu-topology=2x4"),
        ("--islands", "1x1x1", "--namespace", "team", "--name", "small", "--resource", "cpu=4", "--existing-secrets"),
    ],
)
def test_the_schemas_of_kubernetes_take_the_manifests(user: User, options: tuple[str, ...]) -> None:
    documents = manifests(user, *options)
    for each in [*(each for each in documents if each["kind"] != "JobSet"), *jobs(documents)]:
        kubernetes_validate.validate(each, VERSION, strict=True)


def test_all_pods_meet_the_pod_security_standard_restricted(user: User) -> None:
    """Check the controls of the level "restricted", which includes "baseline", as far as they concern these pods."""
    found = pods(manifests(user, "--islands", "2x2x4", "--platform", "tpu", "--web", "--standby"))
    assert len(found) == 4
    for spec in (pod["spec"] for pod in found):
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret"}
        assert all(allowed & volume.keys() for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            }


def test_containers_of_deployments_have_probes_and_bounds_of_memory(user: User) -> None:
    documents = manifests(user, "--islands", "1x1x1", "--web", "--standby")
    found = [(each, container) for each in of_kind(documents, "Deployment") for container in containers(each)]
    assert len(found) == 3
    for deployment, container in found:
        assert {"startupProbe", "livenessProbe"} <= container.keys()
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert "memory" in resources["limits"]
        assert "cpu" not in resources["limits"], "a limit of CPU time slows an idle node down"
        is_controller = container["name"] == "controller"
        assert ("readinessProbe" in container) is is_controller, (
            "pods are ready while the controller accepts connections"
        )
        assert deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_the_page_is_probed_without_its_key(user: User) -> None:
    (deployment,) = of_kind(manifests(user, "--islands", "1x1x1", "--web"), "Deployment")
    _, web = containers(deployment)
    for probe in (web["startupProbe"], web["livenessProbe"]):
        assert probe["httpGet"] == {"path": HEALTH, "port": "web", "scheme": "HTTPS"}
    assert web["ports"] == [{"name": "web", "containerPort": 8473}]


def test_hosts_have_the_resources_of_the_options_and_no_limit_of_cpu_time(user: User) -> None:
    (job,) = jobs(manifests(user, "--islands", "1x1x1", "--resource", "cpu=4", "--resource", "memory=8Gi"))
    (host,) = containers(job)
    assert host["resources"] == {"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}


def test_the_journal_and_the_usage_outlive_the_pod_of_the_controller(user: User) -> None:
    documents = manifests(user, "--islands", "1x1x1", "--storage", "20Gi")
    (claim,) = of_kind(documents, "PersistentVolumeClaim")
    (controller,) = of_kind(documents, "Deployment")
    mount, volume = volume_of(controller, "state")
    assert claim["spec"]["resources"]["requests"] == {"storage": "20Gi"}
    assert volume["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}
    (container,) = containers(controller)
    command = container["command"]
    assert Path(command[command.index("--journal") + 1]).is_relative_to(mount["mountPath"])
    assert {"name": "ATOLL_STATE_DIR", "value": mount["mountPath"]} in container["env"]
    without = manifests(user, "--islands", "1x1x1", "--storage", "none")
    assert of_kind(without, "PersistentVolumeClaim") == []
    assert "--journal" not in str(without)


def test_all_directories_of_a_container_can_be_written(user: User) -> None:
    for pod in pods(manifests(user, "--islands", "2x1x1", "--web", "--standby")):
        for container in pod["spec"]["containers"]:
            values = {each["name"]: each.get("value", "") for each in container["env"]}
            mounts = {each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]}
            for name in ("HOME", "ATOLL_STATE_DIR", "ATOLL_CACHE_DIR", "XDG_RUNTIME_DIR"):
                assert mounts.get(values[name]) is False, f"{name} of {container['name']}"


def test_only_pods_of_the_cluster_and_its_clients_reach_it(user: User) -> None:
    documents = manifests(user, "--islands", "1x2x1", "--name", "lab")
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "NetworkPolicy")}
    assert set(policies) == {"lab-controller", "lab-hosts"}
    labels = [pod["metadata"]["labels"] for pod in pods(documents)]
    for policy in policies.values():
        selected = [each for each in labels if policy["podSelector"]["matchLabels"].items() <= each.items()]
        assert len(selected) == 1, "of the controller, or of the one template of hosts"
        (rule,) = policy["ingress"]
        own, clients = rule["from"]
        assert all(own["podSelector"]["matchLabels"].items() <= each.items() for each in labels)
        assert clients == {"namespaceSelector": {}, "podSelector": {"matchLabels": {"atoll-client": "lab"}}}


def test_one_host_at_a_time_and_never_the_controller_is_evicted(user: User) -> None:
    documents = manifests(user, "--islands", "2x2x1")
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(documents, "PodDisruptionBudget")}
    assert budgets["atoll-controller"]["maxUnavailable"] == 0
    assert budgets["atoll-hosts"]["minAvailable"] == 3
    selector = budgets["atoll-hosts"]["selector"]["matchLabels"].items()
    assert sum(selector <= pod["metadata"]["labels"].items() for pod in pods(documents)) == 2
    one = of_kind(manifests(user, "--islands", "1x1x1"), "PodDisruptionBudget")
    assert [each["metadata"]["name"] for each in one] == ["atoll-controller"]


STANDBY = ("--islands", "2x2x1", "--name", "lab", "--standby", "--web")
PAIR = ("lab", "lab-standby")


def test_two_controllers_follow_each_other_and_use_one_lease(user: User) -> None:
    documents = manifests(user, *STANDBY)
    for name, other in (PAIR, PAIR[::-1]):
        controller = named(documents, "Deployment", name)
        command = containers(controller)[0]["command"]
        assert command[command.index("--advertise") + 1] == f"{name}:7000"
        assert command[command.index("--standby") + 1] == f"{other}:7000"
        assert command[command.index("--leader-lease") + 1] == "kubernetes://$(POD_NAMESPACE)/lab"
        assert {"--continue", "--journal", "--foreground"} < set(command)
        _, volume = volume_of(controller, "state")
        assert volume["persistentVolumeClaim"]["claimName"] == f"{name}-state"
        assert named(documents, "PersistentVolumeClaim", f"{name}-state")
        selector = named(documents, "Service", name)["spec"]["selector"].items()
        assert [selector <= each["metadata"]["labels"].items() for each in pods(documents)[:2]].count(True) == 1
        assert selector <= controller["spec"]["template"]["metadata"]["labels"].items()
    for job in jobs(documents):
        command = containers(job)[0]["command"]
        assert command[command.index("--address") + 1] == "lab:7000,lab-standby:7000"
    joins = [data["ATOLL_JOIN"] for data in secrets_of(documents).values() if "ATOLL_JOIN" in data]
    assert all(each.startswith("atoll://lab:7000,lab-standby:7000/") for each in joins)


def test_two_controllers_without_volumes_still_have_journals(user: User) -> None:
    documents = manifests(user, *STANDBY, "--storage", "none")
    assert of_kind(documents, "PersistentVolumeClaim") == []
    for name in PAIR:
        controller = named(documents, "Deployment", name)
        assert "--journal" in containers(controller)[0]["command"]
        assert "emptyDir" in volume_of(controller, "state")[1]


def test_only_the_containers_of_two_controllers_have_a_token_and_only_for_their_lease(user: User) -> None:
    documents = manifests(user, *STANDBY)
    (role,), (binding,) = of_kind(documents, "Role"), of_kind(documents, "RoleBinding")
    rules = {verb: rule for rule in role["rules"] for verb in rule["verbs"]}
    assert set(rules) == {"get", "update", "create"}
    assert all(
        (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"]) for rule in role["rules"]
    )
    assert rules["get"]["resourceNames"] == rules["update"]["resourceNames"] == ["lab"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert named(documents, "ServiceAccount", subject["name"])
    assert all(each["automountServiceAccountToken"] is False for each in of_kind(documents, "ServiceAccount"))
    with_token = []
    for pod in pods(documents):
        projected = {each["name"] for each in pod["spec"]["volumes"] if "projected" in each}
        for container in pod["spec"]["containers"]:
            mounts = {each["name"]: each for each in container["volumeMounts"]}
            if projected & set(mounts):
                (name,) = projected
                assert mounts[name]["mountPath"] == str(SERVICE_ACCOUNT)
                with_token.append((pod["spec"]["serviceAccountName"], container["name"]))
    assert with_token == [(subject["name"], "controller")] * 2


def test_two_controllers_are_on_two_nodes_and_one_of_them_is_evicted_at_a_time(user: User) -> None:
    documents = manifests(user, *STANDBY)
    budget = named(documents, "PodDisruptionBudget", "lab-controller")["spec"]
    assert budget["minAvailable"] == 1
    policies = [named(documents, "NetworkPolicy", name)["spec"] for name in ("lab-controller", "lab-lease")]
    selectors = [budget["selector"], *(each["podSelector"] for each in policies)]
    for pod in pods(documents)[:2]:
        (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        selectors.append(term["labelSelector"])
    for selector in selectors:
        chosen = [selector["matchLabels"].items() <= each["metadata"]["labels"].items() for each in pods(documents)]
        assert chosen == [True, True, False, False]


def test_controllers_with_a_lease_may_reach_the_api_server_the_other_pods_and_names(user: User) -> None:
    documents = manifests(user, *STANDBY)
    policy = named(documents, "NetworkPolicy", "lab-lease")["spec"]
    assert policy["policyTypes"] == ["Egress"]
    pods_of_cluster, others = policy["egress"]
    (peer,) = pods_of_cluster["to"]
    assert all(
        peer["podSelector"]["matchLabels"].items() <= each["metadata"]["labels"].items() for each in pods(documents)
    )
    assert {(each["port"], each["protocol"]) for each in others["ports"]} == {
        (53, "UDP"),
        (53, "TCP"),
        (443, "TCP"),
        (6443, "TCP"),
    }


def test_the_page_finds_the_controller_that_serves(user: User) -> None:
    documents = manifests(user, *STANDBY)
    page = containers(named(documents, "Deployment", "lab"))[1]
    assert page["envFrom"] == [{"secretRef": {"name": "lab-client"}}]
    assert [each["name"] for each in containers(named(documents, "Deployment", "lab-standby"))] == ["controller"]


def test_hosts_of_an_island_prefer_different_nodes(user: User) -> None:
    documents = manifests(user, "--islands", "2x2x1")
    hosts = [pod for pod in pods(documents) if pod["metadata"]["labels"].get("atoll-role") == "host"]
    for pod in hosts:
        (term,) = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        rule = term["podAffinityTerm"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        selector = rule["labelSelector"]["matchLabels"].items()
        assert [each for each in hosts if selector <= each["metadata"]["labels"].items()] == [pod]


def test_slices_of_tpus_do_not_share_a_node_pool(user: User) -> None:
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    for platform, expected in (("tpu", "cloud.google.com/gke-nodepool"), ("cuda", None)):
        documents = manifests(user, "--islands", "2x1x4", "--platform", platform)
        found = [each["metadata"].get("annotations", {}).get(key) for each in of_kind(documents, "JobSet")]
        assert found == [expected, expected]


def test_an_island_is_an_indexed_job_of_its_hosts_each_with_its_devices(user: User) -> None:
    documents = manifests(user, "--islands", "2x4x8", "--platform", "cuda")
    assert len(jobs(documents)) == 2
    for island, job in enumerate(jobs(documents)):
        assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (4, 4)
        assert job["spec"]["completionMode"] == "Indexed"
        (host,) = containers(job)
        assert {"name": "JOB_INDEX", "value": str(island)} in host["env"]
        assert host["resources"]["limits"] == {"nvidia.com/gpu": "8"}


FILE = """
[[island]]
hosts = 2
devices = 4
platform = "cuda"

[[island]]
devices = 2
"""


def test_islands_that_differ_are_in_a_file_that_the_controller_reads(user: User, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(FILE)
    documents = manifests(user, "--cluster", str(tmp_path / "c.toml"))
    for each in [*(each for each in documents if each["kind"] != "JobSet"), *jobs(documents)]:
        kubernetes_validate.validate(each, VERSION, strict=True)
    assert [job["spec"]["completions"] for job in jobs(documents)] == [2, 1]
    assert [containers(job)[0].get("resources", {}).get("limits") for job in jobs(documents)] == [
        {"nvidia.com/gpu": "4"},
        None,
    ]
    (file,) = of_kind(documents, "ConfigMap")
    (controller,) = of_kind(documents, "Deployment")
    (container,) = containers(controller)
    mount, volume = volume_of(controller, "cluster")
    assert volume["configMap"]["name"] == file["metadata"]["name"]
    command = container["command"]
    assert command[command.index("--cluster") + 1] == f"{mount['mountPath']}/cluster.toml"
    assert file["data"] == {"cluster.toml": FILE}


TENANTS = """
[tenant.red]
token = "./of-red"
share = 2.5
memory = "8GiB"

[tenant.blue-2]
token = "bbbbbbbbbbbbbbbbbbbbbbbb"
role = "operator"

[tenant.default]
priority = -1
"""


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    """Write a file of tenants."""
    (tmp_path / "of-red").write_text("r" * 24 + "\n")
    (tmp_path / "tenants.toml").write_text(TENANTS)
    return str(tmp_path / "tenants.toml")


def secrets_of(documents: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    return {each["metadata"]["name"]: each["stringData"] for each in of_kind(documents, "Secret")}


def test_tenants_are_in_a_secret_that_the_controller_reads_with_a_file_for_each_token(
    user: User, tenants: str, tmp_path: Path
) -> None:
    documents = manifests(user, "--islands", "1x1x1", "--tenants", tenants)
    for each in [*(each for each in documents if each["kind"] != "JobSet"), *jobs(documents)]:
        kubernetes_validate.validate(each, VERSION, strict=True)
    (controller,) = of_kind(documents, "Deployment")
    (container,) = containers(controller)
    mount, volume = volume_of(controller, "tenants")
    assert volume["secret"]["secretName"] == "atoll-tenants"
    command = container["command"]
    assert command[command.index("--tenants") + 1] == f"{mount['mountPath']}/tenants.toml"
    files = secrets_of(documents)["atoll-tenants"]
    assert {"red.token", "blue-2.token"} < set(files)
    assert "bbbbb" not in files["tenants.toml"]
    (tmp_path / "mounted").mkdir()
    for name, content in files.items():
        (tmp_path / "mounted" / name).write_text(content)
    assert set(read_tenants(tmp_path / "mounted" / "tenants.toml")) == set(read_tenants(tenants))


def test_each_tenant_has_a_secret_with_its_own_token_and_nobody_elses(user: User, tenants: str) -> None:
    secrets = secrets_of(manifests(user, "--islands", "1x1x1", "--tenants", tenants))
    joins = {name: data["ATOLL_JOIN"].rpartition("/")[2] for name, data in secrets.items() if "ATOLL_JOIN" in data}
    assert (joins["atoll-client-red"], joins["atoll-client-blue-2"]) == ("r" * 24, "b" * 24)
    assert len(set(joins.values())) == 4, "of hosts, of the default tenant, and of two more"
    again = manifests(user, "--islands", "1x1x1", "--tenants", tenants, "--existing-secrets")
    assert of_kind(again, "Secret") == []
    assert "atoll-tenants" in str(again)


def test_no_host_and_no_client_gets_the_authoritys_key(user: User) -> None:
    secrets = {
        each["metadata"]["name"]: each["stringData"]
        for each in of_kind(manifests(user, "--islands", "1x1x1"), "Secret")
    }
    assert [name for name, data in secrets.items() if "PRIVATE KEY" in str(data)] == ["atoll-controller"]
    assert secrets["atoll-host"] != secrets["atoll-client"]


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (("--name", "Under_score"), "beginning with a letter"),
        (("--resource", "cpu"), "expected KEY=VALUE"),
        (("--platform", "gpu"), "give cuda or rocm"),
        (("--platform", "cuda", "--resource", "nvidia.com/gpu=2"), "requests the devices of its island already"),
        (("--toleration", "a=b"), "expected KEY:EFFECT or KEY=VALUE:EFFECT"),
        (("--islands", "2x2"), "expected ISLANDSxHOSTSxDEVICES"),
        (("--engine", "local"), "--engine hosts"),
        (("--tenants", "tenants.toml"), "invalid name 'An.other' for a Secret"),
    ],
)
def test_what_cannot_be_is_refused(user: User, options: tuple[str, ...], output: str, tmp_path: Path) -> None:
    (tmp_path / "tenants.toml").write_text('[tenant."An.other"]\ntoken = "aaaaaaaaaaaaaaaaaaaa"\n')
    options = tuple(str(tmp_path / each) if each == "tenants.toml" else each for each in options)
    refused = user.atoll("kubernetes", "--image", "a", "--islands", "1x1x1", *options)
    assert refused.returncode == 2
    assert output in refused.stderr


def test_the_commands_and_secrets_of_the_manifests_make_a_cluster(user: User, tenants: str, tmp_path: Path) -> None:
    """Run each container's command with the settings from Kubernetes. Names and directories refer to this machine."""
    documents = manifests(user, "--islands", "1x2x1", "--tenants", tenants)
    secrets, mounted = secrets_of(documents), tmp_path / "mounted"
    mounted.mkdir()
    for name, content in secrets["atoll-tenants"].items():
        (mounted / name).write_text(content)
    address = f"127.0.0.1:{free_port()}"

    def here(text: str) -> str:
        for there in ("atoll:7000", "0.0.0.0:7000"):
            text = text.replace(there, address)
        return text.replace("/etc/atoll-tenants", str(mounted)).replace("/var/lib/atoll", str(tmp_path / "state"))

    def command(container: dict[str, Any]) -> list[str]:
        return [here(each).replace("$(POD_IP)", "127.0.0.1") for each in container["command"][1:]]

    def environment(component: str) -> dict[str, str]:
        return {name: here(value) for name, value in secrets[f"atoll-{component}"].items()}

    (controller,) = containers(*of_kind(documents, "Deployment"))
    (host,) = containers(*jobs(documents))
    up = user.start_atoll(*command(controller), **environment("controller"))
    agents = [
        user.start_atoll(*command(host), **environment("host"), JOB_INDEX="0", JOB_COMPLETION_INDEX=index)
        for index in "10"
    ]
    assert first_line(up) == f"tls://{address}"
    for probe in ("startupProbe", "livenessProbe"):
        asked = user.atoll(*controller[probe]["exec"]["command"][1:], **environment("controller"))
        assert json.loads(asked.check().stdout)["topology"] == "1x2x1"
    script = "import jax, jax.numpy as jnp; print(len(jax.devices()), jnp.arange(4).sum())"
    assert user.script(script, JAX_PLATFORMS="atoll", **environment("client-red")).check().stdout == "2 6\n"
    seen = json.loads(user.atoll("tenants", "--json", **environment("client-red")).check().stdout)
    assert [(each["name"], each["share"], each["memory"]) for each in seen] == [("red", 2.5, 8 << 30)]
    everybody = json.loads(user.atoll("tenants", "--json", **environment("client")).check().stdout)
    assert {each["name"]: each["priority"] for each in everybody} == {"default": -1, "red": 0, "blue-2": 0}
    for each in (*agents, up):
        each.terminate()
    for each in (*agents, up):
        finish(each)
    assert user.leftovers() == []


def test_a_base_for_kustomize_has_the_same_objects_but_not_the_secrets(user: User, tmp_path: Path) -> None:
    options = ("--islands", "2x2x1", "--web", "--namespace", "team")
    base = tmp_path / "deploy" / "atoll"
    user.atoll("kubernetes", "--image", "example.org/a", *options, "--kustomize", str(base)).check()
    (base / "patch.yaml").write_text("of the user")
    user.atoll("kubernetes", "--image", "example.org/b", *options, "--kustomize", str(base)).check()
    assert (base / "patch.yaml").read_text() == "of the user"
    named = loaded((base / "kustomization.yaml").read_text())[0]["resources"]
    written = [loaded((base / name).read_text())[0] for name in named]
    printed = manifests(user, *options)
    assert [(each["kind"], each["metadata"]) for each in written] == [
        (each["kind"], each["metadata"]) for each in printed if each["kind"] != "Secret"
    ]
    assert "example.org/b" in (base / "deployment-atoll.yaml").read_text()
    assert (base / ".gitignore").read_text() == "secrets.yaml\n"
    assert (base / "secrets.yaml").stat().st_mode & 0o777 == 0o600
    secrets = loaded((base / "secrets.yaml").read_text())
    assert {each["kind"] for each in secrets} == {"Secret"}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl, which contains kustomize")
def test_kustomize_builds_an_overlay_of_the_base(user: User, tmp_path: Path) -> None:
    user.atoll("kubernetes", "--image", "a", "--islands", "1x2x1", "--kustomize", str(tmp_path / "base")).check()
    (tmp_path / "kustomization.yaml").write_text("""
resources: [base]
namespace: blue
images: [{name: a, newName: example.org/b, newTag: "2"}]
patches:
- target: {kind: Deployment}
  patch: |-
    - op: add
      path: /spec/template/spec/priorityClassName
      value: high
""")
    built = subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=True)
    documents = loaded(built.stdout)
    assert len(documents) == len([each for each in manifests(user, "--islands", "1x2x1") if each["kind"] != "Secret"])
    (controller,) = of_kind(documents, "Deployment")
    assert {each["metadata"]["namespace"] for each in documents} == {"blue"}
    assert controller["spec"]["template"]["spec"]["priorityClassName"] == "high"
    assert containers(controller)[0]["image"] == "example.org/b:2"
