"""Build a shared library of FFI kernels with g++ and JAX's headers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax

SOURCE = Path(__file__).with_suffix(".cc")
COMPILER = shutil.which("g++")
MISSING = "g++ is missing, and FFI kernels have to be compiled"


def build(directory: Path, *options: str, name: str = "kernels") -> str:
    """Compile the kernels, with these `options` for the compiler. Return the library's path."""
    path = directory / f"{name}.so"
    command = [COMPILER or "g++", "-shared", "-fPIC", "-std=c++17", "-w", f"-I{jax.ffi.include_dir()}", *options]
    subprocess.run([*command, "-o", str(path), str(SOURCE)], check=True)
    return str(path)
