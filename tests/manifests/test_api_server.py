"""Tests of the manifests of `atoll kubernetes` on a real API server with RBAC: `make kubernetes`.

The server stores the objects and keeps the Lease. No kubelet starts the pods, so the tests run the containers' commands
on this machine, with a token of their ServiceAccount at the path at which a pod has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.leadership.kubernetes_lease import SERVICE_ACCOUNT
from tests.cluster_process import User, eventually, finish, first_line, free_port
from tests.manifests.api_server import ApiServer, api_server
from tests.manifests.test_kubernetes import (
    ALL_OPTIONS,
    FILE,
    TENANTS,
    containers,
    jobs,
    manifests,
    named,
    of_kind,
    pods,
    secrets_of,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("ATOLL_TEST_KUBERNETES"), reason="run these by `make kubernetes`"),
]

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with api_server(tmp_path_factory.mktemp("api")) as found:
        print(f"Kubernetes {found.version()}")
        yield found


@pytest.fixture
def namespace(server: ApiServer, request: pytest.FixtureRequest) -> str:
    name = f"test-{abs(hash(request.node.name)) % 10**9}"
    status, reply = server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, "")
    assert status == 201, reply
    authority = {"ca.crt": server.authority.read_text()}
    configuration = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "kube-root-ca.crt"}}
    assert server.create(configuration | {"data": authority}, name)[0] == 201
    return name


def create_all(server: ApiServer, documents: list[dict[str, Any]], namespace: str) -> None:
    for document in documents:
        status, reply = server.create(document, namespace)
        assert status == 201, (document["kind"], document["metadata"]["name"], reply)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--storage", "none"),
        ("--standby",),
        ("--standby", "--storage", "none", "--web"),
        ("--standby", *ALL_OPTIONS.split()),
        ("--tenants", "tenants.toml", "--standby"),
        ("--cluster", "islands.toml"),
        ("--platform", "tpu", "--node-selector", "cloud.google.com/gke-tpu-topology=2x4"),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_the_server_accepts_every_object_and_pod(
    user: User, server: ApiServer, namespace: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    (tmp_path / "of-red").write_text("r" * 24 + "\n")
    (tmp_path / "islands.toml").write_text(FILE)
    options = tuple(str(tmp_path / each) if each.endswith(".toml") else each for each in options)
    islands = () if "--cluster" in options else ("--islands", "2x2x4")
    documents = manifests(user, *islands, *options)
    create_all(server, documents, namespace)
    create_all(server, jobs(documents), namespace)
    for number, template in enumerate(pods(documents)):
        metadata = {"name": f"pod-{number}", "labels": template["metadata"]["labels"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        status, reply = server.create(pod, namespace)
        assert status == 201, reply


def test_a_base_for_kustomize_is_accepted_by_kubectl_apply(user: User, server: ApiServer, tmp_path: Path) -> None:
    kubectl = subprocess.run(["which", "kubectl"], capture_output=True, text=True).stdout.strip()
    if not kubectl:
        pytest.skip("kubectl is not installed")
    base = tmp_path / "base"
    name = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kustomized"}}
    server.create(name, "")
    user.atoll(*["kubernetes", "--image", "a", "--islands", "1x2x1", "--standby"], "--kustomize", str(base)).check()
    for file in base.glob("poddisruptionbudget-*"):
        file.write_text(file.read_text().replace("policy/v1", "policy/v1beta1"))
    (tmp_path / "kustomization.yaml").write_text("resources: [base]\nnamespace: kustomized\n")
    access = (
        *("--server", f"https://{server.host}:{server.port}", "--token", "administrator"),
        *("--certificate-authority", str(server.authority), "--namespace", "kustomized"),
    )
    for source in (("-f", str(base / "secrets.yaml")), ("-k", str(tmp_path))):
        for _ in range(2):  # the second time, as for a change
            done = subprocess.run([kubectl, *access, "apply", *source], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    assert "rolebinding.rbac.authorization.k8s.io/atoll-controller unchanged" in done.stdout


def test_the_account_of_the_controllers_can_use_its_lease_and_nothing_else(
    user: User, server: ApiServer, namespace: str
) -> None:
    create_all(server, manifests(user, "--islands", "1x1x1", "--name", "lab", "--standby"), namespace)
    leases, token = LEASES.format(namespace), server.token(namespace, "lab-controller")

    def lease(name: str) -> dict[str, Any]:
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}

    assert server.request("GET", f"{leases}/lab", token=token)[0] == 404
    status, created = server.request("POST", leases, lease("lab"), token)
    assert status == 201
    assert server.request("PUT", f"{leases}/lab", created, token)[0] == 200
    server.request("POST", leases, lease("other"))
    forbidden = [
        ("GET", f"{leases}/other", None),
        ("PUT", f"{leases}/other", lease("other")),
        ("GET", leases, None),
        ("DELETE", f"{leases}/lab", None),
        ("GET", f"/api/v1/namespaces/{namespace}/secrets", None),
        ("GET", f"/api/v1/namespaces/{namespace}/pods", None),
        ("GET", f"{LEASES.format('kube-system')}/lab", None),
    ]
    for method, path, body in forbidden:
        assert server.request(method, path, body, token)[0] == 403, (method, path)
    of_hosts = server.token(namespace, "lab")
    assert server.request("GET", f"{leases}/lab", token=of_hosts)[0] == 403
    assert server.request("POST", leases, lease("lab"), of_hosts)[0] == 403


# ---- the controllers


@pytest.fixture
def account(server: ApiServer) -> Iterator[Path]:
    """Return the directory with a pod's credentials."""
    if SERVICE_ACCOUNT.exists():
        pytest.skip(f"{SERVICE_ACCOUNT} exists: this machine is a pod")
    try:
        SERVICE_ACCOUNT.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"{SERVICE_ACCOUNT}: {error.strerror}: run these by `make kubernetes`, as root")
    try:
        (SERVICE_ACCOUNT / "ca.crt").write_bytes(server.authority.read_bytes())
        yield SERVICE_ACCOUNT
    finally:
        for file in SERVICE_ACCOUNT.iterdir():
            file.unlink()
        for directory in (SERVICE_ACCOUNT, *SERVICE_ACCOUNT.parents[:2]):
            with contextlib.suppress(OSError):
                directory.rmdir()


@pytest.fixture
def user(program_cache: Path) -> Iterator[User]:
    with tempfile.TemporaryDirectory(prefix="at-") as directory, User(Path(directory), program_cache) as someone:
        yield someone


class Pods:
    """Containers of the two controllers and of a host, as processes of this machine.

    The names of the containers resolve to the loopback address.
    """

    def __init__(self, user: User, server: ApiServer, account: Path, namespace: str, directory: Path) -> None:
        self._user, self._server, self._account, self._namespace = user, server, account, namespace
        self._directory = directory
        self.documents = manifests(user, "--islands", "1x1x2", "--name", "lab", "--standby")
        create_all(server, self.documents, namespace)
        self._secrets = secrets_of(self.documents)
        self._ports = {name: free_port() for name in ("lab", "lab-standby")}
        self.started: dict[str, subprocess.Popen[str]] = {}
        self.rotate()

    def rotate(self) -> None:
        """Replace the token, as kubelet does."""
        new = self._account / "new"
        new.write_text(self._server.token(self._namespace, "lab-controller"))
        new.rename(self._account / "token")

    def _here(self, text: str, pod: str) -> str:
        for there in ("lab-standby:7000", "lab:7000"):
            text = text.replace(there, f"127.0.0.1:{self._ports[there.removesuffix(':7000')]}")
        text = text.replace("0.0.0.0:7000", f"127.0.0.1:{self._ports[pod]}").replace("$(POD_IP)", "127.0.0.1")
        return text.replace("$(POD_NAMESPACE)", self._namespace).replace("/var/lib/atoll", str(self._directory / pod))

    def _environment(self, component: str) -> dict[str, str]:
        return {name: self._here(value, "lab") for name, value in self._secrets[f"lab-{component}"].items()}

    def start(self, pod: str) -> None:
        """Start the controller of a pod. Like a file system per pod, each has a separate registry of clusters."""
        (self._directory / pod / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
        container = containers(named(self.documents, "Deployment", pod))[0]
        command = [self._here(each, pod) for each in container["command"][1:]]
        self.started[pod] = self._user.start_atoll(
            *command, "--name", pod, **self._environment("controller"), **self._api
        )

    @property
    def _api(self) -> dict[str, str]:
        return {"KUBERNETES_SERVICE_HOST": self._server.host, "KUBERNETES_SERVICE_PORT_HTTPS": str(self._server.port)}

    def start_host(self) -> subprocess.Popen[str]:
        (container,) = containers(jobs(self.documents)[0])
        command = [self._here(each, "lab") for each in container["command"][1:]]
        rank = {"JOB_INDEX": "0", "JOB_COMPLETION_INDEX": "0"}
        return self._user.start_atoll(*command, **self._environment("host"), **rank)

    def script(self, code: str, cues: Path) -> subprocess.Popen[str]:
        environment = {"JAX_PLATFORMS": "atoll", "CUES": str(cues), **self._environment("client")}
        return self._user.start(sys.executable, "-u", "-c", textwrap.dedent(code), **environment)

    def status(self, pod: str) -> dict[str, Any]:
        output = self._user.atoll("status", "--json", "--name", pod, **self._environment("controller"))
        return json.loads(output.stdout) if output.returncode == 0 else {}

    def text(self, pod: str) -> str:
        return self._user.atoll("status", "--name", pod, **self._environment("controller")).stdout

    def serves(self, pod: str) -> bool:
        return [each["state"] for each in self.status(pod).get("islands", [])] == ["ready"]

    def follows(self, pod: str) -> bool:
        return bool(self.status(pod).get("standby", {}).get("state") == "following")

    def processes(self, pod: str) -> list[psutil.Process]:
        mine = f"{self._directory / pod}/"
        return [process for process, command in self._user.commands().items() if mine in command]

    def controller(self, pod: str) -> psutil.Process:
        (found,) = [each for each in self.processes(pod) if "controller_main" in " ".join(each.cmdline())]
        return found

    def terminate(self, pod: str) -> None:
        """End a pod like an eviction."""
        self.started[pod].terminate()
        ended = finish(self.started[pod])
        assert ended.returncode == 0, ended.stderr

    def lose(self, pod: str) -> None:
        """End a pod like the loss of its node."""
        for process in self.processes(pod):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.started[pod].communicate()

    @property
    def lease(self) -> dict[str, Any]:
        status, reply = self._server.request("GET", f"{LEASES.format(self._namespace)}/lab")
        assert status == 200, reply
        found: dict[str, Any] = reply["spec"]
        return found


SCRIPT = """
    import os, time
    import jax, jax.numpy as jnp
    x = jnp.zeros(4)
    number = 0
    while True:
        x = jax.jit(lambda x: x + 1)(x)
        print(float(x.sum()), flush=True)
        while not os.path.exists(os.path.join(os.environ["CUES"], str(number))):
            time.sleep(0.05)
        number += 1
"""


class Scene:
    """Controller, a second one that follows it, a host, and a script that runs a step at each request."""

    def __init__(self, pods: Pods, cues: Path) -> None:
        self.pods = pods
        self._cues = cues
        self._steps = 0
        pods.start("lab")
        self.host = pods.start_host()
        first_line(pods.started["lab"])
        pods.start("lab-standby")
        first_line(pods.started["lab-standby"])
        assert eventually(lambda: pods.follows("lab-standby"))
        self.script = pods.script(SCRIPT, cues)
        assert first_line(self.script) == "4.0"

    def begin_step(self) -> None:
        (self._cues / str(self._steps)).touch()
        self._steps += 1

    def end_step(self) -> None:
        assert first_line(self.script) == f"{4.0 * (self._steps + 1)}"

    def step(self) -> None:
        self.begin_step()
        self.end_step()


@pytest.fixture
def scene(user: User, server: ApiServer, account: Path, namespace: str, tmp_path: Path) -> Scene:
    (tmp_path / "cues").mkdir()
    return Scene(Pods(user, server, account, namespace, tmp_path), tmp_path / "cues")


def seconds_until(holds: Callable[[], bool]) -> float:
    began = time.monotonic()
    assert eventually(holds)
    return time.monotonic() - began


def test_a_pod_that_is_evicted_and_a_node_that_is_lost_cost_no_session(scene: Scene) -> None:
    pods = scene.pods
    began = time.monotonic()
    pods.terminate("lab")
    scene.step()
    print(f"after an eviction, the script's next step takes {time.monotonic() - began:.1f} s")
    assert pods.lease["leaseTransitions"] == 1
    pods.start("lab")
    first_line(pods.started["lab"])
    assert eventually(lambda: pods.follows("lab"))
    began = time.monotonic()
    pods.lose("lab-standby")
    scene.step()
    print(f"after the loss of a node, the script's next step takes {time.monotonic() - began:.1f} s")
    assert pods.lease["leaseTransitions"] == 2
    pods.start("lab-standby")
    first_line(pods.started["lab-standby"])
    assert eventually(lambda: pods.follows("lab-standby"))
    scene.step()


def test_a_controller_that_is_killed_is_replaced_before_the_lease_expires(scene: Scene) -> None:
    began = time.monotonic()
    scene.pods.controller("lab").kill()
    scene.step()
    print(f"after the controller's process was killed, the script's next step takes {time.monotonic() - began:.1f} s")
    assert scene.pods.lease["leaseTransitions"] == 1
    assert eventually(lambda: scene.pods.serves("lab-standby"))


def test_a_controller_that_is_frozen_is_replaced_and_follows_when_it_continues(scene: Scene) -> None:
    pods, frozen = scene.pods, scene.pods.controller("lab")
    began = time.monotonic()
    frozen.send_signal(signal.SIGSTOP)
    scene.step()
    print(f"after the controller was frozen, the script's next step takes {time.monotonic() - began:.1f} s")
    assert pods.lease["leaseTransitions"] == 1
    frozen.send_signal(signal.SIGCONT)
    psutil.wait_procs([frozen], timeout=60)
    assert not frozen.is_running()
    scene.step()


def test_a_controller_whose_account_is_forbidden_sends_nothing_until_it_is_allowed_again(
    scene: Scene, server: ApiServer, namespace: str
) -> None:
    pods = scene.pods
    (binding,) = of_kind(pods.documents, "RoleBinding")
    path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    assert server.request("DELETE", f"{path}/lab-controller")[0] == 200
    assert eventually(lambda: "does not hold the lease" in pods.text("lab"))
    scene.begin_step()
    time.sleep(5)
    assert server.create(binding, namespace)[0] == 201
    seconds = seconds_until(lambda: "so it sends nothing" not in pods.text("lab") or not pods.serves("lab"))
    print(f"after the account was allowed again, the lease is held after {seconds:.1f} s")
    scene.end_step()


def test_a_token_that_is_replaced_is_used_at_once(scene: Scene, server: ApiServer, namespace: str) -> None:
    pods = scene.pods
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    # So the previous token is not valid any more.
    assert server.request("DELETE", f"{accounts}/lab-controller")[0] == 200
    assert server.create(named(pods.documents, "ServiceAccount", "lab-controller"), namespace)[0] == 201
    pods.rotate()
    renewed = pods.lease["renewTime"]
    assert eventually(lambda: pods.lease["renewTime"] > renewed)
    scene.step()
    assert pods.lease["leaseTransitions"] == 0


def test_a_lease_that_an_operator_deletes_is_created_again_by_its_holder(
    scene: Scene, server: ApiServer, namespace: str
) -> None:
    before = scene.pods.lease
    assert server.request("DELETE", f"{LEASES.format(namespace)}/lab")[0] == 200
    leases = LEASES.format(namespace)
    seconds = seconds_until(lambda: server.request("GET", f"{leases}/lab")[0] == 200)
    print(f"a deleted lease is created again after {seconds:.1f} s")
    after = scene.pods.lease
    assert (after["holderIdentity"], after["leaseTransitions"]) == (
        before["holderIdentity"],
        before["leaseTransitions"],
    )
    scene.step()
    scene.pods.lose("lab")
    scene.step()
    assert scene.pods.lease["leaseTransitions"] == 1


def test_a_server_that_restarts_costs_nothing_and_one_that_is_away_for_long_a_pause(
    scene: Scene, server: ApiServer
) -> None:
    pods = scene.pods
    server.kill()
    server.start()
    scene.step()
    server.kill()
    assert eventually(lambda: "does not hold the lease" in pods.text("lab"))
    scene.begin_step()
    time.sleep(10)
    server.start()
    began = time.monotonic()
    scene.end_step()
    print(f"after the API server is ready again, the script's step takes {time.monotonic() - began:.1f} s")
    assert pods.lease["leaseTransitions"] in (0, 1), "the first of the two that reaches the server continues"
