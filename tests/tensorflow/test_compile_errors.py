"""Tests of XLA's compilation errors, which become a tf.errors.OpError that names the op and the line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="the extra tensorflow is not installed")

from atoll import tensorflow as atf  # noqa: E402

X = np.array([1.0, -2.0, 3.0, 4.0], np.float32)
TABLE: Any
BATCHES: Any
TEXT: Any


@pytest.fixture(scope="module", autouse=True)
def _objects() -> None:
    """Make the objects that functions use. They start threads, so they are not made while tests are collected."""
    global TABLE, BATCHES, TEXT
    TABLE = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
    BATCHES = iter(tf.data.Dataset.range(10))
    TEXT = tf.Variable("x", name="text")


def python(x):
    return tf.py_function(lambda value: value + 1, [x], tf.float32)


def strings(x):
    return tf.strings.length(tf.strings.as_string(x))


def prints(x):
    tf.print("x is", x)
    return x


def dataset(x):
    for number in tf.data.Dataset.range(3):
        x = x + tf.cast(number, tf.float32)
    return x


def iterator(x):
    return x + tf.cast(next(BATCHES), tf.float32)


def table(x):
    return TABLE.lookup(tf.cast(x, tf.int32))


def shape(x):
    return tf.zeros([tf.cast(x[0], tf.int32)])


def mask(x):
    return tf.boolean_mask(x, x > 0)


def grows(x):
    values = tf.TensorArray(tf.float32, size=0, dynamic_size=True)
    for number in tf.range(3):
        values = values.write(number, x[number])
    return values.stack()


def line_of(function: Callable[..., Any], text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    start = function.__code__.co_firstlineno
    return next(number for number, line in enumerate(lines[start:], start + 1) if text in line)


CASES = [
    (python, tf.errors.InvalidArgumentError, "EagerPyFunc", "tf.py_function", "compiled function cannot run Python"),
    (strings, tf.errors.InvalidArgumentError, "AsString", "as_string", "Use strings and files in the input pipeline"),
    (prints, tf.errors.InvalidArgumentError, "StringFormat", "tf.print", "Return the value from the function"),
    (dataset, tf.errors.InvalidArgumentError, "RangeDataset", "Dataset.range", "pass its batches to the function"),
    (iterator, tf.errors.InvalidArgumentError, "IteratorGetNext", "next(BATCHES)", "pass its batches to the function"),
    (table, tf.errors.InvalidArgumentError, "LookupTableFindV2", "TABLE.lookup", "tf.gather"),
    (shape, tf.errors.InvalidArgumentError, "Fill", "tf.zeros", "its input 0 (such as a shape"),
    (mask, tf.errors.UnimplementedError, "GatherV2", "boolean_mask", "the shape of its result 0"),
    (grows, tf.errors.UnimplementedError, "", "tf.TensorArray", "tf.TensorArray(dtype, size=n)"),
]


@pytest.mark.parametrize(("function", "kind", "op", "code", "says"), CASES, ids=[case[0].__name__ for case in CASES])
def test_what_xla_cannot_compile_is_an_error_of_tensorflow_with_op_and_line(
    function: Callable[..., Any], kind: type[Exception], op: str, code: str, says: str
):
    with pytest.raises(kind) as caught:
        atf.function(function)(X)
    message = str(caught.value)
    assert says in message
    assert re.search(rf"\b{op}\b", message)
    assert f"{__file__}:{line_of(function, code)}, in {function.__name__}" in message


def test_strings_as_results_and_as_variables_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="returns a tensor of dtype string"):
        atf.function(lambda x: tf.strings.as_string(x))(X)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the variable 'text:0', whose dtype is string"):
        atf.function(lambda x: TEXT.assign("y"))(X)


def test_ragged_and_sparse_tensors_are_refused():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    with pytest.raises(tf.errors.UnimplementedError, match="RaggedTensor, but XLA has only dense tensors"):
        atf.function(lambda x: x)(ragged)
    with pytest.raises(tf.errors.UnimplementedError, match="returns a SparseTensor"):
        atf.function(lambda x: tf.sparse.from_dense(x))(X)


def test_what_a_function_raises_while_it_is_traced_is_raised_as_it_is():
    with pytest.raises(ValueError, match="Dimensions must be equal"):
        atf.function(lambda x: x + tf.zeros(3))(X)
