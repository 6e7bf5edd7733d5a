"""Which test files a suite holds and where they come from.

JAX's tests are read from a source checkout at the tag of the installed version, for the wheel leaves them
out; the packages under test are always the installed ones. Optax ships its tests in its wheel.
"""

from __future__ import annotations

import enum
import importlib.metadata
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

CORE = (
    "array_test",
    "multi_device_test",
    "jax_jit_test",
    "aot_test",
    "layout_test",
    "memories_test",
    "transfer_guard_test",
    "xla_metadata_test",
    "random_test",
)
FULL = ("pmap_test", "pjit_test", "shard_map_test", "api_test", "lax_test", "lax_control_flow_test")


class Suite(enum.StrEnum):
    CORE = "core"
    FULL = "full"  # the long files, those of `core` not among them
    OPTAX = "optax"
    ALL = "all"


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
    foreign: Path | None = None  # a source tree that must stay off sys.path


def files_of(suite: Suite, checkout: Path | None) -> list[TestFile]:
    """The files of a suite, in the order to run them.

    Raises `SuiteError` if the checkout is missing or at another version than the installed JAX.
    """
    names = {Suite.CORE: CORE, Suite.FULL: FULL, Suite.ALL: CORE + FULL}.get(suite, ())
    files = [jax_file(name, checkout) for name in names]
    return files + (optax_files() if suite in (Suite.OPTAX, Suite.ALL) else [])


def named_file(name: str, checkout: Path | None) -> TestFile:
    """The file that a user calls `array_test`, `array_test.py` or `optax/alias_test`."""
    name = name.removesuffix(".py")
    if not name.startswith("optax/"):
        return jax_file(name, checkout)
    for file in optax_files():
        if file.name == name:
            return file
    raise SuiteError(f"optax has no test file {name}; it has {', '.join(file.name for file in optax_files())}")


def jax_file(name: str, checkout: Path | None) -> TestFile:
    root = matching_checkout(checkout)
    path = root / "tests" / f"{name}.py"
    if not path.is_file():
        raise SuiteError(f"the JAX checkout has no tests/{name}.py")
    version = importlib.metadata.version("jax")
    return TestFile(name, path, root, root / "pyproject.toml", f"jax {version}", foreign=root)


def matching_checkout(checkout: Path | None) -> Path:
    installed = importlib.metadata.version("jax")
    if checkout is None:
        raise SuiteError(f"JAX's tests come from its source: give --jax a checkout at the tag jax-v{installed}")
    root = checkout.resolve()
    try:
        found = re.search(r'^_version = "([^"]+)"', (root / "jax" / "version.py").read_text(), re.MULTILINE)
    except OSError as error:
        raise SuiteError(f"{checkout} is not a JAX source checkout: {error}") from error
    if found is None or found[1] != installed:
        got = found[1] if found else "no version"
        raise SuiteError(
            f"{checkout} holds JAX {got}, installed is {installed}: check out the tag jax-v{installed} there"
        )
    return root


def optax_files() -> list[TestFile]:
    spec = importlib.util.find_spec("optax")
    if spec is None or spec.origin is None:
        raise SuiteError("optax is not installed: pip install -r scripts/conformance-requirements.txt")
    package = Path(spec.origin).parent
    version = importlib.metadata.version("optax")
    paths = sorted((package / "_src").glob("*_test.py"))
    if not paths:
        raise SuiteError(f"optax {version} as installed has no tests in optax/_src: install optax >= 0.2.4")
    return [
        TestFile(f"optax/{path.stem}", path, package.parent, Path(os.devnull), f"optax {version}") for path in paths
    ]
