"""The packages of `src/atoll`: which may import which.

The picture in docs/design/packages.md is drawn from the same table.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.prose import dotted, nodes_of

pytestmark = pytest.mark.together("sources")

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src" / "atoll"

# From the bottom up. A package imports only packages of lower layers; packages of one layer do not import one another.
LAYERS = (
    ("decodable",),
    ("atomic_files", "errors", "missing", "quantities", "retries", "_version"),
    ("grpc", "wire"),
    ("cluster",),
    ("ir", "leadership", "security"),
    ("protocol",),
    ("named_arrays", "state", "transfers"),
    ("host_services", "journal", "launch", "peers"),
    ("devices", "telemetry"),
    ("migration", "session", "worker"),
    ("controller", "executables"),
    ("controller_process", "ifrt"),
    ("engines", "manifests", "web"),
    ("operate", "virtual"),
    ("client", "data", "tensorflow", "testing"),
    ("ffi", "programs"),
    ("pins",),
    ("arrays", "pipelines"),
    ("elastic", "tunix"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}


@functools.cache
def modules() -> dict[str, Path]:
    return {
        ".".join(("atoll", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in SOURCE.rglob("*.py")
    }


def _for_types(path: Path) -> set[ast.AST]:
    """Return the statements of a file that only type checkers read."""
    blocks = (each for each in nodes_of(path) if isinstance(each, ast.If) and dotted(each.test) == "TYPE_CHECKING")
    return {each for block in blocks for statement in block.body for each in ast.walk(statement)}


@functools.cache
def imports(path: Path, with_types: bool = True) -> set[str]:
    """The modules of Atoll that a file imports, wherever in it; of names from a package, the name's module.

    If `with_types` is false, imports that only type checkers see do not count.
    """
    known = modules()
    found, ignored = set(), set() if with_types else _for_types(path)
    for node in nodes_of(path):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names} & set(known) or {node.module}
    return {name for name in found if name.split(".")[0] == "atoll"}


def package_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def edges() -> dict[tuple[str, str], list[str]]:
    """By (from, to): which files draw the arrow between two packages."""
    found = defaultdict(list)
    for name, path in modules().items():
        for target in imports(path):
            if package_of(name) and package_of(target) and package_of(name) != package_of(target):
                found[package_of(name), package_of(target)].append(f"{name} imports {target}")
    return found


def test_every_package_is_in_the_picture() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages - {"__init__"} == set(LEVEL)


def test_no_arrow_between_packages_runs_up() -> None:
    wrong = [
        arrow for (source, target), arrows in edges().items() if LEVEL[target] >= LEVEL[source] for arrow in arrows
    ]
    assert wrong == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = {name: imports(path, with_types=False) & set(modules()) for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name] - {name}):
                visit(target, (*way, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("package", ["atoll.grpc", "atoll.grpc.http2"])
def test_grpc_knows_nothing_else_of_atoll_and_http2_nothing_of_grpc(package: str) -> None:
    within = [name for name in modules() if f"{name}.".startswith(f"{package}.")]
    assert len(within) > 5
    foreign = {
        f"{name} imports {target}"
        for name in within
        for target in imports(modules()[name])
        if not f"{target}.".startswith(f"{package}.")
    }
    assert foreign == set()


LARGE = 1000  # lines of a state machine: a larger file probably has a second subject


@pytest.mark.filterwarnings("default")
def test_large_files_are_reported_and_do_not_fail() -> None:
    sizes = {name: path.read_text().count("\n") for name, path in modules().items()}
    for name, lines in sorted(sizes.items()):
        if lines > LARGE:
            warnings.warn(f"{name} has {lines} lines: does it have a second subject?", stacklevel=1)


# Python and pytest look for files of these names.
_FIXED_NAMES = {"__init__.py", "__main__.py", "conftest.py", "sitecustomize.py"}


def test_the_name_of_a_module_identifies_it() -> None:
    """A line of a traceback shows little more than the name of the file."""
    for root in (SOURCE, TESTS):
        counts = Counter(path.name for path in root.rglob("*.py"))
        repeated = {name for name, count in counts.items() if count > 1}
        assert repeated <= _FIXED_NAMES


# Directories of tests without a package: of whole programs on clusters, and of files beside `src`.
WITHOUT_PACKAGE = frozenset({"benchmarks", "docs", "end_to_end", "examples", "machines"})


def _test_modules() -> list[Path]:
    return sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))


def test_each_package_has_a_directory_of_tests_and_no_other_directory_has_one() -> None:
    packages = {path.parent.relative_to(SOURCE) for path in SOURCE.rglob("__init__.py")}
    tested = {path.parent for path in _test_modules()}
    assert {each for each in packages if len(each.parts) == 1} - tested == set()
    others = {each for each in tested - packages if each.parts[0] not in WITHOUT_PACKAGE}
    assert others == set(), "name the directory like its package, or add it to WITHOUT_PACKAGE and CONTRIBUTING.md"


def test_a_test_that_has_the_name_of_a_module_is_in_the_directory_of_its_package() -> None:
    """A test may be in the directory of a package above, and one of the whole controller in `tests/controller`."""
    packages = defaultdict(set)
    for path in modules().values():
        packages[path.stem].add(path.relative_to(SOURCE).parts[0].removesuffix(".py"))
    wrong = []
    for path in _test_modules():
        package, named = path.parts[0], packages[path.stem.removeprefix("test_")]
        is_of_tests = len(path.parts) == 1 and (TESTS / path.name.removeprefix("test_")).exists()
        if package in WITHOUT_PACKAGE or is_of_tests or not named or named & {package, path.stem.removeprefix("test_")}:
            continue
        of_controller = package == "controller" and not named & {"launch", "migration"}
        if not (of_controller and "tests.controller.play" in (TESTS / path).read_text()):
            wrong.append(f"tests/{path}: {sorted(named)}")
    assert wrong == []
