"""Projects beside JAX whose own tests are run, and where their tests come from.

The packages under test are always the installed ones. Some wheels hold their tests. Of the other projects the tool
takes checkouts at the tag of the installed version, of which it reads the tests and the file that names the version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

REQUIREMENTS = "pip install -r scripts/conformance-requirements.txt"


class SuiteError(Exception):
    """The tests asked for are not there, or do not belong to the installed version."""


@dataclass(frozen=True)
class TestFile:
    """One test file: its name in reports, where it is, and the pytest settings it is to run under."""

    __test__ = False  # a record, not a test case

    name: str
    path: Path
    root: Path  # pytest's rootdir
    config: Path  # pytest's configuration file
    origin: str  # distribution and version, "jax 0.10.2"
    foreign: Path | None = None  # a source tree whose `packages` must not be imported
    packages: tuple[str, ...] = ("jax",)
    conftest: bool = False  # whether the conftest.py beside it is part of the tests
    left_out: tuple[str, Path] | None = (
        None  # a package, and its directory in a checkout: the wheel lacks modules of it
    )


@dataclass(frozen=True)
class Project:
    """Place of a project's tests: `patterns` below `directory`, in its wheel or in a checkout.

    A checkout's version is what `version` finds in `version_file`; no such file means that the wheel has the tests.
    """

    distribution: str
    package: str
    directory: str
    patterns: tuple[str, ...]
    version_file: str = ""
    version: str = r'^__version__ = [\'"]([^\'"]+)'
    conftest: bool = False
    left_out: tuple[str, str] | None = (
        None  # a package, and its directory in the checkout: the wheel lacks modules of it
    )


PROJECTS = {
    "optax": Project("optax", "optax", "optax", ("**/*_test.py",)),
    "chex": Project("chex", "chex", "chex/_src", ("*_test.py",)),
    "pathwaysutils": Project(
        "pathwaysutils",
        "pathwaysutils",
        "pathwaysutils/test",
        ("*_test.py", "debug/*_test.py", "experimental/*_test.py"),  # the others start Kubernetes jobs
    ),
    "equinox": Project(
        "equinox", "equinox", "tests", ("test_*.py",), "pyproject.toml", r'^version = "([^"]+)', conftest=True
    ),
    "flax": Project(
        "flax",
        "flax",
        "tests",
        ("nnx/**/*_test.py", "nnx/test_*.py", "core/**/*_test.py", "linen/**/*_test.py"),
        "flax/version.py",
    ),
    "orbax": Project(
        "orbax-checkpoint",
        "orbax.checkpoint",
        "checkpoint/orbax/checkpoint/_src",
        (
            "arrays/*_test.py",
            "handlers/array_checkpoint_handler_test.py",
            "metadata/array_metadata_store_test.py",
            "multihost/*_test.py",
            "serialization/*_test.py",
        ),
        "checkpoint/orbax/checkpoint/version.py",
        left_out=("orbax.checkpoint._src.testing", "checkpoint/orbax/checkpoint/_src/testing"),
    ),
}


@dataclass(frozen=True)
class Sources:
    """Source checkouts: JAX's own, and a directory with one for each other project, by the project's name."""

    jax: Path | None = None
    directory: Path | None = None
    other_version: bool = False  # whether JAX's checkout may have another version than the installed one

    def checkout(self, project: str) -> Path:
        """Return the checkout of a project. Raise `SuiteError` if it is missing."""
        place = self.jax if project == "jax" and self.jax else self.directory and self.directory / project
        if place is None or not place.is_dir():
            raise SuiteError(f"{project}'s tests come from its source: {_what_to_give(project)}")
        return place.resolve()


def _what_to_give(project: str) -> str:
    if project == "jax":
        return f"give --jax a checkout at the tag jax-v{importlib.metadata.version('jax')}"
    return f"give --sources a directory with a checkout in {project}/, at the installed version"


def project_files(name: str, sources: Sources) -> list[TestFile]:
    """The test files of a project, by name. Raises `SuiteError`."""
    project = PROJECTS[name]
    try:
        installed = importlib.metadata.version(project.distribution)
    except importlib.metadata.PackageNotFoundError:
        raise SuiteError(f"{project.distribution} is not installed: {REQUIREMENTS}") from None
    if project.version_file:
        root = sources.checkout(name)
        check_version(root, project.version_file, project.version, project.distribution)
    else:
        spec = importlib.util.find_spec(project.package)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parents[project.package.count(".") + 1]
    directory = root / project.directory
    paths = sorted({path for pattern in project.patterns for path in directory.glob(pattern)})
    if not paths:
        raise SuiteError(f"{project.distribution} {installed} has no tests in {project.directory}: {REQUIREMENTS}")
    return [
        TestFile(
            "/".join((name, *(part for part in path.relative_to(directory).with_suffix("").parts if part != "_src"))),
            path,
            root,
            Path(os.devnull),
            f"{project.distribution} {installed}",
            root if project.version_file else None,
            ("jax", project.package),
            project.conftest,
            None if project.left_out is None else (project.left_out[0], root / project.left_out[1]),
        )
        for path in paths
    ]


def check_version(root: Path, file: str, pattern: str, distribution: str) -> None:
    """Raises `SuiteError` unless the checkout holds the installed version."""
    installed = importlib.metadata.version(distribution)
    if (got := version_of(root, file, pattern, distribution)) != installed:
        raise SuiteError(
            f"{root} holds {distribution} {got}, installed is {installed}: check out the tag of {installed} there"
        )


def version_of(root: Path, file: str, pattern: str, distribution: str) -> str:
    """The version of a checkout, which `pattern` finds in `file`. Raises `SuiteError` if it is no checkout."""
    try:
        found = re.search(pattern, (root / file).read_text(), re.MULTILINE)
    except OSError as error:
        raise SuiteError(f"{root} is not a source checkout of {distribution}: {error}") from error
    return found[1] if found else "no version"
