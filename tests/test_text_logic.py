"""No text of an error decides, but for texts of other projects, which have no other form.

`errors.details_in` is the one parser of Atoll's own details in texts that have passed through jaxlib.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.prose import children, nodes_of, walked
from tests.test_layers import SOURCE, modules

pytestmark = pytest.mark.together("sources")

# Functions that read the text of an error, by file, with the reason. Each text is of another project.
READERS = {
    ("client/jax_patches/newer_operations.py", "_second_try"): "jaxlib has no code for the refusal",
    ("client/jax_patches/other_clients.py", "_through_the_host"): "jaxlib has no code for the refusal",
    ("engines/ray/ray_cluster.py", "_make_actor"): "Ray raises ValueError",
    ("errors.py", "status_of"): "XLA's text begins with its code",
    ("host_services/calls/client_calls.py", "status_of_device_error"): "XLA converts what a callback raises to text",
    ("host_services/python/program/stored_arrays.py", "result"): "TensorStore's text begins with its code",
    ("tensorflow/compile_errors.py", "translated"): "TensorFlow has no code for these errors",
}
_DECIDES = {"startswith", "endswith", "partition", "match", "search", "fullmatch", "finditer", "find", "index", "count"}

_PARTS = {"removeprefix", "removesuffix", "strip", "lower"}  # of a text


def _is_error(name: ast.expr, errors: set[str]) -> bool:
    return isinstance(name, ast.Name) and name.id in errors


def _errors_in(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names of caught exceptions and of parameters that are exceptions."""
    found = {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    for node in nodes:
        if isinstance(node, ast.arg) and node.annotation is not None:
            kind = ast.unparse(node.annotation)
            found |= {node.arg} if "Error" in kind or "Exception" in kind else set()
    return found


def _is_text(node: ast.expr, errors: set[str], texts: set[str]) -> bool:
    """Whether an expression is the text of an error."""
    if isinstance(node, ast.Name):
        return node.id in texts
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("str", "repr"):
        return bool(node.args) and _is_error(node.args[0], errors)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _PARTS:
        return _is_text(node.func.value, errors, texts)
    if isinstance(node, ast.BoolOp):
        return any(_is_text(each, errors, texts) for each in node.values)
    if isinstance(node, ast.Attribute) and node.attr == "message":
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return owner in ("status", "failure", "ready") or owner in errors
    return False


def _decisions(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the lines of a function in which the text of an error decides."""
    nodes = walked(function)
    errors = _errors_in(nodes)
    texts: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Assign) and _is_text(node.value, errors, texts):
            texts |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Compare) and any(
            isinstance(operator, ast.In | ast.NotIn) and _is_text(operand, errors, texts)
            for operator, operand in zip(node.ops, node.comparators, strict=True)
        ):
            yield node.lineno
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            both = [node.left, *node.comparators]
            if any(_is_text(each, errors, texts) for each in both) and any(isinstance(e, ast.Constant) for e in both):
                yield node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _DECIDES:
            if node.func.attr == "partition" and [ast.unparse(each) for each in node.args] == [r"'\n'"]:
                continue  # the first line of a text, for display
            if any(_is_text(each, errors, texts) for each in (node.func.value, *node.args)):
                yield node.lineno


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions below a node that are not within another function."""
    for each in children(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            yield each
        elif not isinstance(each, ast.expr):
            yield from _functions(each)


def test_no_text_of_an_error_decides() -> None:
    found: dict[tuple[str, str], list[int]] = {}
    for path in modules().values():
        for function in _functions(nodes_of(path)[0]):
            if lines := list(_decisions(function)):
                found[str(path.relative_to(SOURCE)), function.name] = lines
    assert found.keys() == READERS.keys(), found


@pytest.mark.parametrize(
    "body",
    [
        "except ValueError as error:\n        return 'gone' in str(error)",
        "except ValueError as error:\n        return str(error).startswith('gone')",
        "except ValueError as error:\n        text = str(error)\n        return _GONE.search(text)",
        "except ValueError as error:\n        return error.status.message == 'gone'",
    ],
)
def test_a_text_that_decides_is_found(body: str) -> None:
    function = ast.parse(f"def f():\n    try:\n        pass\n    {body}\n").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert list(_decisions(function))
