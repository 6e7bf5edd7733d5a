"""Builds the wheel and the sdist, and tests them as a user gets them: `make release-check`.

1. Builds both twice and compares them: the same commit must give the same bytes.
2. Checks the metadata with twine.
3. Installs the wheel into an empty environment, without the repository, and runs JAX there on an embedded cluster.
4. Checks a consumer of the wheel's types with mypy and pyright.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import jax, jax.numpy as jnp
import atoll
assert "site-packages" in atoll.__file__, atoll.__file__
print(atoll.__version__, jax.device_count(), jax.jit(lambda x: (x * x).sum())(jnp.arange(10.0)))
"""
# The types that a user's program gets. `reveal_type` is checked by both tools.
CONSUMER = """
from typing import Any, assert_type

import atoll as pw
from atoll.data import Batches

devices: pw.VirtualDeviceSet = pw.make_virtual_device_set()
part: pw.Slice = devices.add_slice(devices=4)
print(part.devices[0].id, part.mesh(("x",)))
cluster: pw.ConnectedCluster = pw.connect(islands="2x1x4")
cluster.close()


@pw.program
def f(x: Any) -> Any:
    return x


program: pw.Program = f
try:
    pass
except pw.AccessError as error:
    assert_type(error, pw.AccessError)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, and return its output; end with its output if it fails."""
    print("+", *command, flush=True)
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    inherited = {key: value for key, value in os.environ.items() if key not in hidden and not key.startswith("ATOLL_")}
    ran = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**inherited, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    if ran.returncode:
        sys.exit(f"{ran.stdout}\nthe command ended with status {ran.returncode}")
    return ran.stdout


def build(directory: Path) -> dict[str, str]:
    """Build into a directory, and return the files with their hashes."""
    epoch = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    run(sys.executable, "-m", "build", "--outdir", directory, ROOT, cwd=ROOT, SOURCE_DATE_EPOCH=epoch)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def main() -> None:
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    built = build(dist)
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        again = build(temporary / "again")
        if again != built:
            sys.exit(f"two builds of one commit differ: {built} and {again}")
        run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()), cwd=temporary)
        run(sys.executable, "-m", "venv", "environment", cwd=temporary)
        python = temporary / "environment" / "bin" / "python"
        (wheel,) = dist.glob("*.whl")
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=temporary)
        print(run(python, "-c", SCRIPT, cwd=temporary, JAX_PLATFORMS="atoll", XDG_RUNTIME_DIR=name), end="")
        print(run(python.with_name("atoll"), "--version", cwd=temporary), end="")
        consumer = temporary / "consumer.py"
        consumer.write_text(CONSUMER)
        print(
            run(sys.executable, "-m", "mypy", "--strict", "--python-executable", python, consumer, cwd=temporary),
            end="",
        )
        print(run(sys.executable, "-m", "pyright", "--pythonpath", python, consumer, cwd=temporary), end="")
    for file, digest in built.items():
        print(f"{digest}  dist/{file}  {(dist / file).stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
