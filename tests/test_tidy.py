"""Check each file for names that do not resolve, state that nobody reads, dead files and prose."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prose import comments_in, dotted, files_in, findings, lines_of, nodes_of, sentences_in
from tests.test_layers import SOURCE, imports, modules

pytestmark = pytest.mark.together("sources")

ROOT = SOURCE.parent.parent
# Names of other projects, programs and file formats in docstrings of `src`.
FOREIGN = frozenset(
    (
        *("ComputeCallSignature", "mpirun", "keras.distribution.LayoutMap", "_emit_tpu_python_callback", "tabulate"),
        *("jax.experimental.buffer_callback.ExecutionContext", "GetDefaultStablehloVersion", "hlo_program_serdes.cc"),
        *("etils", "rdi", "xla_gpu_nccl_termination_timeout_seconds", "xla_gpu_execution_terminate_timeout"),
        *("2F5", "_total", "x_pb2.py"),
    )
)
# Attributes that nothing in Atoll reads.
UNREAD = {
    "devices/xla/compiled_programs.py: _path",  # JAX logs it
    "programs/launch.py: _functions",  # keeps the session from dropping them
}
# Private attributes of other projects, with names that Atoll also has.
NAMESAKES = {
    "client/jax_patches/host_arguments.py: data._replace",
    "client/jax_patches/other_clients.py: array._committed",
    "devices/xla/xla_arrays.py: array._arrays",
    "engines/ray/ray_connection.py: ray._private",
    "programs/program_tracing.py: given._trace",
    "programs/traced_program.py: leaf._committed",
}
# Findings of `tests.prose` per 100 sentences. The target is 0.5; a change lowers these, and never raises them.
MAX_FINDINGS = {"src": 0.5, "docs": 0.5, "examples": 0.5, "tests": 0.5, "benchmarks": 0.8, "scripts": 1.1}


@functools.cache
def _words() -> frozenset[str]:
    """All words in Python files of the repository, but for docstrings and comments."""
    found: set[str] = set()
    for directory in ("src", "tests", "benchmarks", "scripts", "examples"):
        for path in (ROOT / directory).rglob("*.py"):
            found.update(re.findall(r"\w+", re.sub(r'"""[\s\S]*?"""|(?:^|\s)# .*', " ", path.read_text())))
    return frozenset(found)


def _quoted(path: Path) -> Iterator[tuple[int, str]]:
    """Yield what docstrings and comments of a file have in back quotes, with the line."""
    source = path.read_text()
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for name in re.findall(r"`([^`\n]+)`", ast.get_docstring(node) or ""):
                yield getattr(node, "lineno", 1), name
    for line, comment in comments_in(source):
        for name in re.findall(r"`([^`\n]+)`", comment):
            yield line, name


def _resolves(name: str, path: Path) -> bool:
    if re.fullmatch(r"[\w/.-]+\.py", name):
        return any((base / name).exists() for base in (ROOT, SOURCE, path.parent))
    if re.fullmatch(r"\w+(\.\w+)*(\(\))?", name):
        return all(part in _words() or part.isdigit() for part in name.removesuffix("()").split("."))
    return True  # an expression, a command, an example


@pytest.mark.parametrize(
    "package", sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] != "_")
)
def test_a_name_in_a_docstring_exists(package: str) -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in files_in(SOURCE / package)
        if path.suffix == ".py"
        for line, name in _quoted(path)
        if name not in FOREIGN and not _resolves(name, path)
    ]
    assert unknown == []


@functools.cache
def _names_in(path: Path) -> frozenset[str]:
    """Return the names of a module's functions and classes, and of all variables in it."""
    nodes = nodes_of(path)
    defined = (each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return frozenset((*defined, *(each.id for each in nodes if isinstance(each, ast.Name))))


def test_a_name_in_a_string_exists() -> None:
    """`module:name` is imported or patched late, sometimes only if it is there."""
    known = modules()
    unknown = []
    for path in (*known.values(), *files_in(ROOT / "tests"), *files_in(ROOT / "benchmarks")):
        if path.suffix != ".py":
            continue
        for node in nodes_of(path):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            if (found := re.fullmatch(r"(atoll(?:\.\w+)+):(\w+)((?:\.\w+)*)", node.value)) is None:
                continue
            module, name, members = found.groups()
            if module not in known or not {name, *members.split(".")[1:]} <= _names_in(known[module]):
                unknown.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
    assert unknown == []


@functools.cache
def _read_in(path: Path) -> frozenset[str]:
    """Return the attributes that a module reads, also by patterns and `getattr`."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.MatchClass):
            found.update(node.kwd_attrs)
    return frozenset(found)


def test_each_private_attribute_is_read() -> None:
    """It is read in its module, or in one that imports this module, as subclasses do."""
    known = modules()
    readers = {name: set(_read_in(path)) for name, path in known.items()}
    for path in known.values():
        for target in imports(path) & known.keys():
            readers[target] |= _read_in(path)
    unread = {
        f"{path.relative_to(SOURCE)}: {node.attr}"
        for name, path in known.items()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and dotted(node.value) == "self"
        and re.match(r"_[^_]", node.attr)
        and node.attr not in readers[name]
    }
    assert unread == UNREAD


def _defined_in(path: Path) -> set[str]:
    """Return the names that a module defines: functions, classes, variables and attributes."""
    found = {
        each.target.id
        for each in nodes_of(path)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found | _names_in(path)


def test_a_private_attribute_is_used_in_its_module() -> None:
    """Structs of dumps, which declare the attributes that a journal stores, also name those of other modules."""
    defined = {path: _defined_in(path) for path in modules().values()}
    everywhere = frozenset().union(*defined.values())
    found = {
        f"{path.relative_to(SOURCE)}: {ast.unparse(node)}"
        for path, own in defined.items()
        if not path.name.endswith("_dumps.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute)
        and re.match(r"_[^_]", node.attr)
        and dotted(node.value) not in ("self", "cls")
        and node.attr not in own
        and node.attr in everywhere
        and ast.unparse(node.value) != "super()"
    }
    assert found == NAMESAKES


def test_no_module_is_dead() -> None:
    used = {target for path in modules().values() for target in imports(path)}
    texts = "\n".join(path.read_text() for path in (*modules().values(), *files_in(ROOT / "docs")))
    dead = [
        name
        for name, path in modules().items()
        if name not in used
        and path.name not in ("__init__.py", "__main__.py")
        and not re.search(rf"[\"`]{re.escape(name)}[\".:`]|python -m {re.escape(name)}\b", texts)
    ]
    assert dead == []


@pytest.mark.parametrize("directory", sorted(MAX_FINDINGS))
def test_prose_has_no_more_findings_than_is_allowed(directory: str) -> None:
    paths = files_in(ROOT / directory)
    found = [finding for path in paths for finding in findings(path)]
    sentences = sum(sentences_in(text) for path in paths for _, text in lines_of(path))
    share = 100 * len(found) / sentences
    assert share <= MAX_FINDINGS[directory], "\n".join(map(str, found[-200:]))


def test_no_test_uses_a_runtime_directory_whose_path_may_be_too_long() -> None:
    """From the tenth run on, `tmp_path` can be too long for sockets. Atoll then uses the temporary directory."""
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files_in(ROOT / "tests")
        for line in path.read_text().splitlines()
        if re.search(r"XDG_RUNTIME_DIR\W.*\btmp_path", line)
    ]
    assert found == [], "use `short_directory`"


def test_no_module_changes_the_umask() -> None:
    """A umask applies to the whole process, so other threads would create files and processes with it meanwhile."""
    found = [
        name
        for name, path in modules().items()
        if any(isinstance(node, ast.Call) and dotted(node.func) == "os.umask" for node in nodes_of(path))
    ]
    assert found == [], "use `chmod` or `fchmod`"
