"""Tests of `atoll.data` on Atoll: each host reads its part, in the session's process there."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from atoll.data import Batches, Shard
from tests.end_to_end.remote_python import RemotePython, StartPython

_LARGE = 32 << 20  # bytes


@pytest.fixture(scope="module", params=["1x2x2", pytest.param("2x1x2", marks=pytest.mark.thorough)])
def python(request: pytest.FixtureRequest, start_python: StartPython) -> RemotePython:
    """Return a child with two hosts of two devices, of one island or of two."""
    return start_python(request.param)


def sharded(*axes: Any, transposed: bool = False) -> NamedSharding:
    devices = np.array(jax.devices()).reshape(2, 2)
    return NamedSharding(Mesh(devices.T if transposed else devices, ("x", "y")), PartitionSpec(*axes))


def shuffled(shard: Shard) -> Any:
    return grain.MapDataset.range(48).seed(1).shuffle()[shard.index :: shard.count].batch(4)


def read_a_shuffled_dataset() -> tuple[list[list[int]], bool]:
    batches = list(Batches(shuffled, sharded(("x", "y"))))
    return [each.tolist() for each in batches], batches[0].sharding == sharded(("x", "y"))


def test_each_host_reads_its_part_into_its_devices(python: RemotePython):
    batches, has_sharding = python.call(read_a_shuffled_dataset)
    parts = [list(shuffled(Shard(index, 2))) for index in range(2)]
    assert batches == [np.concatenate(each).tolist() for each in zip(*parts, strict=True)]
    assert has_sharding


def where_it_is_read(shard: Shard) -> Iterator[Any]:
    for _ in range(2):
        yield np.array([[os.getpid(), jax.process_index(), shard.index, shard.count]] * 4)


def read_where(transposed: bool) -> tuple[int, list[Any], list[Any]]:
    """Return this process, and the readers of a batch with sharded rows and of one with sharded columns."""
    rows, columns = (
        next(iter(Batches(where_it_is_read, sharded(*axes, transposed=transposed)))).tolist()
        for axes in (("x", None), (None, "y"))
    )
    return os.getpid(), rows, columns


def test_hosts_with_the_same_rows_read_the_same_part(python: RemotePython):
    script, rows, columns = python.call(read_where, False)
    assert script not in {row[0] for row in rows}
    assert [row[1:] for row in rows] == [[0, 0, 2]] * 4 + [[1, 1, 2]] * 4
    assert {tuple(row[2:]) for row in columns} == {(0, 1)}
    # In this mesh, a row is on both hosts, and each host provides whole rows.
    _, rows, columns = python.call(read_where, True)
    assert len(rows) == len(columns) == 4
    assert {tuple(row[2:]) for row in rows + columns} == {(0, 1)}


def unequal(shard: Shard) -> Iterator[Any]:
    for i in range(3 + shard.index):
        yield np.full(2, i)


def read_unequal_parts() -> list[list[int]]:
    return [each.tolist() for each in Batches(unequal, sharded(("x", "y")))]


def test_it_ends_where_the_first_host_ends(python: RemotePython):
    assert python.call(read_unequal_parts) == [[i] * 4 for i in range(3)]


def error_of(source: Any) -> str:
    try:
        list(Batches(source, sharded(("x", "y"))))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def unlike(shard: Shard) -> Any:
    return [np.zeros((2, 3 + shard.index), np.float32)]


def fails_on_one_host(shard: Shard) -> Iterator[Any]:
    yield from unequal(shard)
    if shard.index == 0:
        raise LookupError("record 17 is broken")
    yield np.full(2, 4)


def fails_at_once(shard: Shard) -> Any:
    return grain.MapDataset.source(Path("/data/is/not/here").read_text())


def not_sliceable() -> Any:
    return grain.MapDataset.range(8).to_iter_dataset().batch(2)


def errors() -> list[str]:
    return [error_of(each) for each in (unlike, fails_on_one_host, fails_at_once, not_sliceable())]


def test_what_goes_wrong_on_a_host_is_said_to_the_script(python: RemotePython):
    differ, raised, absent, cannot_slice = python.call(errors)
    assert "host 0: batch float32[2, 3]; host 1: batch float32[2, 4]" in differ
    assert "record 17 is broken" in raised
    assert "in fails_on_one_host" in raised
    assert "FileNotFoundError" in absent
    assert "in fails_at_once" in absent
    assert "cannot be sliced, so each of 2 hosts would read all of it" in cannot_slice


def ends_its_process(shard: Shard) -> Iterator[Any]:
    for i in range(8):
        if i == 5 and shard.index == 1 and not Path("ended").exists():
            Path("ended").touch()
            os._exit(7)
        yield np.full(2, i)


def read_past_an_end() -> tuple[str, list[str], list[list[int]]]:
    iterator = iter(Batches(ends_its_process, sharded(("x", "y"))))
    found = [next(iterator) for _ in range(5)]
    try:
        next(iterator)
    except jax.errors.JaxRuntimeError as error:
        text, notes = str(error), error.__notes__
    iterator.set_state(iterator.get_state())
    return text, notes, [each.tolist() for each in (*found, *iterator)]


def test_a_lost_process_is_named_and_the_iterator_made_again_from_its_state(python: RemotePython):
    text, notes, batches = python.call(read_past_an_end, seconds=100)
    assert "the Python process of session" in text
    assert "set_state(iterator.get_state())" in notes[0]
    assert batches == [[i] * 4 for i in range(8)]


def large(shard: Shard) -> Iterator[Any]:
    for i in range(4):
        yield np.full((2, _LARGE // 4), i, np.int32)


def read_much() -> tuple[int, int]:
    """Return the number of bytes read, and the growth of this process."""
    iterator = iter(Batches(large, sharded(("x", "y")), prefetch=1))
    double = jax.jit(lambda batch: batch.sum(axis=1))
    jax.block_until_ready(double(next(iterator)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    total = sum(jax.block_until_ready(batch).nbytes for batch in iterator)
    return total, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_the_script_never_has_the_bytes(python: RemotePython):
    total, grown = python.call(read_much)
    assert total == 3 * 4 * _LARGE
    assert grown < _LARGE / 2


def with_processes(shard: Shard) -> Any:
    return shuffled(shard).to_iter_dataset().mp_prefetch(grain.multiprocessing.MultiprocessingOptions(num_workers=1))


def read_with_processes() -> list[list[int]]:
    return [each.tolist() for each in Batches(with_processes, sharded(("x", "y")))]


def test_a_pipeline_may_have_processes_of_its_own(python: RemotePython):
    assert len(python.call(read_with_processes, seconds=100)) == 6
