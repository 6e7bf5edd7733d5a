from __future__ import annotations

import math

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import Code, StatusError
from atoll.host_services import host_data
from atoll.ir.types import DTYPE_BITS

NUMERIC = [name for name, bits in DTYPE_BITS.items() if bits and hasattr(jnp, name)]


@st.composite
def strided(draw: st.DrawFn) -> np.ndarray:
    """Generate a view of an array: transposed, reversed, with steps, of any number of dimensions, or empty."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    base = np.arange(math.prod(shape), dtype=draw(st.sampled_from(["int8", "int32", "complex128"])))
    array = base.reshape(shape).transpose(draw(st.permutations(range(len(shape)))))
    steps = st.sampled_from([1, -1, 2, -2])
    return array[tuple(slice(None, None, draw(steps)) for _ in array.shape)]


def region(array: np.ndarray) -> tuple[bytes, tuple[int, ...]]:
    """Return the data that a client sends for an array, from its lowest to its highest byte, and the strides."""
    if not array.size:
        return b"", array.strides
    low, high = np.lib.array_utils.byte_bounds(array)
    memory = (np.ctypeslib.ctypes.c_char * (high - low)).from_address(low)
    return bytes(memory), array.strides


@given(strided())
def test_a_clients_buffer_is_read_by_its_strides(array):
    content, strides = region(array)
    got = host_data.view(content, array.dtype.name, array.shape, strides)
    np.testing.assert_array_equal(got, array)
    size, _ = host_data.region_bytes(array.itemsize, array.shape, strides)
    assert size == len(content)


@given(strided())
def test_an_array_is_written_by_the_strides_that_the_client_asks_for(array):
    size, origin = host_data.region_bytes(array.itemsize, array.shape, array.strides)
    target = bytearray(size)
    whole = tuple((0, n) for n in array.shape)
    host_data.fill(memoryview(target), array.dtype, array.shape, array.strides, (whole,), [array])
    content, _ = region(array)
    written = np.ndarray(array.shape, array.dtype, buffer=target, offset=origin, strides=array.strides)
    np.testing.assert_array_equal(written, array)
    assert len(content) == size


@given(strided(), st.data())
def test_shards_are_written_to_their_boxes(array, data):
    cut = data.draw(st.integers(0, array.shape[0])) if array.ndim else 0
    rest = tuple((0, n) for n in array.shape[1:])
    boxes = ((((0, cut), *rest), ((cut, array.shape[0]), *rest))) if array.ndim else ((),)
    shards = [host_data.cut(array, box) for box in boxes]
    target = bytearray(array.nbytes)
    host_data.fill(memoryview(target), array.dtype, array.shape, None, boxes, shards)
    np.testing.assert_array_equal(np.frombuffer(target, array.dtype).reshape(array.shape), array)


@pytest.mark.parametrize("name", NUMERIC)
def test_every_dtype_comes_and_goes_also_those_of_less_than_a_byte(name):
    dtype = np.dtype(getattr(jnp, name))
    array = np.arange(6).astype(dtype).reshape(2, 3)
    content = array.tobytes()  # types smaller than a byte are sent as bytes
    got = host_data.view(content, name, (2, 3), None)
    assert got.dtype == dtype
    assert got.tobytes() == content
    target = bytearray(len(content))
    host_data.fill(memoryview(target), dtype, (2, 3), None, (((0, 2), (0, 3)),), [got])
    assert target == content


@pytest.mark.parametrize(
    ("itemsize", "shape", "strides", "expected"),
    [
        (4, (), None, (4, 0)),
        (4, (), (), (4, 0)),
        (4, (2, 3), None, (24, 0)),
        (4, (2, 3), (12, 4), (24, 0)),
        (4, (2, 3), (4, 8), (24, 0)),
        (4, (3,), (-4,), (12, 8)),
        (4, (3,), (8,), (20, 0)),
        (4, (3,), (0,), (4, 0)),  # one value for all elements
        (4, (2, 3), (-12, 4), (24, 12)),
        (4, (0, 3), (12, 4), (0, 0)),
        (4, (5, 0), None, (0, 0)),
    ],
)
def test_the_region_of_an_array_as_a_table(itemsize, shape, strides, expected):
    assert host_data.region_bytes(itemsize, shape, strides) == expected


@pytest.mark.parametrize(
    ("content", "dtype", "shape", "strides"),
    [
        (b"", "float32", (1,), None),
        (bytes(7), "float32", (2,), None),
        (bytes(9), "float32", (2,), None),
        (bytes(1), "float32", (0,), None),
        (bytes(8), "float32", (2,), (8,)),
        (bytes(8), "float32", (2,), (4, 4)),
        (bytes(8), "float32", (2,), ()),
        (bytes(8), "token", (2,), None),
        (bytes(8), "opaque", (2,), None),
        (msgspec.msgpack.encode([b"one"]), "string", (2,), None),
        (b"\xc1", "string", (2,), None),
        (msgspec.msgpack.encode(["no", "bytes"])[:-1], "string", (2,), None),
        (msgspec.msgpack.encode([b"\xff", b"\xfe"]), "string", (2,), None),
    ],
)
def test_contents_that_do_not_fit_are_refused(content, dtype, shape, strides):
    with pytest.raises(StatusError) as caught:
        host_data.view(content, dtype, shape, strides)
    assert caught.value.status.code == Code.INVALID_ARGUMENT


@given(st.binary(max_size=60), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.data())
def test_any_contents_and_strides_are_an_array_or_a_status(content, shape, data):
    strides = data.draw(st.none() | st.lists(st.integers(-40, 40), max_size=3).map(tuple))
    try:
        got = host_data.view(content, data.draw(st.sampled_from(["int8", "float64", "string"])), shape, strides)
    except StatusError:
        return
    assert got.shape == shape
    got.copy()  # each element is inside the buffer


@pytest.mark.parametrize("shape", [(), (2,), (0,), (2, 1)])
def test_strings_come_and_go(shape):
    texts = ["", "plain", "ünïcode \0 zero"][: math.prod(shape)]
    array = host_data.view(msgspec.msgpack.encode([t.encode() for t in texts]), "string", shape, None)
    assert array.shape == shape
    assert list(array.reshape(-1)) == texts
    assert msgspec.msgpack.decode(host_data.encode_strings(array)) == [t.encode() for t in texts]


@pytest.mark.parametrize("header", [b"\x93", b"\xdc\0\x03", b"\xdd\0\0\0\x03"])
def test_strings_are_counted_before_they_are_decoded(header: bytes):
    with pytest.raises(StatusError, match="got 3 strings for an array of shape"):
        host_data.view(header, "string", (2,), None)
    content = header + msgspec.msgpack.encode(b"x") * 3
    assert host_data.view(content, "string", (3,), None).tolist() == ["x", "x", "x"]
