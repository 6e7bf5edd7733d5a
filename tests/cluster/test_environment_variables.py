"""Tests of the environment variables that Atoll reads: all of them are declared and in the reference page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from atoll.cluster.environment_variables import COMPILER_SECONDS, INSECURE, TABLES
from atoll.cluster.settings import SETTINGS
from atoll.errors import SettingsError
from docs.settings_page import PAGE, page
from tests.prose import dotted, nodes_of
from tests.test_layers import modules

pytestmark = pytest.mark.together("sources")

DECLARED = [*SETTINGS.values(), *(each for table in TABLES for each in table.settings)]
# These modules declare variables, or read variables whose names are arguments.
_TABLES = {f"atoll.cluster.{name}" for name in ("setting", "settings", "environment_variables", "former_names")}
_OUR_NAME = re.compile(r"ATOLL_[A-Z_]*[A-Z]")


def test_a_variable_is_declared_once() -> None:
    names = [each.variable for each in DECLARED]
    assert len(set(names)) == len(names)


def test_the_reference_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text() == page(), "run `python -m docs.settings_page`"
    for each in DECLARED:
        assert f"| `{each.variable}` |" in page()


def _undeclared(tree: list[ast.AST]) -> Iterator[str]:
    """Yield the places that name a variable without its declaration.

    A key of `os.environ` must be the `variable` of a `Setting`. No other code may contain the name of one of Atoll's
    variables.
    """
    for node in tree:
        key = None
        if isinstance(node, ast.Subscript) and dotted(node.value) == "os.environ":
            key = node.slice
        elif isinstance(node, ast.Call) and dotted(node.func) in ("os.getenv", "os.putenv", "os.unsetenv"):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and re.fullmatch(r"os\.environ\.(get|pop|setdefault)", dotted(node.func)):
            key = node.args[0]
        elif isinstance(node, ast.Compare) and "os.environ" in map(dotted, node.comparators):
            key = node.left
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _OUR_NAME.fullmatch(node.value):
            yield node.value
        if key is not None and not (isinstance(key, ast.Attribute) and key.attr == "variable"):
            yield ast.unparse(node)


# Variables that Atoll only sets or removes, for a library in the same process.
_SET = {
    "atoll.client.jaxlib_client": 3,  # of jaxlib's client, which reads them when it first connects
    "atoll.engines.ray.actors": 1,  # of Ray's workers
}


def test_modules_name_variables_by_their_declaration() -> None:
    found = {name: list(_undeclared(nodes_of(path))) for name, path in modules().items() if name not in _TABLES}
    assert {name: places for name, places in found.items() if len(places) != _SET.get(name, 0)} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ['HOME']",
        "import os\nos.environ.get('ATOLL_SPEED', '')",
        "import os\nNAME = 'ATOLL_SPEED'",
        "import os\nos.environ.get(NAME)",
        "import os\nos.getenv('HOME')",
        "import os\n'HOME' in os.environ",
    ],
)
def test_an_undeclared_variable_is_found(code: str) -> None:
    assert list(_undeclared(list(ast.walk(ast.parse(code)))))


def test_a_declared_variable_is_not_found() -> None:
    assert not list(_undeclared(list(ast.walk(ast.parse("os.environ.get(ADDRESS.variable)\nADDRESS.text()")))))


def test_a_value_that_is_not_set_is_none_and_an_invalid_one_names_its_variable() -> None:
    assert COMPILER_SECONDS.get({}) is None
    assert COMPILER_SECONDS.get({"ATOLL_COMPILER_SECONDS": "5"}) == 5.0
    with pytest.raises(SettingsError, match="ATOLL_COMPILER_SECONDS is 'long': expected a number of seconds"):
        COMPILER_SECONDS.get({"ATOLL_COMPILER_SECONDS": "long"})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("yes", True), ("0", False), ("off", False)])
def test_tls_is_disabled_by_several_words(text: str, value: bool) -> None:
    assert INSECURE.get({"ATOLL_INSECURE": text}) is value
