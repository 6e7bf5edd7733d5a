"""Tests of the libraries that are sent together with an FFI library."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.client.library_dependencies import with_dependencies
from atoll.protocol.ffi_libraries import files_in_archive

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="g++ is missing, and libraries have to be compiled")


def library(path: Path, *needed: Path, rpath: str = "", old: bool = False) -> Path:
    """Build an empty library that needs others, with RPATH if `old`, and otherwise with RUNPATH."""
    path.parent.mkdir(exist_ok=True)
    tags = "-Wl,--disable-new-dtags" if old else "-Wl,--enable-new-dtags"
    options = ["-shared", "-fPIC", "-Wl,--no-as-needed", tags, f"-Wl,-soname,{path.name}"]
    paths = [f"-Wl,-rpath,{rpath}"] * bool(rpath) + ["-Wl,--allow-shlib-undefined"]
    source = path.with_suffix(".cc")
    source.write_text(f"int {path.stem}() {{ return 0; }}")
    subprocess.run([COMPILER or "", *options, *paths, "-o", path, source, *needed], check=True)
    return path


def sent(path: Path) -> list[str]:
    """Return the paths of the files that are sent for a library."""
    content = path.read_bytes()
    sent = with_dependencies(str(path), content)
    files = files_in_archive(sent)
    assert files or sent == content
    return [each.path for each in files]


@pytest.mark.parametrize("old", [False, True], ids=["RUNPATH", "RPATH"])
def test_the_libraries_beside_a_package_are_sent(tmp_path: Path, old: bool) -> None:
    inner = library(tmp_path / "package.libs" / "inner.so")
    outer = library(tmp_path / "package.libs" / "outer.so", inner)
    kernels = library(tmp_path / "package" / "kernels.so", outer, rpath="$ORIGIN/../package.libs", old=old)
    assert sent(kernels) == ["package/kernels.so", "package.libs/outer.so", "package.libs/inner.so"]


def test_a_library_that_needs_no_others_is_sent_as_it_is(tmp_path: Path) -> None:
    assert sent(library(tmp_path / "package" / "kernels.so")) == []


def test_libraries_of_other_directories_and_those_that_hosts_have_are_not_sent(tmp_path: Path) -> None:
    system, jaxlib = library(tmp_path / "system" / "system.so"), library(tmp_path / "jaxlib" / "own.so")
    paths = f"{system.parent}:$ORIGIN/../jaxlib"
    assert sent(library(tmp_path / "package" / "kernels.so", system, jaxlib, rpath=paths)) == []


def test_a_damaged_library_is_sent_as_it_is(tmp_path: Path) -> None:
    kernels = library(tmp_path / "package" / "kernels.so")
    for nbytes in (0, 7, 60, 100, 700):
        part = kernels.read_bytes()[:nbytes]
        assert with_dependencies(str(kernels), part) == part
