"""Reads the error messages of Atoll from its source."""

from __future__ import annotations

import ast
import gc
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from atoll import errors
from atoll.quantities import noun_for

SOURCE = Path(errors.__file__).parent
_VALUE = "..."  # stands for a value
_DEEPEST = 4  # variables and functions between an error and its text
_MAX_FORMS = 4  # texts of one expression, if it has several
# Functions of `atoll.errors` that make an error, with its code. None: the first argument names the code.
_MAKERS = {
    "invalid": "INVALID_ARGUMENT",
    "violation": "INVALID_ARGUMENT",
    "exhausted": "RESOURCE_EXHAUSTED",
    "not_found": "NOT_FOUND",
    "unimplemented": "UNIMPLEMENTED",
    "Status": None,
    "StatusError": None,
    "failure": None,
    "failed": None,
}
EXCEPTIONS = {
    name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, errors.AtollError)
}
# Exceptions of Python and typer that reach a user. They count only if they are raised.
_RAISED = {"ValueError", "TypeError", "RuntimeError", "BufferError", "AttributeError", "TimeoutError"}
_REFUSALS = {"NotEnrolled": "AccessError"}
_OF_MAKERS = "errors.py"  # the file of the functions that make errors with a given text
_OF_COMMANDS = {"BadParameter": "invalid option"}
# Methods with the same names as these makers, which get no code, may get no text.
_NEED_CODE = {"failure", "failed"}
# Functions that get a code and make no error.
_OF_CODES = {"int", "get"}
# Functions that return their argument, or a part of it.
_PASSING = {"shortened"}
# Functions that choose between singular and plural, with the text before the noun.
_NOUNS = {"counted": f"{_VALUE} ", "noun_for": ""}
# Attributes that have the text of another error.
_OF_OTHERS = {"message", "reason", "error", "text", "closed"}


@dataclass(frozen=True, order=True)
class ErrorMessage:
    """Text of an error in the source.

    Args:
      text: the text. "..." stands for each value.
      kind: the name of the code or of the exception.
      file: the file, relative to the package.
    """

    text: str
    kind: str
    file: str


def joined(parts: list[str]) -> str:
    """Return the text of these parts, in one line and with one "..." for adjacent values."""
    return re.sub(r"(?:\.\.\.){2,}", _VALUE, " ".join("".join(parts).split()))


def words_of(text: str) -> list[str]:
    """Return the words of a text that are no values."""
    return re.findall(r"[A-Za-z][A-Za-z'-]+", text.replace(_VALUE, " "))


class _Module:
    """Module of the package, whose calls are searched for texts."""

    def __init__(self, path: Path, source: Path) -> None:
        self.file = str(path.relative_to(source))
        tree = ast.parse(path.read_text())
        self.parents: dict[ast.AST, ast.AST] = {}
        nodes = _walked(tree, self.parents)
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.constants = _assigned(tree.body)
        self._variables: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        self.methods = {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.imported = {
            name.asname or name.name: (node.module.partition(".")[2].replace(".", "/") + ".py", name.name)
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module
            for name in node.names
        }

    def given_to(self, node: ast.Name) -> list[ast.expr]:
        """Return what the calls in this module pass for `node`, if it is a parameter of the function around it."""
        function: ast.AST = node
        while function in self.parents and not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            function = self.parents[function]
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return []
        names = [each.arg for each in function.args.args if each.arg != "self"]
        found: list[ast.expr] = []
        for call in self.calls if node.id in names else ():
            if _name(call) == function.name:
                found += call.args[names.index(node.id) :][:1]
                found += [each.value for each in call.keywords if each.arg == node.id]
        return found

    def variables_at(self, node: ast.AST) -> dict[str, list[ast.expr]]:
        """Return what is assigned to the variables of the innermost function around `node`."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node not in self._variables:
                    self._variables[node] = _assigned([each for each in ast.walk(node) if isinstance(each, ast.stmt)])
                return self._variables[node]
        return {}


def _walked(tree: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    """Return the nodes of a tree except contexts of expressions, and add the parent of each to `parents`.

    `ast.walk` and `ast.iter_child_nodes` take three times as long.
    """
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            for child in value if isinstance(value, list) else (value,):
                if isinstance(child, ast.AST) and not isinstance(child, ast.expr_context):
                    parents[child] = node
                    nodes.append(child)
    return nodes


def _name(call: ast.Call) -> str:
    """Return the name of the called function or method."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _assigned(nodes: list[ast.stmt]) -> dict[str, list[ast.expr]]:
    """Return the expressions that are assigned to each name."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(node.value)
    return found


class _Reader:
    """Reads the texts of all modules. A text may be a constant of another module, or the result of a function."""

    def __init__(self, source: Path) -> None:
        files = [path for path in sorted(source.rglob("*.py")) if "_pb2" not in path.name]
        self._modules = [_Module(path, source) for path in files]
        self._constants = {
            name: (module, values)
            for module in self._modules
            for name, values in module.constants.items()
            if name.isupper()
        }
        self._functions = {name: (module, node) for module in self._modules for name, node in module.functions.items()}
        self._by_file = {module.file: module for module in self._modules}

    def messages(self) -> Iterator[ErrorMessage]:
        for module, node, kind in self._errors():
            for text in self._texts_of_error(module, node):
                if len(words_of(text)) >= 2 and " " in text:  # names of fields are no messages
                    yield ErrorMessage(text, kind, module.file)

    def unresolved(self) -> Iterator[str]:
        """Yield the file and line of each error whose text cannot be read, unless it is that of another error."""
        for module, node, _ in self._errors():
            if _name(node) in _NEED_CODE and "Code." not in ast.unparse(node):
                continue
            if module.file == _OF_MAKERS or not any("Code." not in ast.unparse(each) for each in node.args):
                continue
            texts = self._texts_of_error(module, node)
            if not any(words_of(text) for text in texts) and not _passes_on(node):
                yield f"{module.file}:{node.lineno} {ast.unparse(node)}"

    def _errors(self) -> Iterator[tuple[_Module, ast.Call, str]]:
        """Yield each call that makes an error, with the name of its code or exception."""
        for module in self._modules:
            for node in module.calls:
                if kind := self._kind(module, node):
                    yield module, node, kind

    def _texts_of_error(self, module: _Module, node: ast.Call) -> list[str]:
        if _name(node) == "violation" and len(node.args) == 4:
            field, expected = (self._texts(module, node.args[number]) or [_VALUE] for number in (1, 3))
            return [f"{name} is {_VALUE}: expected {text}" for name in field for text in expected]
        values = [*node.args, *(each.value for each in node.keywords)]
        texts = next(filter(None, (self._texts(module, each) for each in values)), [])
        # A text may contain that of a function, such as the reason why a certificate is refused.
        inner = [each for value in values for each in ast.walk(value) if isinstance(each, ast.Call)]
        return texts + [text for each in inner for text in self._texts_of_call(module, each, 0)]

    def _kind(self, module: _Module, call: ast.Call) -> str:
        """Return the name of the code or the exception that this call makes, or "" if it makes no error."""
        name = _name(call)
        if name in _OF_CODES:
            return ""
        if name in _MAKERS:
            named = re.findall(r"Code\.([A-Z_]+)", ast.unparse(call.args[0])) if call.args else []
            return _MAKERS[name] or (named[0] if named else "UNKNOWN")
        if name in EXCEPTIONS:
            return name
        if name in _REFUSALS:
            return _REFUSALS[name]
        # A method that sends an error, such as `self._refuse(peer, Code.UNAUTHENTICATED, text)`.
        codes = [
            each.attr for each in call.args if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "Code"
        ]
        if codes:
            return codes[0]
        is_raised = isinstance(module.parents.get(call), ast.Raise)
        return _OF_COMMANDS.get(name, name if name in _RAISED else "") if is_raised else ""

    def _texts(self, module: _Module, node: ast.expr, depth: int = 0) -> list[str]:
        """Return the possible texts of an expression: none if the text is that of another error."""
        if depth > _DEEPEST:
            return []
        if isinstance(node, ast.Constant):
            return [joined([node.value])] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            parts = [self._texts_of_part(module, each, depth) for each in node.values]
            return [joined(list(each)) for each in itertools.islice(itertools.product(*parts), _MAX_FORMS)]
        if isinstance(node, ast.IfExp):
            return [text for each in (node.body, node.orelse) for text in self._texts(module, each, depth + 1)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self._texts(module, each, depth + 1) for each in (node.left, node.right)]
            if any(sides):
                return [joined([a, b]) for a in sides[0] or [_VALUE] for b in sides[1] or [_VALUE]]
        if isinstance(node, ast.BoolOp) and depth == 0:
            return [text for each in node.values for text in self._texts(module, each, depth + 1)]
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            return self._texts(module, node.value, depth + 1)
        if isinstance(node, ast.Name):
            return self._texts_of_name(module, node, depth)
        if isinstance(node, ast.Call):
            return self._texts_of_call(module, node, depth)
        return []

    def _texts_of_part(self, module: _Module, part: ast.expr, depth: int) -> list[str]:
        """Return the texts of a part of an f-string, which can be a variable that has a text."""
        if isinstance(part, ast.FormattedValue):
            if isinstance(part.value, ast.Call) and _name(part.value) in _NOUNS:
                return self._texts(module, part.value, depth) or [_VALUE]
            if not isinstance(part.value, ast.Name) or depth >= _DEEPEST:
                return [_VALUE]
            return self._texts_of_name(module, part.value, depth + 1, is_part=True) or [_VALUE]
        return [str(part.value)] if isinstance(part, ast.Constant) else [_VALUE]

    def _texts_of_name(self, module: _Module, node: ast.Name, depth: int, is_part: bool = False) -> list[str]:
        values = module.variables_at(node).get(node.id) or module.constants.get(node.id)
        if values is None and node.id in self._constants:
            module, values = self._constants[node.id]
        if values is None and not is_part:  # a part that callers choose is a value
            values = module.given_to(node)
        return [text for each in values or [] for text in self._texts(module, each, depth + 1)]

    def _function(self, module: _Module, called: ast.expr) -> tuple[_Module, ast.FunctionDef] | None:
        """Return the called function, if it is one of the package or a method of the same module."""
        if isinstance(called, ast.Name):
            if called.id in module.functions:
                return module, module.functions[called.id]
            file, name = module.imported.get(called.id, ("", ""))
            other = self._by_file.get(file)
            if other is not None and name in other.functions:
                return other, other.functions[name]
            return self._functions.get(called.id)
        is_own = isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "self"
        found = module.methods.get(called.attr) if is_own and isinstance(called, ast.Attribute) else None
        return (module, found) if found else None

    def _texts_of_call(self, module: _Module, node: ast.Call, depth: int) -> list[str]:
        if depth > _DEEPEST:
            return []
        if isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            found = self._texts(module, node.func.value, depth + 1)
            return [joined([re.sub(r"\{[^}]*\}", _VALUE, text)]) for text in found]
        if isinstance(node.func, ast.Name) and node.func.id in _NOUNS:
            before = _NOUNS[node.func.id]
            return [before + noun_for(2, noun) for noun in self._texts(module, node.args[1], depth)]
        if _name(node) in _PASSING and node.args:
            return self._texts(module, node.args[0], depth + 1)
        found_at = self._function(module, node.func)
        if found_at is None:
            return []
        module, function = found_at
        returned = [each.value for each in ast.walk(function) if isinstance(each, ast.Return) and each.value]
        return [text for each in returned for text in self._texts(module, each, depth + 1)]


def _passes_on(call: ast.Call) -> bool:
    """Return whether the text of an error is that of another error."""
    inner = [each for value in (*call.args, *(each.value for each in call.keywords)) for each in ast.walk(value)]
    return any(
        (isinstance(each, ast.Attribute) and each.attr in _OF_OTHERS)
        or (isinstance(each, ast.Name) and each.id in ("error", "errors", "problem"))
        for each in inner
    )


@cache
def _reader(source: Path) -> _Reader:
    """Return the reader of a package. Its syntax trees stay, so the garbage collector leaves them out."""
    was_enabled = gc.isenabled()
    gc.disable()
    reader = _Reader(source)
    gc.freeze()
    if was_enabled:
        gc.enable()
    return reader


@cache
def unresolved(source: Path = SOURCE) -> tuple[str, ...]:
    """Return the calls whose texts cannot be read from the source: each with its file, relative to the package."""
    return tuple(_reader(source).unresolved())


@cache
def messages(source: Path = SOURCE) -> tuple[ErrorMessage, ...]:
    """Return the error messages of a package, by default of Atoll, in the order of their texts. Read it once."""
    found = set(_reader(source).messages())
    with_code = {each.text for each in found if each.kind != "UNKNOWN"}  # also made where a function passes both on
    return tuple(sorted(each for each in found if each.kind != "UNKNOWN" or each.text not in with_code))
