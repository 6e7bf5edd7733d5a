"""Builds the wheel and the sdist, and tests them as a user gets them: `make release-check`.

1. Builds both twice and compares them: the same commit must give the same bytes.
2. Checks the metadata with twine.
3. Compares the sdist with the files of the commit.
4. Installs the sdist and the wheel into empty environments, without the repository, and runs JAX there on an embedded
   cluster.
5. Checks a consumer of the wheel's types with mypy and pyright.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
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


def check_sdist(path: Path) -> None:
    """End with the names of the files that the sdist lacks, or that are not in the commit."""
    with tarfile.open(path) as archive:
        packed = {each.name.partition("/")[2] for each in archive.getmembers() if each.isfile()}
    committed = set(run("git", "ls-tree", "-r", "--name-only", "HEAD", cwd=ROOT).splitlines())
    if different := (packed - {"PKG-INFO"}) ^ committed:
        sys.exit(f"the sdist and the commit differ: {sorted(different)}")


def install_and_run(distribution: Path, directory: Path) -> Path:
    """Install into an empty environment, and run JAX there. Return the path of its Python."""
    environment = directory / f"environment of {distribution.suffix[1:]}"
    run(sys.executable, "-m", "venv", environment, cwd=directory)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", distribution, cwd=directory)
    print(run(python, "-c", SCRIPT, cwd=directory, JAX_PLATFORMS="atoll", XDG_RUNTIME_DIR=str(directory)), end="")
    print(run(python.with_name("atoll"), "--version", cwd=directory), end="")
    return python


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
        (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
        check_sdist(sdist)
        install_and_run(sdist, temporary)
        python = install_and_run(wheel, temporary)
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
