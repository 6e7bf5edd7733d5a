"""Errors for ops that XLA cannot compile: a `tf.errors.OpError` that names the op and the user's line.

TensorFlow's compiler raises a ValueError whose text contains the op's stack trace. It does not report some ops at all,
so this module checks for them before and after the compilation.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>[^\n]+)')
_UNSUPPORTED = re.compile(r"(?P<op>\w+) \(No registered '\w+' OpKernel for XLA_\w+ devices")
_CONSTANT = re.compile(r"Input (?P<input>\d+) to node `[^`]*` with op (?P<op>\w+) must be a compile-time constant")
_NOISE = re.compile(r"\s*(tf2xla conversion failed while converting|Run with TF_DUMP_GRAPH_PREFIX).*", re.DOTALL)
# Files below these directories are not the user's code.
_LIBRARIES = tuple(
    os.path.dirname(str(module.__file__)) + os.sep for module in (tf, keras, sys.modules[__package__ or __name__])
)
_ADVICE = (
    ("Print|StringFormat", "return the value from the function and print it outside"),
    ("PyFunc", "a compiled function cannot run Python: call it in the input pipeline, or on the function's results"),
    ("Dataset|Iterator", "iterate over the tf.data.Dataset outside, and pass its batches to the function"),
    ("String|_Retval|AsString|Regex|Unicode|ReadFile|Decode", "use strings and files in the input pipeline (tf.data)"),
    ("Lookup|HashTable", "look up in the input pipeline (tf.data), or keep the table as a dense tensor for tf.gather"),
    ("Summary", "return the values from the function and write summaries outside"),
)


def translated(error: Exception, name: str) -> tf.errors.OpError:
    """Return the OpError for an error of TensorFlow's compiler about the function `name`."""
    text = str(error)
    if (quoted := re.match(r"Failed getting HLO text: '(.*)'\s*$", text, re.DOTALL)) is not None:
        text = quoted[1]
    text = _NOISE.sub("", text)
    frames = [(_path(found["file"]), int(found["line"]), found["where"]) for found in _FRAME.finditer(text)]
    if (unsupported := _UNSUPPORTED.search(text)) is not None:
        op = unsupported["op"]
        if op == "_Retval":
            problem = f"XLA cannot compile {name}: it returns a tensor of strings"
        else:
            problem = f"XLA cannot compile the op {op} in {name}{_at(frames)}"
        return tf.errors.InvalidArgumentError(None, None, f"{problem}. {_advice(op)}\n{text}")
    if (constant := _CONSTANT.search(text)) is not None:
        op, number = constant["op"], constant["input"]
        why = f"its input {number} (such as a shape or an axis) must be constant, but depends on values at run time"
        return tf.errors.InvalidArgumentError(
            None, None, f"XLA cannot compile the op {op} in {name}{_at(frames)}: {why}\n{text}"
        )
    kind = type(error) if isinstance(error, tf.errors.OpError) else tf.errors.InvalidArgumentError
    return kind(None, None, f"XLA cannot compile {name}{_at(frames)}: {text}")


def check_captures(traced: Any, captures: Sequence[Any], name: str) -> None:
    """Raise OpError for captured resources other than variables (tables, iterators) and for variables of strings."""
    for capture in captures:
        if isinstance(capture, tf.Variable):
            if capture.dtype == tf.string:
                raise tf.errors.InvalidArgumentError(
                    None, None, f"{name} uses the variable {capture.name!r}, whose dtype is string. {_advice('String')}"
                )
        elif capture.dtype in (tf.resource, tf.variant, tf.string):
            op = _user_of(traced, capture)
            what = f"the op {op.type}{_at(_frames(op))}" if op is not None else "an op"
            raise tf.errors.InvalidArgumentError(
                op and op.node_def,
                op,
                f"XLA cannot compile {what} in {name}: it uses a {capture.dtype.name} that is not a variable. "
                f"{_advice(op.type if op is not None else '')}",
            )


def check_lists(traced: Any, name: str) -> None:
    """Raise OpError for a tf.TensorArray that grows from size 0: XLA would silently allocate no elements for it."""
    ops = list(_all_ops(traced))
    if any(op.type == "TensorListSetItem" and op.get_attr("resize_if_index_out_of_bounds") for op in ops):
        for op in ops:
            if op.type == "TensorListReserve" and tf.get_static_value(op.inputs[1]) == 0:
                raise tf.errors.UnimplementedError(
                    op.node_def,
                    op,
                    f"XLA cannot compile {name}: the tf.TensorArray{_at(_frames(op))} grows while it is written. Set "
                    "its size: tf.TensorArray(dtype, size=n)",
                )


def check_results(traced: Any, name: str) -> None:
    for number, result in enumerate(traced.outputs):
        if result.dtype in (tf.string, tf.resource, tf.variant):
            problem = f"{name} returns a tensor of dtype {result.dtype.name} (result {number})"
            raise tf.errors.InvalidArgumentError(None, None, f"{problem}. {_advice('String')}")


def unsupported_result(traced: Any, number: int, name: str) -> tf.errors.OpError:
    """Return the error for a result or a variable whose shape depends on values."""
    which, made = "a variable that it assigns", None
    if number < len(traced.outputs):
        which, made = f"its result {number}", _maker(traced.outputs[number])
    by = f", made by the op {made.type}{_at(_frames(made))}," if made is not None else ""
    return tf.errors.UnimplementedError(
        made and made.node_def,
        made,
        f"XLA cannot compile {name}: the shape of {which}{by} depends on values (tf.boolean_mask, tf.unique, tf.where "
        "with one argument). Use a fixed shape: mask with tf.where(condition, x, 0), or pad",
    )


def _maker(tensor: Any) -> Any:
    """Return the op that made a result, seen through identities and function calls."""
    op = tensor.op
    while op.type in ("Identity", "PartitionedCall", "StatefulPartitionedCall"):
        if op.type == "Identity":
            tensor = op.inputs[0]
        else:
            graph = _function_graph(op)
            if graph is None:
                return op
            tensor = graph.outputs[tensor.value_index]
        op = tensor.op
    return op


def _user_of(traced: Any, capture: Any) -> Any:
    """Return the first op that uses a captured tensor, seen through function calls, or None."""
    for outside, inside in zip(traced.captured_inputs, traced.inputs[-len(traced.captured_inputs) :], strict=True):
        if outside is capture:
            for _ in range(64):  # bounds the depth of nested functions
                users = inside.consumers()
                if not users:
                    return None
                graph = _function_graph(users[0])
                if graph is None:
                    return users[0]
                inside = graph.inputs[[each is inside for each in users[0].inputs].index(True)]
    return None


def _function_graph(op: Any) -> Any:
    """Return the graph of the function that a call op calls; None for other ops."""
    if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
        return None
    called = op.graph._get_function(op.get_attr("f").name)
    return getattr(called, "graph", None)


def _all_ops(traced: Any) -> Iterator[Any]:
    """Yield all ops, including those in inner functions, loops and branches."""
    graphs, seen = [traced.graph], set[str]()
    while graphs:
        graph = graphs.pop()
        for op in graph.get_operations():
            yield op
            for attribute in ("f", "body", "cond", "then_branch", "else_branch"):
                if attribute in op.node_def.attr and (called := op.node_def.attr[attribute].func.name) not in seen:
                    seen.add(called)
                    inner = getattr(graph._get_function(called), "graph", None)
                    if inner is not None:
                        graphs.append(inner)


def _frames(op: Any) -> list[tuple[str, int, str]]:
    return [(frame.filename, frame.lineno, frame.name) for frame in op.traceback or ()]


def _path(name: str) -> str:
    """Return an absolute path. TensorFlow omits the first slash."""
    return name if os.path.exists(name) or not os.path.exists(f"/{name}") else f"/{name}"


def _at(frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the text for the innermost frame outside the libraries, or "" if there is no such frame."""
    for file, line, where in reversed(frames):
        if not file.startswith(_LIBRARIES) and os.path.exists(file):
            code = linecache.getline(file, line).strip()
            return f" ({file}:{line}, in {where}{f': `{code}`' if code else ''})"
    return ""


def _advice(op: str) -> str:
    for kinds, text in _ADVICE:
        if re.search(kinds, op):
            return text[0].upper() + text[1:] + "."
    return "tf.function(jit_compile=True) cannot compile it either: https://www.tensorflow.org/xla/known_issues."
