"""Builds the image and runs a cluster in it: `make image`.

1. Makes a base image with the Python of the distribution, by debootstrap. `--base IMAGE` names another one.
2. Builds docker/Dockerfile from that base with podman.
3. Compares the installed packages with docker/requirements.lock.
4. Runs the containers that `atoll kubernetes` describes, and a script, with their users and without privileges: the
   root file system is read-only, and a script sees the devices of two hosts.

Requires podman and, without `--base`, debootstrap as root. Images and containers are in a directory of their own, which
is removed at the end; `--keep DIRECTORY` keeps it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
BASE, IMAGE = "localhost/atoll-base", "localhost/atoll"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
SCRIPT = "import jax, jax.numpy as jnp; print(len(jax.devices()), jnp.arange(4).sum())"
WAIT_SECONDS = 120.0
# Limits that this process may set for others even if it may not raise its own.
_LIMITS = ("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096")


class Podman:
    """podman with images and containers in `directory`."""

    def __init__(self, directory: Path) -> None:
        storage = ["--root", str(directory / "storage"), "--runroot", str(directory / "run")]
        runtime = ["--runtime", "runc"] if shutil.which("runc") else []  # crun rejects cgroups of two versions
        self._command = ["podman", *storage, *runtime, "--cgroup-manager", "cgroupfs", "--events-backend", "none"]

    def __call__(self, *arguments: str, expected: int = 0) -> str:
        return run(*self._command, *arguments, expected=expected)

    def run(self, *arguments: str, expected: int = 0) -> str:
        """Run a container that is removed at its end, in the network of this machine."""
        return self("run", "--rm", "--network=host", *_LIMITS, *arguments, expected=expected)


def run(*command: str, expected: int = 0) -> str:
    """Run a command, and return its output; end with its output if its status is another than `expected`."""
    print("+", *(re.sub(r"\n.*", "...", each, flags=re.DOTALL) for each in command[:40]), flush=True)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    if ran.returncode != expected:
        sys.exit(f"{ran.stdout}{ran.stderr}\nthe command ended with status {ran.returncode}")
    return ran.stdout


def make_base(podman: Podman, directory: Path, suite: str) -> None:
    """Import a minimal system with Python as the image BASE."""
    system = directory / "base"
    run("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", suite, str(system))
    archive = directory / "base.tar"
    run("tar", "--numeric-owner", "--exclude=./var/cache/apt/*", "-C", str(system), "-cf", str(archive), ".")
    shutil.rmtree(system)
    podman("import", str(archive), BASE)
    archive.unlink()


def build(podman: Podman, base: str, directory: Path) -> None:
    arguments = ["--build-arg", f"BASE={base}", "--format", "docker", "--network=host", "--isolation=chroot"]
    certificates = os.environ.get("PIP_CERT", "")
    if certificates:  # the package index is behind a proxy that they authenticate
        settings = directory / "pip.conf"
        settings.write_text("[global]\ncert = /etc/pip-certificates\n")
        arguments += [
            "--volume",
            f"{settings}:/etc/pip.conf:ro",
            "--volume",
            f"{certificates}:/etc/pip-certificates:ro",
        ]
    podman("build", "-f", str(ROOT / "docker" / "Dockerfile"), "-t", IMAGE, *arguments, str(ROOT))


def check_packages(podman: Podman) -> None:
    """Compare the packages of the image with the lock."""
    lines = podman.run(IMAGE, "pip", "freeze", "--all").splitlines()
    installed = {line for line in lines if not re.match(r"(atoll|pip|setuptools|wheel)\b", line)}
    locked = {line for line in (ROOT / "docker" / "requirements.lock").read_text().splitlines() if line[:1] != "#"}
    if installed != locked:
        sys.exit(f"the image and the lock differ: {sorted(installed ^ locked)}")
    podman.run(IMAGE, "pip", "check")


def confined(container: Mapping[str, Any], pod: Mapping[str, Any], directory: Path) -> list[str]:
    """Return the options of podman for what the manifest says of a container: user, privileges and volumes.

    The volumes are in `directory`, with the modes that Kubernetes gives them.
    """
    security, own = pod["securityContext"], container["securityContext"]
    options = ["--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
    options += [f"--cap-drop={each}" for each in own["capabilities"]["drop"]]
    options += ["--read-only", "--read-only-tmpfs=false"] if own["readOnlyRootFilesystem"] else []
    options += [] if own["allowPrivilegeEscalation"] else ["--security-opt=no-new-privileges"]
    sources = {volume["name"]: volume for volume in pod["volumes"]}
    for mount in container["volumeMounts"]:
        if not {"secret", "configMap"} & sources[mount["name"]].keys():
            volume = directory / mount["name"]
            volume.mkdir(parents=True)
            os.chown(volume, 0, security["fsGroup"])
            volume.chmod(0o2777)
            options += ["--volume", f"{volume}:{mount['mountPath']}"]
    return options


def environment(container: Mapping[str, Any], secrets: Mapping[str, Mapping[str, str]]) -> list[str]:
    found = dict(secrets[container["envFrom"][0]["secretRef"]["name"]])
    found |= {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return [option for name, value in found.items() for option in ("--env", f"{name}={value}")]


@contextmanager
def containers_of(podman: Podman, documents: list[dict[str, Any]], directory: Path) -> Iterator[str]:
    """Run the controller and the hosts, with volumes in `directory`. Yield the name of the controller's container."""
    secrets = {each["metadata"]["name"]: each["stringData"] for each in documents if each["kind"] == "Secret"}
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    (jobset,) = [each for each in documents if each["kind"] == "JobSet"]
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    started: list[str] = []

    def start(name: str, pod: dict[str, Any], *more: str) -> None:
        (container,) = pod["containers"]
        command = [each.replace("$(POD_IP)", "127.0.0.1") for each in container["command"]]
        options = [
            *confined(container, pod, directory / name),
            *environment(container, secrets),
            *more,
            "--add-host=atoll:127.0.0.1",
        ]
        started.append(name)
        podman.run("--detach", "--name", name, *options, IMAGE, *command)

    try:
        start("controller", deployment["spec"]["template"]["spec"])
        for index in range(job["completions"]):
            start(f"host-{index}", job["template"]["spec"], "--env", f"JOB_COMPLETION_INDEX={index}")
        yield "controller"
    except BaseException:
        for name in started:
            subprocess.run([*podman._command, "logs", name], check=False)
        raise
    finally:
        for name in reversed(started):
            podman("rm", "--force", "--time=20", name)


def run_cluster(podman: Podman, directory: Path) -> None:
    """Run a cluster of two hosts in containers as the manifests describe them, and a script in another one."""
    printed = podman.run(IMAGE, "atoll", "kubernetes", "--image", IMAGE, "--islands", "1x2x1")
    documents = list(yaml.safe_load_all(printed))
    with containers_of(podman, documents, directory) as controller:
        deadline = time.monotonic() + WAIT_SECONDS
        while '"ready"' not in (shown := podman("exec", controller, "sh", "-c", "atoll status --json 2>&1 || true")):
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"the cluster was not ready within {WAIT_SECONDS:.0f} s; `atoll status` says:\n{shown}"
                )
            time.sleep(1.0)
        (secret,) = [each for each in documents if each["metadata"]["name"] == "atoll-client"]
        options = [option for name, value in secret["stringData"].items() for option in ("--env", f"{name}={value}")]
        options += ["--env", "JAX_PLATFORMS=atoll,cpu", "--add-host=atoll:127.0.0.1"]
        output = podman.run(*options, IMAGE, "python", "-c", SCRIPT)
        print(output, end="")
        if output.split() != ["2", "6"]:
            raise SystemExit("the script printed something else than `2 6`")


def check_user(podman: Podman) -> None:
    ids = podman.run(IMAGE, "sh", "-c", "id -u; id -g; touch /opt/atoll/x 2>/dev/null || echo denied").split()
    if ids != ["1000", "1000", "denied"]:
        sys.exit(f"the image runs as {ids}")
    podman.run(IMAGE)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", default="", help="an image with Python, instead of one that debootstrap makes")
    parser.add_argument("--suite", default="trixie", help="the release of Debian for debootstrap")
    parser.add_argument("--keep", default="", help="a directory for images that is kept, and used again")
    given = parser.parse_args()
    needed = ["podman", *([] if given.base else ["debootstrap"])]
    missing = [each for each in needed if shutil.which(each) is None]
    if missing:
        sys.exit(f"install {' and '.join(missing)} first: apt-get install podman runc debootstrap")
    directory = Path(given.keep or tempfile.mkdtemp(prefix="atoll-image-"))
    directory.mkdir(exist_ok=True)
    podman = Podman(directory)
    try:
        base = given.base or BASE
        if not given.base and BASE not in podman("images", "--format", "{{.Repository}}"):
            make_base(podman, directory, given.suite)
        build(podman, base, directory)
        check_user(podman)
        check_packages(podman)
        with tempfile.TemporaryDirectory(dir=directory) as volumes:
            run_cluster(podman, Path(volumes))
        print(podman("images", "--format", "{{.Repository}} {{.Size}}", IMAGE), end="")
    finally:
        if not given.keep:
            podman("system", "reset", "--force")
            shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
