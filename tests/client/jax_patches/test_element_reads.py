"""Tests of reads of elements that one array was divided into: which elements one request reads, and what it leaves."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.client.jax_patches import element_reads as module
from atoll.client.jax_patches.element_reads import MIN_TOGETHER, PATCH, READ_AHEAD, SINGLE_READS, Elements
from atoll.client.jax_patches.tree_reads import MAX_BYTES
from atoll.client.plugin_programs import staging


class Requests:
    """Requests of contents, by the elements that they read. `error` makes requests fail."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.fails = False
        self.error: BaseException | None = None

    def values_of(self, devices: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        assert staging.locked()
        assert {array.device for array in arrays} == set(devices)
        self.sizes.append(len(arrays))
        if self.error is not None:
            raise self.error
        joined = np.concatenate([np.atleast_1d(original(each)) for each in arrays])
        return [] if self.fails else [joined[i : i + 1].reshape(()) for i in range(len(arrays))]


def original(array: Any) -> Any:
    """Return the value of an array, which stays unread."""
    return np.array(array.addressable_data(0))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Requests]:
    found = Requests()
    monkeypatch.setattr(module, "values_of", found.values_of)
    yield found
    assert not staging.locked()


def elements_of(count: int) -> tuple[Elements, list[Any]]:
    arrays = [jnp.float32(i) + 0 for i in range(count)]
    return Elements(arrays), arrays


def read_one(array: Any) -> Any:
    """Read one array, as JAX does."""
    array._npy_value = original(array)
    return array._npy_value


def read(elements: Elements, array: Any) -> float:
    """Read an element as the patch does."""
    return float(array._npy_value if array._npy_value is not None else elements.read(array, read_one))


def test_the_first_elements_are_read_one_by_one(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    assert [read(elements, each) for each in arrays[:SINGLE_READS]] == list(range(SINGLE_READS))
    assert requests.sizes == []


def test_a_loop_reads_more_elements_with_each_request(requests: Requests) -> None:
    elements, arrays = elements_of(100)
    assert [read(elements, each) for each in arrays] == list(range(100))
    first = READ_AHEAD * SINGLE_READS
    assert requests.sizes == [first, 100 - SINGLE_READS - first]


def test_a_request_reads_neither_deleted_nor_requested_nor_dead_elements(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    arrays[5].delete()
    arrays[6]._atoll_contents = object()  # as `direct_reads` does
    arrays[7] = None
    gc.collect()
    for each in arrays[: SINGLE_READS + 1]:
        read(elements, each)
    assert requests.sizes == [20 - SINGLE_READS - 3]
    assert arrays[6]._npy_value is None
    assert arrays[8]._npy_value is not None
    with pytest.raises(RuntimeError, match="deleted"):
        float(arrays[5])


def test_few_elements_are_read_one_by_one(requests: Requests) -> None:
    elements, arrays = elements_of(SINGLE_READS + MIN_TOGETHER - 1)
    assert [read(elements, each) for each in arrays] == list(range(len(arrays)))
    assert requests.sizes == []


def test_a_deleted_element_starts_no_request(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    for each in arrays[:SINGLE_READS]:
        read(elements, each)
    arrays[-1].delete()
    with pytest.raises(RuntimeError, match="deleted"):
        elements.read(arrays[-1], lambda array: array._value)
    assert requests.sizes == []


def test_elements_are_read_one_by_one_after_a_request_has_failed(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    requests.fails = True
    assert [read(elements, each) for each in arrays] == list(range(20))
    assert len(requests.sizes) == 1


def test_an_interrupt_leaves_the_elements_unread(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    for each in arrays[:SINGLE_READS]:
        read(elements, each)
    requests.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        read(elements, arrays[10])
    assert not staging.locked()
    requests.error = None
    assert [read(elements, each) for each in arrays] == list(range(20))


def test_a_value_keeps_neither_other_elements_nor_their_contents_alive(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    for each in arrays:
        read(elements, each)
    value = arrays[-1]._npy_value
    assert value.base is None
    assert not value.flags.writeable
    others = [weakref.ref(each) for each in arrays[:-1]]
    del each, arrays[:-1]
    gc.collect()
    assert [reference() for reference in others] == [None] * 19


def test_a_read_does_not_wait_for_requests_of_other_threads(requests: Requests) -> None:
    elements, arrays = elements_of(20)
    with staging:
        assert [read(elements, each) for each in arrays[:10]] == list(range(10))
    assert requests.sizes == []
    assert [read(elements, each) for each in arrays[10:]] == list(range(10, 20))
    assert requests.sizes == [10]


def test_several_threads_read_the_same_elements(requests: Requests) -> None:
    elements, arrays = elements_of(200)
    found: list[list[float]] = []
    threads = [
        threading.Thread(target=lambda: found.append([read(elements, each) for each in arrays])) for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == [list(range(200))] * 8


def marked(array: Any, client: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return which elements of an array belong together after the array was divided."""
    monkeypatch.setattr(module, "client_of", lambda array: SimpleNamespace(runtime_type=client))
    unstack = PATCH.changes[0].wrap(lambda x: list(jax.lax.unstack(x)))  # type: ignore[attr-defined]
    return [hasattr(each, module._ELEMENTS) for each in unstack(array)]


def test_only_small_elements_of_atolls_arrays_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    least = SINGLE_READS + MIN_TOGETHER
    assert marked(jnp.arange(10.0), "proxy/atoll", monkeypatch) == [True] * 10
    assert marked(jnp.arange(10.0), "cpu", monkeypatch) == [False] * 10
    assert marked(jnp.arange(least), "proxy/atoll", monkeypatch) == [True] * least
    assert marked(jnp.arange(least - 1), "proxy/atoll", monkeypatch) == [False] * (least - 1)
    assert marked(jnp.zeros((10, MAX_BYTES), jnp.int8), "proxy/atoll", monkeypatch) == [True] * 10
    assert marked(jnp.zeros((10, MAX_BYTES + 1), jnp.int8), "proxy/atoll", monkeypatch) == [False] * 10
    traced: list[list[bool]] = []
    jax.jit(lambda x: traced.append(marked(x, "proxy/atoll", monkeypatch)))(jnp.arange(10.0))
    assert traced == [[False] * 10]
