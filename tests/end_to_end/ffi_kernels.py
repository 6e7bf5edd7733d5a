"""Build a shared library of FFI kernels with g++ and JAX's headers."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import jax

SOURCE = Path(__file__).with_suffix(".cc")
VARIANT = SOURCE.with_name("ffi_variant.cc")
COMPILER = shutil.which("g++")
MISSING = "g++ is missing, and FFI kernels have to be compiled"


def build(directory: Path, *options: str, name: str = "kernels") -> str:
    """Build the kernels, with these `options` for the part that differs. Return the library's path."""
    path = directory / f"{name}.so"
    _run("-shared", *options, "-o", str(path), str(VARIANT), _compiled())
    return str(path)


def build_package(directory: Path, factor: int) -> str:
    """Build the kernels as wheels contain them: a library that needs another one in the directory `kernels.libs`."""
    path, needed = directory / "kernels" / "kernels.so", directory / "kernels.libs" / "libfactor.so"
    path.parent.mkdir()
    needed.parent.mkdir()
    _run("-shared", f"-DFACTOR={factor}", "-Wl,-soname,libfactor.so", "-o", str(needed), str(VARIANT))
    _run("-shared", "-Wl,-rpath,$ORIGIN/../kernels.libs", "-o", str(path), _compiled(), str(needed))
    return str(path)


def _compiled() -> str:
    """Return the path of the compiled kernels. JAX's headers take seconds, so a run of the tests compiles them once."""
    path = Path(os.environ["ATOLL_KEY_FILE"]).with_name("kernels.o")  # the processes of a run share the directory
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _run("-c", f"-I{jax.ffi.include_dir()}", "-o", f"{path}.new", str(SOURCE))
            Path(f"{path}.new").rename(path)
    return str(path)


def _run(*arguments: str) -> None:
    subprocess.run([COMPILER or "g++", "-fPIC", "-std=c++17", "-w", *arguments], check=True)
